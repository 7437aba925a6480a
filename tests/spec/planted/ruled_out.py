"""Bugs of others that our cache cannot have: each with what rules it out, or has it instead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class RuledOut:
    """A bug that is not planted.

    Attributes:
        what: what was wrong.
        seen_in: where.
        why: the line of our design that rules it out, or the part that it is of.
    """

    what: str
    seen_in: str
    why: str


_NO_LOCK = "the manager has no lock, no thread and no I/O: each call runs to its end"
_NO_NODE_STATE = "a block of the device is in the tree, or is not: it has no status to forget"
_HAND_OFF = "is the hand-off's: its rules and bugs are planted there"
_SCHEDULER = "is the scheduler's: its rules and bugs are planted there"
_NO_WINDOW = "there is one group of layers, with full attention"
_NO_EVENTS = "the manager emits no events; what is published is asked for"

RULED_OUT: Final = (
    # Locks and states
    RuledOut(
        "eviction inside a match waits for the match's own lock", "FastDeploy PR 7107", _NO_LOCK
    ),
    RuledOut("allocation waits for the lock that eviction holds", "LMCache #2942", _NO_LOCK),
    RuledOut("an exception ends the thread that frees blocks", "FastDeploy v1", _NO_LOCK),
    RuledOut(
        "ids kept at a node for its decode are freed with it, and again",
        "FastDeploy PR 7885 review",
        "private blocks stand in the lease's row only; a node has none",
    ),
    RuledOut(
        "the number of evictable blocks is not halved by a split",
        "pymllm #656",
        "no node has a counter of evictable blocks: a split moves nothing between counters",
    ),
    RuledOut(
        "an evicted node still counts as alive, and is evicted again",
        "FastDeploy PR 7885 review",
        "what leaves the tree leaves the idle list: no list, map or parent leads to it any more",
    ),
    RuledOut(
        "a dead node has the status of a live one", "FastDeploy hierarchical mode", _NO_NODE_STATE
    ),
    RuledOut(
        "loading nodes are pinned and dropped from the hit",
        "FastDeploy v1",
        "what is loaded is private to its lease, and enters the tree when it has arrived",
    ),
    RuledOut(
        "heap and set of evictable nodes drift apart",
        "FastDeploy PR 7885 review",
        "one linked list through the nodes: membership and order are the same links",
    ),
    RuledOut(
        "a parent with children in another tier is never queued again",
        "FastDeploy hierarchical mode",
        "a run is in the idle list when nobody uses it, whatever its children: those go before it",
    ),
    RuledOut(
        "a request pins one path when it is prefetched and unpins another when it ends",
        "FastDeploy v1",
        "admission pins the path of its own walk, and the lease keeps its last node",
    ),
    RuledOut(
        "the upper part of a split has no time of use, or stands in the wrong place",
        "SGLang #22592",
        "a split is done to pin the upper part: its time and place are set when it is unpinned",
    ),
    # Keys
    RuledOut(
        "pickled keys differ for equal tokens of other integer types",
        "vLLM block hashes",
        "tokens become int32 once, at the door, and keys are their bytes",
    ),
    RuledOut(
        "hashes collide, or can be guessed",
        "vLLM #54727, SGLang #2256",
        "there are no hashes: the tokens themselves are compared",
    ),
    RuledOut(
        "fields of a namespace run into each other",
        "vLLM #44701, SGLang #24638",
        "the cache sees a namespace as bytes; make_namespace is tested in tests/kvcache",
    ),
    RuledOut(
        "an image's place at a block boundary is taken wrongly, or its hash forgotten",
        "FastDeploy PR 6929, PR 6061, PR 5638",
        "images are part of the namespace, whole; no block has extra keys of its own",
    ),
    RuledOut(
        "a match is rolled back into an image, and tables are not",
        "FastDeploy PR 6558, PR 4680, PR 5848",
        "a match is never rolled back: admission takes all of it",
    ),
    RuledOut(
        "tail blocks are matched without extra keys and published with them",
        "FastDeploy PR 5638",
        "a lease publishes below its own node, in the namespace it was admitted to",
    ),
    RuledOut(
        "the block size of keys is lost when blocks are resized",
        "kvcached #451",
        "one block size, fixed when the manager is made",
    ),
    RuledOut(
        "the tokens of two requests are one list",
        "SGLang #26177",
        "a run keeps bytes of its own; callers' arrays are only read",
    ),
    # Steps in flight
    RuledOut(
        "blocks are freed while a step in flight writes them",
        "vLLM #45357, vllm-ascend #14055",
        "steps run in the order of their launch: a freed block's next owner writes later",
    ),
    RuledOut(
        "frees that were put off come in the wrong order",
        "vLLM #48489",
        "no free is put off",
    ),
    RuledOut(
        "a step's plan shares its block table with later steps",
        "FastDeploy PR 7751",
        _SCHEDULER,
    ),
    RuledOut("window blocks are dropped by an unverified draft", "vLLM #47728", _NO_WINDOW),
    RuledOut("half of a node is lost, that of the window layers", "SGLang #28468", _NO_WINDOW),
    RuledOut("blocks that are freed per head run behind a swap", "FastDeploy PR 6702", _NO_WINDOW),
    # The scheduler
    RuledOut("new requests take what running ones will need", "FastDeploy PR 7107", _SCHEDULER),
    RuledOut("a preempted request computes its prompt only", "FastDeploy PR 3071", _SCHEDULER),
    RuledOut("computed tokens are counted twice", "FastDeploy PR 3292", _SCHEDULER),
    RuledOut("the computed count is kept across a preemption", "nano-vllm #211", _SCHEDULER),
    RuledOut("a slot is compared off by one", "FastDeploy PR 5805", _SCHEDULER),
    RuledOut("a request runs without a slot", "FastDeploy PR 7141", _SCHEDULER),
    RuledOut("a slot is cleared again by a late message", "FastDeploy PR 7529", _SCHEDULER),
    RuledOut("a request is scheduled twice in a step", "FastDeploy PR 5506", _SCHEDULER),
    RuledOut("an abort is heard by running requests only", "SGLang #9817, vLLM #49118", _SCHEDULER),
    RuledOut("a prefill that was cut short resumes too late", "SGLang #38319", _SCHEDULER),
    RuledOut("hit tokens are taken from the budget", "TensorRT-LLM #12665", _SCHEDULER),
    RuledOut("a preempted request comes back in the same step", "vLLM #25538", _SCHEDULER),
    RuledOut(
        "an encoder cache evicts what it just took in", "FastDeploy v1", "there is no encoder"
    ),
    RuledOut(
        "the pool has half the blocks, or twice",
        "FastDeploy PR 6230",
        "the manager counts blocks, not bytes; BlockArrays are tested in tests/kvcache",
    ),
    RuledOut(
        "two managers own one pool",
        "FastDeploy PR 7528",
        "the pool is made by its manager and handed to nobody",
    ),
    RuledOut("a router keeps what a cache evicted", "Dynamo #11785, aibrix #2385", _NO_EVENTS),
    RuledOut("a removal is told while a copy still exists", "vLLM #55092", _NO_EVENTS),
    RuledOut("a parent is never told", "vLLM #57159", _NO_EVENTS),
    # Tiers and peers
    RuledOut(
        "a block swapped in meanwhile is freed",
        "TensorRT-LLM #8830",
        "an old match is made anew when the tree has changed, and admission pins before it evicts",
    ),
    RuledOut(
        "an evicted block is written again before it was copied",
        "FastDeploy v1, FastDeploy hierarchical mode",
        "operations are dispatched before the next step, by the thread that dispatches that one",
    ),
    RuledOut(
        "stored blocks count as shared and leak on refusal",
        "FastDeploy PR 7890",
        "what storage had is in the tree before an admission, which is refused before it reserves",
    ),
    RuledOut(
        "more tokens are stored than blocks",
        "FastDeploy PR 7614",
        "keys are made of the runs that are stored, one for each of their blocks",
    ),
    RuledOut(
        "data read from a file never reach the device",
        "FastDeploy PR 6188",
        "a fetch ends on the host; an admission has another operation for the rest of the way",
    ),
    RuledOut(
        "a storage task that raises is waited for without end",
        "FastDeploy storage",
        "every operation has a time after which its driver ends it; tested with the driver",
    ),
    RuledOut(
        "leases are renewed by a mere look",
        "Mooncake #3599",
        "a match and a lookup hold nothing, and nothing is used by them",
    ),
    RuledOut("reserved blocks stay when a peer is gone", "FastDeploy PR 7965", _HAND_OFF),
    RuledOut("a message that comes twice reserves twice", "FastDeploy PR 5338", _HAND_OFF),
    RuledOut("a slot is seen before its request", "FastDeploy PR 7500", _HAND_OFF),
    RuledOut("the first layer is sent before it is asked for", "FastDeploy PR 7872", _HAND_OFF),
    RuledOut("counters of layers wrap into the next chunk", "FastDeploy PR 4659", _HAND_OFF),
    RuledOut(
        "blocks are used again before the transfer ends", "SGLang #24527, SGLang #35049", _HAND_OFF
    ),
    RuledOut("a transfer id is used again too early", "SGLang #33507", _HAND_OFF),
)
