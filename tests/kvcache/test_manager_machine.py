"""A Hypothesis state machine over the cache manager: any order of calls, checked after each."""

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from .driver import drive
from .harness import BOUNDS, Config, Harness

UP_TO = {name: st.integers(0, bound - 1) for name, bound in BOUNDS.items()}
WHO, TOKENS, BLOCKS = UP_TO["who"], UP_TO["num_tokens"], UP_TO["num_blocks"]


class ManagerMachine(RuleBasedStateMachine):
    """The rules of `Harness`; a failure prints as the calls that lead to it."""

    harness: Harness

    @initialize(
        num_blocks=st.integers(4, 14), block_size=st.integers(1, 4), alphabet=st.integers(2, 3)
    )
    def configure(self, num_blocks: int, block_size: int, alphabet: int) -> None:
        self.harness = Harness(Config(num_blocks, block_size, alphabet))

    def settled(self, name: str, *arguments: int) -> None:
        getattr(self.harness, name)(*arguments)
        self.harness.settle()

    @rule(
        base=UP_TO["base"],
        keep=UP_TO["keep"],
        blocks=UP_TO["blocks"],
        delta=UP_TO["delta"],
        fill=UP_TO["fill"],
        namespace=UP_TO["namespace"],
    )
    def submit(
        self, base: int, keep: int, blocks: int, delta: int, fill: int, namespace: int
    ) -> None:
        self.settled("submit", base, keep, blocks, delta, fill, namespace)

    @rule(
        base=UP_TO["base"],
        keep=UP_TO["keep"],
        blocks=UP_TO["blocks"],
        delta=UP_TO["delta"],
        fill=UP_TO["fill"],
        namespace=UP_TO["namespace"],
    )
    def serve(
        self, base: int, keep: int, blocks: int, delta: int, fill: int, namespace: int
    ) -> None:
        self.settled("serve", base, keep, blocks, delta, fill, namespace)

    @rule(who=WHO)
    def admit(self, who: int) -> None:
        self.settled("admit", who)

    @rule(who=WHO)
    def twin(self, who: int) -> None:
        self.settled("twin", who)

    @rule(who=WHO, num_tokens=TOKENS, token=UP_TO["token"])
    def compute(self, who: int, num_tokens: int, token: int) -> None:
        self.settled("compute", who, num_tokens, token)

    @rule(who=WHO, delta=UP_TO["delta"])
    def publish(self, who: int, delta: int) -> None:
        self.settled("publish", who, delta)

    @rule(who=WHO)
    def finish(self, who: int) -> None:
        self.settled("finish", who)

    @rule(who=WHO, num_tokens=TOKENS)
    def extend(self, who: int, num_tokens: int) -> None:
        self.settled("extend", who, num_tokens)

    @rule(rows=UP_TO["rows"])
    def extend_batch(self, rows: int) -> None:
        self.settled("extend_batch", rows)

    @rule(who=WHO)
    def release(self, who: int) -> None:
        self.settled("release", who)

    @rule(num_blocks=BLOCKS)
    def evict(self, num_blocks: int) -> None:
        self.settled("evict", num_blocks)

    @rule(kind=UP_TO["kind"], who=WHO)
    def refuse(self, kind: int, who: int) -> None:
        self.settled("refuse", kind, who)

    @rule()
    def reset(self) -> None:
        self.settled("reset")

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            self.harness.drain()


TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = settings(
    max_examples=4 * settings().max_examples,
    # Explaining takes longer than finding and shrinking, and names only the line that asserts.
    phases=[phase for phase in Phase if phase is not Phase.explain],
)


def test_random_traffic_meets_every_situation_of_interest():
    # Floors, so that a change to the rules cannot quietly stop testing something.
    seen = drive(seed=1, num_steps=16_000)
    floors = {
        "hit": 150,
        "full hit": 100,
        "admit with a stale match": 80,
        "masked write": 50,
        "duplicate of a held copy": 20,
        "duplicate of an unheld copy": 5,
        "evicted for room": 120,
        "batch that needs blocks": 20,
        "OutOfBlocksError": 300,
        "RequestTooLargeError": 10,
        "LeaseError": 50,
        "CountError": 20,
        "TokenError": 20,
        "NamespaceError": 20,
    }
    rare = {what: seen[what] for what, floor in floors.items() if seen[what] < floor}
    assert not rare, f"too rare: {rare}"
