"""Bugs of the small managers: a text of their source, and what stands there instead."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from radixkv.spec.adapters.cache_target import Depth


class Bug(NamedTuple):
    """A bug of a design; `depth` is the least at which it is found."""

    name: str
    design: str
    old: str
    new: str
    depth: Depth = "api"
    seen_in: str = "own"


FILES = {
    "hashed": ("Hashed", "LastCopy", "PrivateCopy", "Dictionary"),
    "trie": ("LMDeploy", "Ahead", "Lookahead"),
}

DESIGN_BUGS = (
    # nano-vllm, vLLM
    Bug("the hash of a reused block stays", "Hashed", "self.forget(new)", "pass",
        seen_in="nano-vllm #163, vLLM #44237"),
    Bug("the hash of a reused block stays", "LastCopy", "self.forget(new)", "pass"),
    Bug("the hash is without the prefix", "Hashed",
        "yield namespace, tuple(tokens[:end])",
        "yield namespace, tuple(tokens[end - self.block_size : end])"),
    Bug("tenants share blocks", "Hashed", "yield namespace, tuple(tokens[:end])",
        'yield b"", tuple(tokens[:end])', seen_in="vLLM #44701"),
    Bug("a hit block stays in the queue", "Hashed",
        "for block in unused:\n            self.queue.remove(block)", "pass"),
    Bug("the removal of a copy forgets the others", "Hashed",
        "self.blocks_of[prefix].remove(block)\n            if not self.blocks_of[prefix]:\n"
        "                del self.blocks_of[prefix]",
        "self.blocks_of.pop(prefix, None)", "events", seen_in="vLLM PR 55092"),
    Bug("released blocks come first in the queue", "Hashed",
        "self.queue.append(block)", "self.queue.appendleft(block)", "events"),
    Bug("the first blocks are released first", "Hashed",
        "for block in reversed(self.tables.pop(name)):", "for block in self.tables.pop(name):",
        "events", seen_in="vLLM #48489"),
    Bug("a block is hashed as soon as it is allocated", "Hashed",
        "self.report(\"allocated\", name, new)\n",
        "self.report(\"allocated\", name, new)\n        if len(tokens) >= self.block_size:\n"
        "            self.publish(name, tokens)\n", seen_in="vLLM #43569"),
    Bug("the last token is hit", "Hashed", "self.hashes(namespace, tokens[:-1])",
        "self.hashes(namespace, tokens)", seen_in="nano-vllm #144"),
    Bug("a reset frees twice", "Hashed", 'self.report("freed", list(self.hash_of))',
        'self.report("freed", 2 * list(self.hash_of))', "events"),
    Bug("a request with a hit loses a block", "LastCopy",
        "        for block in table:\n            self.users[block] += 1",
        "        for block in table[1:]:\n            self.users[block] += 1\n"
        "        for block in table[:1]:\n            self.users[block] += 2"),
    Bug("a copy of a private block is forgotten", "PrivateCopy",
        "                if block not in self.hash_of:\n", "                if False:\n", "events"),
    # SGLang
    Bug("a split refreshes the cold suffix", "SGLang",
        "            node = child if same == len(child.blocks) else self.split(child, same)\n",
        "            child.last_access = now\n"
        "            node = child if same == len(child.blocks) else self.split(child, same)\n",
        "events", seen_in="SGLang 0.5.23"),
    Bug("the upper part of a split is not accessed", "SGLang",
        "            node.last_access = now\n",
        "            if node is child:\n                node.last_access = now\n",
        "events", seen_in="mini-sglang #124"),
    Bug("a hit is not an access", "SGLang", "            node.last_access = now\n", "", "events"),
    Bug("the hottest leaf is evicted", "SGLang", "coldest = min(", "coldest = max(", "events"),
    Bug("duplicates stay in the table", "SGLang", "        request.table[:last] = found\n",
        "        request.table[len(found):last] = found[len(found):]\n",
        seen_in="mini-sglang PR 142"),
    Bug("duplicates are lost", "SGLang", "        self.give_back(copies)\n", ""),
    Bug("a match is not locked", "SGLang", "        self.lock(node, 1)\n        hit",
        "        hit"),
    Bug("a refusal keeps the lock", "SGLang", "            self.lock(node, -1)\n            return",
        "            return"),
    Bug("a split loses the locks", "SGLang", "upper.locks, upper.last_access = node.locks,",
        "upper.locks, upper.last_access = 0,"),
    Bug("an unlocked node with a locked child goes", "SGLang",
        "leaves = [node for node in unlocked if not node.children]", "leaves = unlocked",
        "events"),
    Bug("the rest of the last node leaks", "SGLang", "evicted += coldest.blocks",
        "evicted += coldest.blocks[: max(1, num_blocks - len(evicted))]"),
    Bug("the table is released with what the tree has", "SGLang",
        "self.give_back(request.table[request.num_cached :])", "self.give_back(request.table)"),
    Bug("the node is compared by its first block only", "SGLang", "same < len(child.blocks)\n"
        "                and child.tokens[same * size :][:size] == rest[same * size :][:size]",
        "same < len(child.blocks)"),
    # mini-sglang
    Bug("duplicates stay in the table", "MiniSGLang", "        request.table[:last] = found\n",
        "        request.table[len(found):last] = found[len(found):]\n",
        seen_in="mini-sglang PR 142"),
    Bug("a prompt is inserted before it is computed", "MiniSGLang",
        "self.requests[name].computed = len(tokens)\n"
        "        if len(tokens) == self.prompts[name]:\n",
        "self.requests[name].computed = self.prompts[name]\n        if True:\n"),
    # LightLLM
    Bug("a split refreshes the cold suffix", "LightLLM",
        "            node = child if same == len(child.blocks) else self.split(child, same)\n",
        "            child.last_access = now\n"
        "            node = child if same == len(child.blocks) else self.split(child, same)\n",
        "events"),
    Bug("a refusal keeps the lock", "LightLLM",
        "            self.lock(node, -1)\n            return", "            return"),
    # frees lazily
    Bug("the blocks of a refusal are lost", "LazySGLang", "self.later += blocks",
        "self.later = list(blocks)"),
    Bug("blocks are freed twice", "LazySGLang", "        self.later = []\n\n    def available",
        "        self.later = self.later[1:]\n\n    def available"),
    # LMDeploy
    Bug("a reference of several is lost", "LMDeploy",
        "        for block in found:\n            self.refs[block] += 1",
        "        for block in found[1:]:\n            self.refs[block] += 1"),
    Bug("duplicates are not freed", "LMDeploy", "                self.give_up(name, block)\n", ""),
    Bug("adapters share a root", "LMDeploy", "self.roots.setdefault(namespace,",
        'self.roots.setdefault(b"",'),
    Bug("inner blocks are evicted", "LMDeploy",
        "leaves = [node for node in idle if not node.children]", "leaves = idle", "events"),
    Bug("an access is not recorded", "LMDeploy", "            child.last_access = now\n", "",
        "events"),
    Bug("an eviction takes one more", "LMDeploy", "self.evict(short - len(self.free))",
        "self.evict(short - len(self.free) + 1)", "events"),
    # The same, with steps in flight
    Bug("a duplicate is freed beside a step in flight", "Ahead", "if self.is_read(block):",
        "if False:", "events", seen_in="vLLM PR 45357"),
    Bug("the end of a step frees what others may read", "Ahead",
        "in self.kept if not self.is_read(block)]", "in self.kept]", "events"),
    Bug("a duplicate is kept for ever", "Ahead", "        self.unref(over)\n", ""),
    # The same, with lookahead slots
    Bug("blocks are evicted for lookahead slots", "Lookahead",
        "(len(request.table) + len(self.free)) * self.block_size",
        "(len(request.table) + self.available()) * self.block_size", "events"),
    # A dictionary
    Bug("used blocks are evicted", "Dictionary", "if block not in used]", "]"),
)  # fmt: skip


def planted(bug: Bug) -> Any:
    """Compile the source of a design with a bug, and return its class.

    Raises:
        AssertionError: the text does not stand there exactly once.
    """
    file = next((name for name, designs in FILES.items() if bug.design in designs), "radix")
    path = Path(__file__).with_name(f"{file}.py")
    source = path.read_text(encoding="utf-8")
    assert source.count(bug.old) == 1, f"{path.name} has {bug.old!r} {source.count(bug.old)} times"
    module = ModuleType(f"{file}_with_a_bug")
    sys.modules[module.__name__] = module  # dataclasses look it up there
    exec(compile(source.replace(bug.old, bug.new), path, "exec"), vars(module))
    return getattr(module, bug.design)
