"""The sizes of a world of the cache, and the requests in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from ...model.ghost import (
    Tag,
    first_tag,
    next_tag,
)
from ..engine import Below, Config

State: TypeAlias = Literal["waiting", "running", "ended"]

NAMESPACES: Final = (b"", b"tenant")
MAX_WAITING: Final = 3

TOKENS: Final = (0, 1 << 16, 3)
"""Few, so that prefixes are shared; two of them are equal in their low 16 bits."""


def draw_config(below: Below) -> Config:
    """Draw the sizes of a world, and the operations that it leaves out (or almost).

    Tiny pools and few different tokens make everything happen soon; new ones in every case reach
    what no single size does.
    """
    return {
        "num_blocks": 4 + below(11),
        "block_size": 1 + below(4),
        "max_running": 2 + below(4),
        "alphabet": min(1 + below(4), len(TOKENS)),  # of one token, no two sequences differ
        "rare": below(1 << 13) & below(1 << 13) if below(3) else 0,
        "often": below(1 << 17) & below(1 << 17) if below(3) else 0,
    }


@dataclass(slots=True)
class Request:
    """A request as its owner knows it.

    Attributes:
        tokens: its prompt, and what was appended.
        tags: the tag of the prefix that ends at each of them.
        limit: how many tokens it may come to have.
        written: the tokens whose KV is written or was hit.
        published: the tokens that were last published.
        admission: counts its admissions.
        job: its step in flight, if there is one.
        matched_at: the step of its last match that no admission has used; 0 if there is none.
        table: its block table after the last call.
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
        """Tag the tokens that have no tag yet."""
        tag = self.tags[-1] if self.tags else self.root
        for token in self.tokens[len(self.tags) :]:
            tag = next_tag(tag, token)
            self.tags.append(tag)

    def path(self, block_size: int) -> list[Tag]:
        """The tags of its whole blocks."""
        return self.tags[block_size - 1 :: block_size]


def draw_prompt(below: Below, past: Sequence[Request], config: Config) -> list[int]:
    """Draw a prompt: often the start of an earlier one, often of a length near whole blocks."""
    size, alphabet = config["block_size"], config["alphabet"]
    prompt: list[int] = []
    if past and below(4):
        prompt = _draw_start(below, past)
        if below(4) == 0:  # the same tokens at another place: there they are another prefix
            prompt = prompt[: len(prompt) - len(prompt) % size] + _draw_start(below, past)
    near_blocks = size * (1 + below(4)) + below(3) - 1
    length = near_blocks if below(2) else len(prompt) + below(5)
    length = max(1, min(length, size * (config["num_blocks"] + 1)))
    prompt = prompt[:length]
    return prompt + [TOKENS[below(alphabet)] for _ in range(length - len(prompt))]


def _draw_start(below: Below, past: Sequence[Request]) -> list[int]:
    tokens = past[-1 - below(min(6, len(past)))].tokens
    return tokens[: below(len(tokens) + 2)]
