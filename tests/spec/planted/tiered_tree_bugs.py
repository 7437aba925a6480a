"""Bugs to plant into the tiered tree: host hits, storage keys, blocks fetched and dropped."""

from __future__ import annotations

from .plant import bug

COMPLETIONS = "tiers/completion_handlers.py"
PREFETCH, TREE, STATE, KEYS = (
    "tiers/prefetch.py",
    "tiers/tiered_tree.py",
    "tiers/state.py",
    "tiers/storage_key_cache.py",
)

STORE_CALL = (
    "    state.submit(OpKind.HOST_TO_STORAGE, StoreCompletion(state, runs), "
    "sources=blocks, keys=keys)\n"
)
STORE_OF_STATE = STORE_CALL, STORE_CALL + "\n\nTierState.store = store_runs\n"

TIERED_TREE_BUGS = (
    bug(
        "a match on the host goes on past a copy that is not valid",
        TREE,
        (
            "if child is None or child.host is None or not child.host.is_valid:",
            "if child is None or child.host is None:",
        ),
        seen_in="FastDeploy v1",
        world="tiers",
    ),
    bug(
        "a match on the host ends at the first run",
        TREE,
        (
            "            position, node = after, child\n"
            "        return runs, position // block_bytes",
            "            position, node = after, child\n            break\n"
            "        return runs, position // block_bytes",
        ),
        world="tiers",
    ),
    bug(
        "a match on the host takes the whole of a run that matches in part",
        TREE,
        (
            "                return runs, position // block_bytes + inside_blocks",
            "                return runs, position // block_bytes + child.num_blocks",
        ),
        seen_in="vLLM #12621",
        world="tiers",
    ),
    bug(
        "keys are made from the wrong parent",
        KEYS,
        ("parent = keys[-KEY_BYTES:]\n        return", "parent = keys[:KEY_BYTES]\n        return"),
        seen_in="kvcached #451",
        world="tiers",
    ),
    bug(
        "keys are made without the namespace",
        KEYS,
        ("block_keys(rest, root.key, parent)", 'block_keys(rest, b"", parent)'),
        seen_in="vLLM #44701",
        world="tiers",
    ),
    bug(
        "a run that is split leaves its keys with its lower part",
        TREE,
        ("            self.keys.split(lower, upper, num_blocks)\n", "            pass\n"),
        world="tiers",
    ),
    bug(
        "a question to storage goes on from the first block of what is cached",
        PREFETCH,
        ("[end - KEY_BYTES : end]", "[:KEY_BYTES]"),
        world="tiers",
    ),
    bug(
        "a block that was computed twice counts as not on the device",
        TREE,
        (
            "        self.num_cached += node.num_blocks\n        return node",
            "        return node",
        ),
        world="tiers",
    ),
    bug(
        "a removed run leaves its copy behind",
        TREE,
        (
            "            self.host.drop(node.host)\n        self.hits",
            "            pass\n        self.hits",
        ),
        seen_in="FastDeploy PR 7885 review",
        world="tiers",
    ),
    bug(
        "fetched blocks are inserted below the wrong node",
        TREE,
        ("        node = TieredNode(parent, rest", "        node = TieredNode(root, rest"),
        elsewhere=((TREE, "        parent.add_child(node)\n", "        root.add_child(node)\n"),),
        seen_in="FastDeploy v1",
        world="tiers",
    ),
    bug(
        "fetched blocks are written to storage again",
        TREE,
        ("        run.stored = True  # it came from storage\n", ""),
        elsewhere=(
            (
                TREE,
                "        self.host.mark_valid(run)\n        self.version += 1\n",
                "        self.host.mark_valid(run)\n        run.node.host and "
                "self.__dict__.setdefault('fetched', []).append(run)\n        self.version += 1\n",
            ),
            (
                "tiers/prefetch.py",
                "            state.fetched_blocks += good\n",
                "            state.fetched_blocks += good\n"
                "            store_runs(state, state.tree.__dict__.pop('fetched', []))\n",
            ),
            (
                PREFETCH,
                "from .completion_handlers import leading\n",
                "from .completion_handlers import leading, store_runs\n",
            ),
        ),
        seen_in="FastDeploy storage, vLLM #45704",
        world="tiers",
    ),
    bug(
        "a block that was fetched too late is found twice",
        TREE,
        (
            "self.host.add_copy(node, host_blocks[-missing:])",
            "self.host.add_copy(node, host_blocks[:missing])",
        ),
        world="tiers",
    ),
    bug(
        "exclusive tiers keep the host copies of moved blocks",
        STATE,
        (
            "        if run.node.device_blocks and (moved or run.promoting):",
            "        if run.node.device_blocks and run.promoting:",
        ),
        seen_in="FastDeploy hierarchical mode",
        world="tiers",
    ),
    bug(
        "exclusive tiers free a pinned host copy",
        STATE,
        ("run.is_valid and not run.holders", "run.is_valid"),
        world="tiers",
    ),
    bug(
        "a failed copy stays in its destination tier",
        COMPLETIONS,
        (
            "        state.host.drop(run)\n    else:\n"
            "        state.tree.remove(node)\n    return []",
            "        pass\n    else:\n        state.tree.remove(node)\n    return []",
        ),
        world="tiers",
    ),
    bug(
        "stored blocks are stored again",
        STATE,
        (
            "        runs = list(holder)\n        self.host.release_hold(holder)\n",
            "        runs = list(holder)\n        self.host.release_hold(holder)\n"
            "        self.store([r for r in runs if r.node and r.is_valid and r.stored])\n",
        ),
        elsewhere=((COMPLETIONS, *STORE_OF_STATE),),
        seen_in="vLLM #45704, FastDeploy storage",
        world="tiers",
    ),
    bug(
        "a run with a copy on the host is joined with one without",
        "tiers/host_tier.py",
        ("            return upper is lower\n", "            return True\n"),
        world="tiers",
    ),
    bug(
        "a joined copy counts its last blocks only",
        "tiers/host_tier.py",
        ("            self.num_idle += run.num_blocks  # the", "            pass  # the"),
        world="tiers",
    ),
    bug(
        "a joined run has the hits of its last blocks",
        TREE,
        ("            and self.hits[upper] == self.hits[lower]\n", ""),
        world="tiers",
    ),
    bug(
        "joined runs have keys of other blocks",
        KEYS,
        ("if not is_whole and lower in self.known:", "if False:"),
        ("for node in nodes])\n        if keys", "for node in nodes[::-1]])\n        if keys"),
        world="tiers",
    ),
)
