"""General invariants of a KV cache and its scheduler, and the rules that cover each.

The rules of this specification can be checked step by step. The invariants are the general
properties behind them: each is covered by rules, or says where else it is checked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Invariant:
    """A general property.

    Attributes:
        title: a few words.
        sentence: the property.
        rules: codes of the rules that cover it.
        elsewhere: the part that no rule covers, and why; "" if none.
    """

    title: str
    sentence: str
    rules: tuple[str, ...] = ()
    elsewhere: str = ""


_HAND_OFF: Final = "between nodes: the simulation of the hand-off checks it, under every fault"

_BLOCKS: Final = {
    "I1": Invariant(
        "one owner",
        "A block is free, held by one request, cached for one prefix, or used by one operation.",
        ("A1", "F1", "P1", "E1", "S1", "W1", "W2", "T3", "T31", "T32"),
    ),
    "I2": Invariant(
        "nothing is lost",
        "The blocks of all owners add up to the pool, and the counters say so.",
        ("S1", "S2", "S3", "D1", "T30", "T32"),
    ),
    "I3": Invariant(
        "ids of their tier",
        "Whatever names a block names one that exists, in the tier that it is used in.",
        ("A2", "F3", "W1", "T9", "T31"),
    ),
    "I4": Invariant(
        "free is unreachable",
        "No table, cached prefix or operation in flight names a free block.",
        ("A1", "R1", "R2", "W1", "W2", "T2", "T3", "T31"),
    ),
    "I5": Invariant(
        "exact allocation",
        "An allocation gives as many different blocks as were asked for, or changes nothing.",
        ("A3", "A8", "F5"),
    ),
    "I6": Invariant(
        "a batch is its singles",
        "Blocks that go back in one call, and requests that grow in one, are as one by one.",
        ("F4", "A10"),
    ),
    "I7": Invariant(
        "errors stay local", "One wrong id among many does not make the others disappear.", ("F3",)
    ),
}

_TREE: Final = {
    "I8": Invariant(
        "the tree is a tree",
        "Links up and down agree, and a prefix has one place.",
        ("P2", "W2", "W6"),
    ),
    "I9": Invariant(
        "what is removed is meant",
        "Removing a cached prefix removes that one, not another in its place.",
        ("W2", "E1"),
    ),
    "I10": Invariant(
        "no gap in a path",
        "What can be found can be found from its beginning: leaves go first.",
        ("E3", "H1", "T8", "T14", "T16"),
    ),
    "I11": Invariant(
        "found means computed",
        "A prefix can be found only when its KV is written, and a step that failed leaves none.",
        ("P3", "C1", "H1", "T1", "T10", "T12"),
    ),
    "I12": Invariant(
        "content is the prefix",
        "The KV in a block is that of the tokens and the namespace on the path to it.",
        ("C1", "Q12", "T4", "T5"),
    ),
    "I13": Invariant(
        "published is final", "What others may read is not written any more.", ("C2", "C1", "T2")
    ),
    "I14": Invariant(
        "whole blocks", "Only whole blocks of computed tokens are shared.", ("P3", "P4", "H3")
    ),
    "I15": Invariant(
        "the longest hit",
        "A match is the longest run of blocks from the beginning, in order.",
        ("H2", "H3", "H5", "H6", "R1"),
    ),
    "I16": Invariant(
        "dead is dead",
        "What was evicted is found, kept in order and evicted no more.",
        ("E1", "W2", "W4"),
    ),
}

_COUNTS: Final = {
    "I17": Invariant(
        "users are counted",
        "The users of a block are the requests that hold it; what has users stays.",
        ("W3", "E2"),
    ),
    "I18": Invariant(
        "users of a child use its parent",
        "A block has no fewer users than all that follow it have.",
        ("W3",),
    ),
    "I19": Invariant(
        "evictable is unused",
        "Whatever nobody uses waits to be evicted, once; nothing else does.",
        ("W4", "S2"),
    ),
    "I20": Invariant(
        "no block is stranded",
        "If so many blocks are cached and unused, so many can be had.",
        ("E6", "A6", "D2", "T13", "T30"),
    ),
    "I21": Invariant(
        "the coldest goes first",
        "The leaf that was used longest ago is evicted; a use counts for its whole path.",
        ("E4", "W5", "T16"),
    ),
}

_REQUESTS: Final = {
    "I22": Invariant(
        "shared, then private",
        "A table begins with the blocks that are shared, in the order of their tokens.",
        ("R1", "P5"),
    ),
    "I23": Invariant(
        "a table fits its tokens",
        "A request has as many blocks as its tokens need.",
        ("A4", "A5", "Q21"),
    ),
    "I24": Invariant(
        "tokens are the caller's", "The cache changes no token that it is given.", ("C3", "Q10")
    ),
    "I25": Invariant(
        "no work without blocks", "A step has blocks for all that it writes.", ("A4", "Q4")
    ),
    "I26": Invariant(
        "one state at a time",
        "A request waits, runs or has ended, within its limits.",
        ("Q1", "Q2"),
    ),
    "I27": Invariant(
        "released once",
        "What a request took it gives back, once, however it ends.",
        ("F1", "R4", "D1", "Q20", "T20", "T23", "T27"),
    ),
    "I28": Invariant(
        "refused changes nothing",
        "What fails or is refused leaves all as it was.",
        ("A8", "R3", "Q30"),
    ),
    "I29": Invariant(
        "preemption is invisible",
        "A request that was preempted has the output it would have had.",
        ("Q10", "Q32", "C1", "T22", "T24"),
    ),
    "I30": Invariant(
        "no late actor",
        "What is said for a request that ended or begins again changes nothing.",
        ("R4", "R5", "P6"),
    ),
}

_TRANSFERS: Final = {
    "I31": Invariant(
        "one copy per tier", "A prefix has at most one block in a tier, and all are equal.",
        ("P2", "T4", "T15"),
    ),
    "I32": Invariant(
        "pinned while it moves",
        "A block that an operation reads or writes is not given away until it ends.",
        ("Q23", "T2", "T3", "T20"),
    ),
    "I33": Invariant(
        "every operation ends", "It is done, fails or times out, and gives back its blocks.",
        ("T6", "T7", "T26", "T30", "T33", "T39"),
        "that storage and copies end in time is tested where they are driven",
    ),
    "I34": Invariant(
        "late is harmless", "A result of before a reset or an end changes nothing.",
        ("R5", "P6", "T6", "T27", "T29"),
    ),
    "I35": Invariant(
        "ranks agree", "Only what all ranks have counts as loaded.",
        ("T10", "T26"),
        "block ids are one decision for all ranks; their results are joined by the driver",
    ),
    "I36": Invariant(
        "storage is whole or absent", "A key that is seen has all of its data.", ("T5", "T19"),
        "that a value is whole is the storage's, and tested there",
    ),
    "I37": Invariant(
        "a reset is complete", "After it all is free, and nothing of before has an effect.",
        ("R5", "D1", "T28", "T29"),
    ),
}  # fmt: skip

_HAND_OFFS: Final = {
    "I38": Invariant(
        "promised blocks wait", "A block promised to another node is not reused before it is told.",
        elsewhere=_HAND_OFF,
    ),
    "I39": Invariant(
        "exactly once", "Messages that are lost, late or repeated neither leak nor repeat.",
        elsewhere=_HAND_OFF,
    ),
    "I40": Invariant(
        "all of it, then go", "Decoding begins when all of the prompt's KV has arrived.",
        elsewhere=_HAND_OFF,
    ),
    "I41": Invariant(
        "both sides give up", "If one side fails, the other learns of it, and both free all.",
        elsewhere=_HAND_OFF,
    ),
}  # fmt: skip

_PROGRESS: Final = {
    "I42": Invariant(
        "everyone gets on", "What fits the pool alone is admitted, and ends, within bounded steps.",
        ("A6", "A9", "D2", "Q14", "Q15", "Q24", "Q27", "Q28"),
    ),
    "I43": Invariant(
        "sizes make sense", "A request that can never fit is told so at once.",
        ("A9", "Q19"),
        "bytes are counted where the arrays are made, and tested there",
    ),
    "I44": Invariant(
        "figures are true", "Hits, evictions and requests are counted once, as they happened.",
        ("S3", "Q16", "Q29"),
    ),
    "I45": Invariant(
        "what is kept can be found",
        "Storage counts no block as used before one that follows it, and forgets the latter first.",
        ("T40", "T41", "T42", "T43"),
        "give or take the while after which it is told again; a server that draws what it forgets "
        "keeps to it roughly",
    ),
}  # fmt: skip

INVARIANTS: Final[dict[str, Invariant]] = {
    **_BLOCKS, **_TREE, **_COUNTS, **_REQUESTS, **_TRANSFERS, **_HAND_OFFS, **_PROGRESS,
}  # fmt: skip
"""By number, in the order of the list in which they were collected."""
