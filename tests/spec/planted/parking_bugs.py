"""Bugs to plant into parking: preemption that keeps the KV of a request."""

from __future__ import annotations

from .plant import bug

PARKING, PARKED, STATE = "tiers/parking.py", "tiers/parked.py", "tiers/state.py"
COMPLETIONS = "tiers/completion_handlers.py"

PARKING_BUGS = (
    bug(
        "a parked lease is released when its copy is decided",
        PARKING,
        (
            "    state.parked[parked] = None\n    if sources:\n",
            "    state.parked[parked] = None\n    if sources:\n        lease.parking = False\n"
            "        cache.release(lease)\n",
        ),
        elsewhere=(
            (
                STATE,
                "        parked.saved, parked.lease.parking = True, False\n"
                "        self.cache.release(parked.lease)\n",
                "        parked.saved = True\n",
            ),
        ),
        seen_in="FastDeploy v1, FastDeploy PR 7107 review, vLLM #52360",
        world="tiers",
    ),
    bug(
        "a parked lease is never released",
        STATE,
        ("        self.cache.release(parked.lease)\n", ""),
        world="tiers",
    ),
    bug(
        "a parked request counts as saved while another copy of its path is in flight",
        PARKED,
        (
            "is_in_flight = any(run.in_flight and run.node is not None for run in self.runs)",
            "is_in_flight = False",
        ),
        world="tiers",
    ),
    bug(
        "a parked request counts as saved when its whole blocks are, before its unfinished one",
        PARKED,
        ("return is_in_flight or self.op_id is not None", "return is_in_flight"),
        world="tiers",
    ),
    bug(
        "a parked request does not learn that another copy of its path has ended",
        COMPLETIONS,
        (
            "        state.release_saved()\n\n    def on_fence",
            "\n    def on_fence",
        ),
        elsewhere=(
            (
                PARKING,
                "        super().on_result(ok)\n",
                "        super().on_result(ok)\n        self._state.release_saved()\n",
            ),
        ),
        world="tiers",
    ),
    bug(
        "a park that failed is marked as good",
        STATE,
        (
            "        parked.failed = parked.failed or len(saved) < len(parked.runs)\n",
            "        parked.failed = False\n",
        ),
        seen_in="SGLang #27108, FastDeploy v1",
        world="tiers",
    ),
    bug(
        "a park whose unfinished block was not saved is marked as good",
        PARKING,
        ("            parked.failed = True\n", ""),
        world="tiers",
    ),
    bug(
        "a tail that was not saved is loaded",
        PARKING,
        ("if parked.tail_block is not None and not ok[-1]:", "if False:"),
        world="tiers",
    ),
    bug(
        "a tail that was not saved is free before the fence",
        PARKING,
        (
            "            self._lost_tail, parked.tail_block = parked.tail_block, None\n",
            "            self._state.host.pool.recycle(np.array([parked.tail_block], np.int32))\n"
            "            parked.tail_block = None\n",
        ),
        world="tiers",
    ),
    bug(
        "a tail that was not saved is never free",
        PARKING,
        (
            "        self._state.host.pool.recycle(np.array(self.owned_host_blocks(), np.int32))\n",
            "",
        ),
        world="tiers",
    ),
    bug(
        "parked blocks may be dropped",
        PARKING,
        (
            "    state.release_hold(held)\n    lease.parking = True\n",
            "    state.release_hold(held)\n"
            "    state.release_hold(parked.runs)\n    lease.parking = True\n",
        ),
        world="tiers",
    ),
    bug(
        "making room for a parked request drops its own host blocks",
        PARKING,
        (
            "    held = host.hold(copies)",
            "    held = host.hold([])",
        ),
        world="tiers",
    ),
    bug(
        "a park that is refused refreshes what it would have kept",
        PARKING,
        (
            "        return None\n",
            "        state.release_hold(host.hold(copies))\n        return None\n",
        ),
        world="tiers",
    ),
    bug(
        "a request is not parked if it takes the last host block",
        PARKING,
        (
            "if len(sources) // ITEM_BYTES > host.available - kept:",
            "if len(sources) // ITEM_BYTES >= host.available - kept:",
        ),
        world="tiers",
    ),
    bug(
        "a request is parked without its unfinished block",
        PARKING,
        (
            "tail_tokens = len(tokens) - lease.num_shared_blocks * cache.block_size",
            "tail_tokens = 0",
        ),
        seen_in="vLLM #18631",
        world="tiers",
    ),
    bug(
        "a resumed request unpins nothing",
        PARKING,
        (
            "        state.mark_saved(parked)\n    state.release_hold(parked.runs)",
            "        state.mark_saved(parked)",
        ),
        world="tiers",
    ),
    bug(
        "a parked request that is given up is saved all the same",
        PARKING,
        ("        state.operations.cancel(parked.op_id)\n", "        pass\n"),
        world="tiers",
    ),
    bug(
        "a parked request that is given up before it is saved keeps its blocks",
        PARKING,
        ("    if not parked.saved:\n        state.mark_saved(parked)\n", ""),
        seen_in="SGLang #9874",
        world="tiers",
    ),
    bug(
        "a tail that is of no use is never free",
        PARKING,
        ("        _recycle_tail(state, parked)\n        return None, 0", "        return None, 0"),
        world="tiers",
    ),
    bug(
        "a parked request that is given up keeps its tail",
        PARKING,
        (
            "    _end(state, parked)\n    _recycle_tail(state, parked)\n",
            "    _end(state, parked)\n",
        ),
        seen_in="SGLang #9874",
        world="tiers",
    ),
    bug(
        "a tail is loaded behind a hit that ends before it",
        PARKING,
        (
            "if parked.tail_block is None or num_blocks != whole or",
            "if parked.tail_block is None or",
        ),
        world="tiers",
    ),
    bug(
        "a tail from before a reset is loaded",
        PARKING,
        (" or parked.epoch != state.cache.epoch:", ":"),
        seen_in="FastDeploy PR 6202",
        world="tiers",
    ),
    bug(
        "a parked request can be given up twice",
        PARKING,
        ("if state is None or parked not in state.parked:", "if state is None:"),
        elsewhere=(
            (PARKING, "    del state.parked[parked]\n", "    state.parked.pop(parked, None)\n"),
        ),
        world="tiers",
    ),
    bug(
        "blocks parked in storage may be dropped before they are stored",
        STATE,
        ("parked.saved and all(r.stored for r in parked.runs)", "parked.saved"),
        seen_in="FastDeploy PR 7107 review",
        world="tiers",
    ),
)
