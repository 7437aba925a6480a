"""Tell how much of a hand-off's transfer hides behind the computation, by groups of layers.

Run:
    python benchmarks/layer_groups.py

Scheduler and protocol of both nodes are the real ones; clock, steps and link are simulated, so the
result does not depend on the machine. P computes the layers of each step one group after another,
and the link sends one part at a time. Exits with 1 if 4 groups hide less than 70 %.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import sys
from collections.abc import Callable

import numpy as np

from radixkv.kvcache import CacheManager
from radixkv.scheduler import DecodeScheduler, PrefillScheduler, Request
from radixkv.scheduler.handoff import Post, Pull, Started, Timing
from radixkv.scheduler.replay.simulation.cost_model import CostModel, named_costs

BLOCK_SIZE = 16
TARGET_GROUPS, TARGET = 4, 0.70
HEAD = ("Tokens per step", "Groups", "Computed, ms", "Sent alone, ms", "Waits, ms", "Hidden")


class HandoffClock:
    """One prompt on its way from P to D, in simulated time.

    Attributes:
        computed_s, started_s: when P has its first token, and when D may decode.
    """

    def __init__(
        self, costs: CostModel, num_tokens: int, budget: int, num_groups: int, link: float
    ) -> None:
        num_blocks = -(-num_tokens // BLOCK_SIZE) + 1
        timing = Timing(retry_s=1e3, silence_s=1e4, transfer_s=1e5, remember_s=1e6)
        sizes = {"epoch": 1, "timing": timing, "max_running": 1}
        managers = [CacheManager(num_blocks, BLOCK_SIZE) for _ in range(2)]
        self.p = PrefillScheduler(managers[0], token_budget=budget, num_groups=num_groups, **sizes)
        self.d = DecodeScheduler(managers[1], token_budget=budget, **sizes)
        self._costs, self._num_groups = costs, num_groups
        kv_bytes = costs.model.kv_bytes_per_token * BLOCK_SIZE / num_groups
        self._block_s = kv_bytes / link
        self._now = self._link_free = self.computed_s = self.started_s = 0.0
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self.p.begin(Request("r", np.arange(num_tokens, dtype=np.int32), 8), "d")

    def run(self) -> None:
        """Run until D has started the request."""
        self._step()
        while self._events and not self.started_s:
            self._now, _, event = heapq.heappop(self._events)
            event()
            self._act()

    def _at(self, at: float, event: Callable[[], object]) -> None:
        heapq.heappush(self._events, (at, next(self._order), event))

    def _step(self) -> None:
        """Plan a step of P, and the times at which its groups of layers are written."""
        plan = self.p.schedule()
        self._act()
        if not plan.num_chunks:
            if self.p.has_work:
                self._at(self._now, self._step)  # the grant is on its way
            return
        step_s = self._costs.plan_s(plan)
        for group in range(self._num_groups - 1):
            at = self._now + step_s * (group + 1) / self._num_groups
            self._at(at, lambda group=group: self.p.wrote(plan, group))

        def end() -> None:
            self.computed_s = self._now
            self.p.update(plan, [7] * plan.num_chunks)
            self._act()
            self._step()

        self._at(self._now + step_s, end)

    def _act(self) -> None:
        """Carry out the actions of both sides: messages take no time, parts use the link."""
        while actions := [(self.d, each) for each in self.p.take_actions()] + [
            (self.p, each) for each in self.d.take_actions()
        ]:
            for peer, action in actions:
                match action:
                    case Post(_, message):
                        peer.receive("p" if peer is self.d else "d", message)
                    case Pull(part_id=part_id, blocks=blocks):
                        begin = max(self._now, self._link_free)
                        self._link_free = begin + len(blocks) * self._block_s
                        self._at(self._link_free, lambda part_id=part_id: self.d.pulled(part_id))
                    case Started():
                        self.started_s = self._now


def main() -> int:
    """Print a row for each budget and number of groups."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama3-8b", help="default: %(default)s")
    parser.add_argument("--gpu", default="h200", help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=8192, help="default: %(default)s")
    parser.add_argument("--gb-per-s", type=float, default=10.0, help="default: %(default)s")
    given = parser.parse_args()
    costs, link = named_costs(given.model, given.gpu), given.gb_per_s * 1e9
    alone_s = given.tokens * costs.model.kv_bytes_per_token / link
    print(f"| {' | '.join(HEAD)} |\n| {'---: | ' * len(HEAD)}".rstrip())
    hidden = {}
    for budget in (given.tokens, 512):
        for num_groups in (1, TARGET_GROUPS, costs.model.layers):
            clock = HandoffClock(costs, given.tokens, budget, num_groups, link)
            clock.run()
            waits_s = clock.started_s - clock.computed_s
            hidden[budget, num_groups] = 1 - waits_s / alone_s
            print(
                f"| {budget:,} | {num_groups} | {clock.computed_s * 1e3:.1f} | {alone_s * 1e3:.1f} "
                f"| {waits_s * 1e3:.1f} | {hidden[budget, num_groups]:.1%} |"
            )
    return int(hidden[given.tokens, TARGET_GROUPS] < TARGET)


if __name__ == "__main__":
    sys.exit(main())
