"""The configuration of a cache world, and its requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Literal, TypeAlias

from ...model.ghost import Tag, first_tag, tags_after
from ..engine import Below, Config

State: TypeAlias = Literal["waiting", "running", "ended"]

NAMESPACES: Final = (b"", b"tenant")
PROBE: Final = b"a namespace of nobody"
MAX_WAITING: Final = 3
MAX_FLIGHTS: Final = 3

TOKENS: Final = (0, 1 << 16, 3)
"""Few tokens, so that prefixes are shared; two of them have equal low 16 bits."""


BLOCK_SIZES: Final = range(1, 5)
POOL_SIZES: Final = range(4, 15)


def draw_config(below: Below, sizes: Mapping[str, Sequence[int]] = MappingProxyType({})) -> Config:
    """Draw the sizes of a world, and which operations are rare or frequent.

    Tiny pools and few different tokens reach all situations soon. Each case has other sizes,
    because no single size reaches all situations.
    """
    pool_sizes = sizes.get("num_blocks", POOL_SIZES)
    block_sizes = sizes.get("block_size", BLOCK_SIZES)
    return {
        "num_blocks": pool_sizes[below(len(pool_sizes))],
        "block_size": block_sizes[below(len(block_sizes))],
        "max_running": 2 + below(4),
        "alphabet": min(1 + below(4), len(TOKENS)),  # of one token, no two sequences differ
        "rare": below(1 << 13) & below(1 << 13) if below(3) else 0,
        "often": below(1 << 17) & below(1 << 17) if below(3) else 0,
        "overlap": below(2) == 1,  # steps in flight keep duplicates, which hides other bugs
    }


@dataclass(slots=True)
class Request:
    """A request, as its owner knows it.

    Attributes:
        tokens: prompt and appended tokens.
        tags: tag of the prefix that ends at each token.
        limit: maximum number of tokens.
        written: number of tokens whose KV is written or was hit.
        published: number of tokens published last.
        admission: number of admissions.
        job: name of the step in flight, or "".
        matched_at: step of the last match not yet used by an admission, or 0.
        table: block table after the last call.
    """

    name: str
    namespace: bytes
    tokens: list[int]
    limit: int
    root: Tag = 0
    tags: list[Tag] = field(default_factory=list)
    state: State = "waiting"
    written: int = 0
    published: int = 0
    admission: int = 0
    num_jobs: int = 0
    job: str = ""
    matched_at: int = 0
    table: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.root = first_tag(self.namespace)
        self.extend_tags()

    def extend_tags(self) -> None:
        """Compute the tags of new tokens."""
        last = self.tags[-1] if self.tags else self.root
        self.tags += tags_after(last, self.tokens[len(self.tags) :])

    def stop(self) -> None:
        """It has lost its blocks and its step, and waits."""
        self.state, self.written, self.job, self.table = "waiting", 0, "", []

    def path(self, block_size: int) -> list[Tag]:
        """Tags of the whole blocks."""
        return self.tags[block_size - 1 :: block_size]


def draw_prompt(
    below: Below, past: Sequence[Request], config: Config, *, repeats: bool = False
) -> list[int]:
    """Draw a prompt: often the start of an earlier one, often of a length near whole blocks.

    Args:
        repeats: a third of these starts are all tokens of the earlier request.
    """

    def start() -> list[int]:
        tokens = past[-1 - below(min(6, len(past)))].tokens
        return tokens if repeats and below(3) == 0 else tokens[: below(len(tokens) + 2)]

    size, alphabet = config["block_size"], config["alphabet"]
    prompt: list[int] = []
    if past and below(4):
        prompt = start()
        if below(4) == 0:  # the same tokens at another place: there they are another prefix
            prompt = prompt[: len(prompt) - len(prompt) % size] + start()
    near_blocks = size * (1 + below(4)) + below(3) - 1
    length = near_blocks if below(2) else len(prompt) + below(5)
    length = max(1, min(length, size * (config["num_blocks"] + 1)))
    prompt = prompt[:length]
    return prompt + [TOKENS[below(alphabet)] for _ in range(length - len(prompt))]
