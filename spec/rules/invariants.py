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


_BLOCKS: Final = {
    "I1": Invariant(
        "one owner",
        "A block is free, held by one request, cached for one prefix, or used by one operation.",
        ("A1", "F1", "P1", "E1", "S1", "W1", "W2", "T11", "T42", "T43"),
    ),
    "I2": Invariant(
        "nothing is lost",
        "The blocks of all owners add up to the pool, and the counters agree.",
        ("S1", "S2", "S3", "D1", "T44", "T43"),
    ),
    "I3": Invariant(
        "ids of their tier",
        "Every block id refers to an existing block of the tier in which it is used.",
        ("A2", "F3", "W1", "T6", "T42"),
    ),
    "I4": Invariant(
        "free is unreachable",
        "No table, cached prefix or operation in flight names a free block.",
        ("A1", "R1", "R2", "W1", "W2", "T10", "T11", "T42"),
    ),
    "I5": Invariant(
        "exact allocation",
        "An allocation returns the requested number of distinct blocks, or changes nothing.",
        ("A3", "A8", "F5"),
    ),
    "I6": Invariant(
        "a batch is its singles",
        "Recycling blocks or growing requests in one call has the same result as one by one.",
        ("F4", "A10"),
    ),
    "I7": Invariant(
        "errors stay local", "One wrong id among many does not affect the others.", ("F3",)
    ),
}

_TREE: Final = {
    "I8": Invariant(
        "the tree is a tree",
        "Links up and down agree, and each prefix has one place.",
        ("P2", "W2", "W6"),
    ),
    "I9": Invariant(
        "removal is exact",
        "Removing a cached prefix removes that prefix, and no other.",
        ("W2", "E1"),
    ),
    "I10": Invariant(
        "no gap in a path",
        "A block can be found only if all blocks before it can: leaves are evicted first.",
        ("E3", "H1", "T1", "T24", "T26"),
    ),
    "I11": Invariant(
        "found means computed",
        "A prefix can be found only after its KV is written, and a failed step leaves none.",
        ("P3", "C1", "H1", "T3", "T7", "T15"),
    ),
    "I12": Invariant(
        "content is the prefix",
        "The KV in a block is that of the tokens and the namespace on the path to it.",
        ("C1", "Q22", "T2", "T28"),
    ),
    "I13": Invariant(
        "published is final",
        "Blocks that others may read are not written any more.",
        ("C2", "C1", "T10"),
    ),
    "I14": Invariant(
        "full blocks", "Only full blocks of computed tokens are shared.", ("P3", "P4", "H3")
    ),
    "I15": Invariant(
        "the longest hit",
        "A match is the longest run of blocks from the beginning, in order.",
        ("H2", "H3", "H5", "H6", "R1"),
    ),
    "I16": Invariant(
        "evicted is gone",
        "An evicted block is not found, ordered or evicted again.",
        ("E1", "W2", "W4"),
    ),
}

_COUNTS: Final = {
    "I17": Invariant(
        "users are counted",
        "The users of a block are the requests that hold it; a block with users stays.",
        ("W3", "E2"),
    ),
    "I18": Invariant(
        "users of a child use its parent",
        "A block has at least as many users as each block that follows it.",
        ("W3",),
    ),
    "I19": Invariant(
        "evictable is unused",
        "The eviction order contains every unused published block once, and nothing else.",
        ("W4", "S2"),
    ),
    "I20": Invariant(
        "no block is stranded",
        "All blocks that are cached and unused can be allocated.",
        ("E6", "A6", "D2", "T20", "T44"),
    ),
    "I21": Invariant(
        "least recently used first",
        "The least recently used leaf is evicted first; a use counts for its whole path.",
        ("E4", "W5", "T26"),
    ),
}

_REQUESTS: Final = {
    "I22": Invariant(
        "shared, then private",
        "A block table begins with the shared blocks, in the order of their tokens.",
        ("R1", "P5"),
    ),
    "I23": Invariant(
        "a table fits its tokens",
        "A request has as many blocks as its tokens need.",
        ("A4", "A5", "Q21"),
    ),
    "I24": Invariant(
        "tokens are the caller's", "The cache changes no token that it is given.", ("C3", "Q28")
    ),
    "I25": Invariant(
        "no work without blocks", "A step has blocks for all tokens that it writes.", ("A4", "Q20")
    ),
    "I26": Invariant(
        "one state at a time",
        "A request waits, runs or has ended, within its limits.",
        ("Q2", "Q15"),
    ),
    "I27": Invariant(
        "released once",
        "A request returns everything that it holds, once, however it ends.",
        ("F1", "R3", "D1", "Q38", "T34", "T38", "T39"),
    ),
    "I28": Invariant(
        "refused changes nothing", "A failed or refused call changes nothing.", ("A8", "R5", "Q34")
    ),
    "I29": Invariant(
        "preemption is invisible",
        "A preempted request has the output that it would have had without preemption.",
        ("Q28", "Q29", "C1", "T37", "T36"),
    ),
    "I30": Invariant(
        "late calls have no effect",
        "A report on a request that has ended or starts again changes nothing.",
        ("R3", "R4", "P6"),
    ),
}

_TRANSFERS: Final = {
    "I31": Invariant(
        "one copy per tier", "A prefix has at most one block in a tier, and all copies are equal.",
        ("P2", "T2", "T25"),
    ),
    "I32": Invariant(
        "pinned while it moves",
        "A block that an operation reads or writes gets no other owner until the operation ends.",
        ("Q23", "T10", "T11", "T34"),
    ),
    "I33": Invariant(
        "every operation ends", "An operation is done, fails or times out, and returns its blocks.",
        ("T13", "T12", "T5", "T44", "T16", "T8"),
        "the tests of the tier driver and of storage check that operations end in time",
    ),
    "I34": Invariant(
        "late is harmless",
        "A result from before a reset, or for something that has ended, changes nothing.",
        ("R4", "P6", "T13", "T39", "T41"),
    ),
    "I35": Invariant(
        "ranks agree", "Only blocks that all ranks have count as loaded.",
        ("T7", "T5"),
        "all ranks have the same block ids; the driver combines their results",
    ),
    "I36": Invariant(
        "storage is whole or absent", "A visible key has all of its data.", ("T28", "T27"),
        "the tests of storage check that a value is complete",
    ),
    "I37": Invariant(
        "a reset is complete",
        "After a reset every block is free, and nothing from before has an effect.",
        ("R4", "D1", "T40", "T41"),
    ),
}  # fmt: skip

_HAND_OFFS: Final = {
    "I38": Invariant(
        "promised blocks wait",
        "A block promised to another node is not reused before that node knows.",
        ("X8", "X11"),
    ),
    "I39": Invariant(
        "exactly once", "Lost, late and repeated messages cause no leak and no repetition.",
        ("X1", "X2", "X3", "X12", "X15", "X21"),
    ),
    "I40": Invariant(
        "complete before decoding", "Decoding begins when all of the prompt's KV has arrived.",
        ("X8", "X14"),
    ),
    "I41": Invariant(
        "both sides give up",
        "If one side fails, the other learns of it, and both free everything.",
        ("X18", "X21", "X22"),
    ),
}  # fmt: skip

_PROGRESS: Final = {
    "I42": Invariant(
        "every request progresses",
        "A request that fits the pool alone is admitted, and ends, within bounded steps.",
        ("A6", "A9", "D2", "Q30", "Q31", "Q14", "Q9", "Q7"),
    ),
    "I43": Invariant(
        "sizes make sense", "A request that can never fit is refused at once as too large.",
        ("A9", "Q1"),
        "the tests of the arrays check the counts of bytes",
    ),
    "I44": Invariant(
        "figures are true", "Hits, evictions and requests are counted once, as they happen.",
        ("S3", "Q13", "Q37"),
    ),
    "I45": Invariant(
        "what is kept can be found",
        "In storage, a block counts as used after those that follow it, so they are evicted first.",
        ("T29", "T31", "T30", "T32"),
        "within the report interval; a server that samples what it evicts keeps to it roughly",
    ),
}  # fmt: skip

INVARIANTS: Final[dict[str, Invariant]] = {
    **_BLOCKS, **_TREE, **_COUNTS, **_REQUESTS, **_TRANSFERS, **_HAND_OFFS, **_PROGRESS,
}  # fmt: skip
"""By number, in the order of the list in which they were collected."""
