"""The specification as a Hypothesis state machine: a test of your cache manager in three lines.

::

    from radixkv.spec.harness.machine import CacheMachine

    class TestMine(CacheMachine):
        make = MyManager

``MyManager(num_blocks, block_size)`` makes an adapter: see `radixkv.spec.adapters.cache`. Pytest
and unittest collect the class directly, because it is a TestCase. Use the settings of Hypothesis:
``@settings(max_examples=1000)`` above the class. You can add ``@rule`` methods.
"""

from __future__ import annotations

import unittest
from collections.abc import Callable
from typing import Any, ClassVar, Final

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ..adapters.cache import AdapterError
from ..adapters.cache_target import Depth
from ..rules.rule import Violation
from .cache.draw import enabled
from .cache.requests import NAMESPACES, TOKENS
from .cache.world import CacheSubject
from .engine import Finding, Trace
from .program import to_program

TOKEN: Final = st.sampled_from(TOKENS)
INDEX: Final = st.integers(0, 3)
"""Index of a request or step to which an operation applies, modulo their number."""

COUNT: Final = st.integers(1, 5)

PHASES: Final = tuple(phase for phase in Phase if phase is not Phase.explain)
"""Without `explain`: it is slow, and useless since all violations are raised in one place."""


def applies(word: str) -> Callable[[Any], Any]:
    """Precondition of a rule: the operation `word` applies to something."""
    return precondition(lambda machine: word in machine.choices())


class CacheMachine(RuleBasedStateMachine, unittest.TestCase):
    """A cache manager under test; subclass it and set `make`.

    Attributes:
        make: makes an adapter from ``(num_blocks, block_size)``.
        depth: which optional methods of the adapter are used.
    """

    make: ClassVar[Any]  # a Factory; with that type, a function would become a method
    depth: ClassVar[Depth] = "api"
    __test__ = False  # only subclasses are collected

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if "__test__" not in vars(cls):
            cls.__test__ = True
        case = cls.TestCase
        case.settings = settings(case.settings, phases=PHASES)

    def __init__(self, method: str = "runTest") -> None:
        unittest.TestCase.__init__(self, method)
        RuleBasedStateMachine.__init__(self)
        self.trace: Trace = []
        self._choices: dict[str, list[str]] | None = None

    def runTest(self) -> None:
        """Let Hypothesis search for a program that breaks a rule."""
        run_state_machine_as_test(type(self))

    runTest.is_hypothesis_test = True  # type: ignore[attr-defined]  # for its pytest plugin

    @initialize(
        num_blocks=st.integers(2, 12), block_size=st.integers(1, 4), max_running=st.integers(2, 5)
    )
    def start(self, num_blocks: int, block_size: int, max_running: int) -> None:
        """Start with an empty cache of random size."""
        self.world = _subject(type(self)).world(
            {"num_blocks": num_blocks, "block_size": block_size, "max_running": max_running}
        )

    # What the rules need

    def choices(self) -> dict[str, list[str]]:
        """The operations that apply, each with its possible names; cached per operation."""
        if self._choices is None:
            self._choices = enabled(self.world)
        return self._choices

    def pick(self, word: str, index: int) -> str:
        """Return the name at an index, modulo their number."""
        names = self.choices()[word]
        return names[index % len(names)]

    def do(self, *operation: Any) -> None:
        """Do an operation and check every rule; a violation gets the program as a note."""
        self._choices = None
        self.trace.append(list(operation))
        try:
            self.world.apply(self.trace[-1])
        except Violation as violation:
            finding = Finding(violation.rule.name, violation.why, self.world.config, self.trace)
            violation.add_note(to_program(finding, _subject(type(self))))
            raise

    def _submit(self, prompt: list[int], more: int, namespace: int) -> None:
        longest = self.world.block_size * (self.world.config["num_blocks"] + 1)
        prompt = prompt[:longest] or [TOKENS[0]]
        self.do("submit", f"r{len(self.world.past) + 1}", prompt, more, namespace)

    def _like(self, back: int, num_blocks: int, offset: int) -> list[int]:
        past = self.world.past
        base = past[-1 - back % len(past)].tokens if past else []
        return base[: max(0, num_blocks * self.world.block_size + offset)]

    # Requests come

    @applies("submit")
    @rule(
        prompt=st.lists(TOKEN, min_size=1, max_size=12),
        more=st.integers(0, 8),
        namespace=st.integers(0, len(NAMESPACES) - 1),
    )
    def submit(self, prompt: list[int], more: int, namespace: int) -> None:
        """Submit a request with a random prompt."""
        self._submit(prompt, more, namespace)

    @applies("submit")
    @rule(
        back=st.integers(0, 5),
        num_blocks=st.integers(0, 4),
        offset=st.integers(-1, 1),
        tail=st.lists(TOKEN, max_size=5),
        more=st.integers(0, 8),
    )
    def submit_like(
        self, back: int, num_blocks: int, offset: int, tail: list[int], more: int
    ) -> None:
        """Submit a request that shares about `num_blocks` blocks with an earlier one."""
        self._submit(self._like(back, num_blocks, offset) + tail, more, 0)

    @applies("submit")
    @rule(back=st.integers(0, 5), num_blocks=st.integers(0, 4), offset=st.integers(-1, 1))
    def serve_like(self, back: int, num_blocks: int, offset: int) -> None:
        """Submit a request that shares a prefix, admit it and compute its prompt."""
        self._submit(self._like(back, num_blocks, offset), 2, 0)
        name = self.world.past[-1].name
        self.do("admit", name)
        self.do("forward", name, len(self.world.past[-1].tokens))

    @applies("match")
    @rule(i=INDEX)
    def match(self, i: int) -> None:
        """Match a waiting request."""
        self.do("match", self.pick("match", i))

    @applies("admit")
    @rule(i=INDEX)
    def admit(self, i: int) -> None:
        """Admit a waiting request."""
        self.do("admit", self.pick("admit", i))

    @applies("admit")
    @rule(i=INDEX)
    def admit_and_forward(self, i: int) -> None:
        """Admit a waiting request and compute its prompt."""
        name = self.pick("admit", i)
        self.do("admit", name)
        self.do("forward", name, len(self.world.requests[name].tokens))

    # They compute

    @applies("forward")
    @rule(i=INDEX, num_tokens=COUNT)
    def forward(self, i: int, num_tokens: int) -> None:
        """Compute and publish some tokens."""
        self.do("forward", self.pick("forward", i), num_tokens)

    @applies("forward")
    @rule(i=INDEX)
    def forward_all(self, i: int) -> None:
        """Compute and publish all remaining tokens."""
        name = self.pick("forward", i)
        self.do("forward", name, len(self.world.requests[name].tokens))

    @applies("launch")
    @rule(i=INDEX, num_tokens=COUNT)
    def launch(self, i: int, num_tokens: int) -> None:
        """Enqueue a step."""
        name = self.pick("launch", i)
        number = self.world.requests[name].num_jobs + 1
        self.do("launch", name, num_tokens, f"{name}.{number}")

    @applies("done")
    @rule(i=INDEX)
    def step_done(self, i: int) -> None:
        """Complete a step in flight."""
        self.do("done", self.pick("done", i))

    @applies("fail")
    @rule(i=INDEX)
    def step_failed(self, i: int) -> None:
        """Let a step in flight fail."""
        self.do("fail", self.pick("fail", i))

    @applies("again")
    @rule(i=INDEX, num_tokens=COUNT)
    def published_again(self, i: int, num_tokens: int) -> None:
        """Repeat a completion, perhaps an old one."""
        self.do("again", self.pick("again", i), num_tokens)

    @applies("append")
    @rule(i=INDEX, tokens=st.lists(TOKEN, min_size=1, max_size=5))
    def append(self, i: int, tokens: list[int]) -> None:
        """Append tokens to a request."""
        self.do("append", self.pick("append", i), tokens)

    @applies("append")
    @rule(i=INDEX, token=TOKEN)
    def append_a_block_and_forward(self, i: int, token: int) -> None:
        """Append a whole block of tokens to a request, if there is room, and compute it."""
        name = self.pick("append", i)
        self.do("append", name, [token] * self.world.block_size)
        self.do("forward", name, self.world.block_size)

    @applies("append_batch")
    @rule(token=TOKEN)
    def append_batch(self, token: int) -> None:
        """Append one token to all requests that can grow, in one call."""
        self.do("append_batch", [[name, token] for name in self.choices()["append_batch"]])

    # They end

    @applies("finish")
    @rule(i=INDEX)
    def finish(self, i: int) -> None:
        """Finish a request."""
        self.do("finish", self.pick("finish", i))

    @applies("preempt")
    @rule(i=INDEX)
    def preempt(self, i: int) -> None:
        """Preempt a request."""
        self.do("preempt", self.pick("preempt", i))

    @applies("evict")
    @rule(num_blocks=COUNT)
    def evict(self, num_blocks: int) -> None:
        """Evict some blocks."""
        self.do("evict", num_blocks)

    @applies("reset")
    @rule()
    def reset(self) -> None:
        """Reset the cache."""
        self.do("reset")

    @applies("misuse")
    @rule(kind=st.integers(0, 63), i=INDEX)
    def misuse(self, kind: int, i: int) -> None:
        """Make a wrong call."""
        self.do("misuse", kind, self.pick("misuse", i))

    @applies("check")
    @rule()
    def check(self) -> None:
        """Call the manager's own check."""
        self.do("check")

    @rule()  # no precondition: Hypothesis disables some rules, and one must remain
    def drain(self) -> None:
        """Let all requests compute and end; then every block must be available."""
        self.do("drain")


def _subject(machine: type[CacheMachine]) -> CacheSubject:
    if not hasattr(machine, "make"):
        raise AdapterError(
            f"{machine.__name__} has no make: set it to what makes an adapter from "
            "(num_blocks, block_size)"
        )
    return CacheSubject(machine.make, machine.depth)
