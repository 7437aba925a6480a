"""The LRU index against a model: a list in LRU order, and the use times in the files."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from radixkv.kvcache.storage.files.lru_index import STAMP_EVERY_NS, LruIndex, ScannedValue

from ...profiles import scaled

MAX_BYTES = 10
KEYS = [bytes([number]) * 32 for number in range(3)]
A_KEY = st.sampled_from(KEYS)


class Index(RuleBasedStateMachine):
    """Calls as the file backend makes them, without files; the clock may go back."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ns = 100 * STAMP_EVERY_NS
        self.index = LruIndex(MAX_BYTES, lambda: self.now_ns)
        self.sizes: dict[bytes, int] = {}  # coldest first
        self.in_files: dict[bytes, int] = {}  # use times in the files
        self.known: dict[bytes, int] = {}  # when these were written, if known
        self.new: set[bytes] = set()  # written and not used since
        self.last_ns = 0

    def is_later(self, stamp_ns: int) -> int:
        """Check that a use time is the clock's, or later than all before it."""
        assert stamp_ns == max(self.now_ns, self.last_ns + 1)
        self.last_ns = stamp_ns
        return stamp_ns

    def drop(self, key: bytes) -> None:
        del self.sizes[key]
        self.known.pop(key, None)
        self.new.discard(key)

    @rule(minutes=st.sampled_from([-3, -1, 1, 3]), more_ns=st.sampled_from([-1, 0, 1]))
    def time_passes(self, minutes: int, more_ns: int) -> None:
        self.now_ns += minutes * STAMP_EVERY_NS + more_ns

    @rule(key=A_KEY, num_bytes=st.integers(0, 6), fails=st.booleans())
    def write(self, key: bytes, num_bytes: int, fails: bool) -> None:
        self.index.reserve(num_bytes)
        while (coldest := self.index.coldest_over_budget()) is not None:
            assert coldest == next(iter(self.sizes))
            assert sum(self.sizes.values()) + num_bytes > MAX_BYTES
            assert self.index.take(coldest) == self.sizes[coldest]
            assert self.index.used_bytes == sum(self.sizes.values()) + num_bytes  # still counted
            self.index.removed(coldest)
            self.index.put_back(coldest)  # too late
            self.drop(coldest)
        assert self.index.fits()
        if fails:
            self.index.give_back(num_bytes)
            return
        stamp_ns = self.is_later(self.index.next_stamp_ns())
        self.index.commit(key, num_bytes)
        self.sizes.pop(key, None)
        self.sizes[key] = num_bytes
        self.in_files[key] = self.known[key] = stamp_ns
        self.new.add(key)

    @rule(key=A_KEY, in_order=st.booleans(), is_due=st.booleans())
    def use(self, key: bytes, in_order: bool, is_due: bool) -> None:
        stamp_ns = self.index.use(key, in_order=in_order, is_due=is_due)
        if key not in self.sizes:
            assert stamp_ns is None
            return
        self.sizes[key] = self.sizes.pop(key)
        is_fresh = key in self.known and abs(self.now_ns - self.known[key]) < STAMP_EVERY_NS
        if is_fresh and not is_due and not (in_order and key in self.new):
            assert stamp_ns == 0
            return
        assert stamp_ns is not None
        self.in_files[key] = self.is_later(stamp_ns)
        self.known[key] = self.now_ns
        self.new.discard(key)

    @rule(key=A_KEY)
    def fail_to_remove(self, key: bytes) -> None:
        num_bytes = self.index.take(key)
        assert num_bytes == self.sizes.get(key)
        if num_bytes is not None:
            self.index.put_back(key)
            self.index.removed(key)  # not any more
            self.drop(key)
            self.sizes = {key: num_bytes, **self.sizes}

    @rule(key=A_KEY)
    def forget(self, key: bytes) -> None:
        self.index.forget(key)
        if key in self.sizes:
            self.drop(key)

    @rule()
    def restart(self) -> None:
        found = [ScannedValue(self.in_files[key], key, n) for key, n in self.sizes.items()]
        self.index = LruIndex(MAX_BYTES, lambda: self.now_ns)
        self.index.fill(found)
        self.sizes = {value.key: value.num_bytes for value in sorted(found)}
        self.known = {value.key: value.used_ns for value in found}
        self.new = set()
        self.last_ns = max(self.known.values(), default=0)

    @invariant()
    def it_agrees(self) -> None:
        assert self.index.sizes() == list(self.sizes.items())
        assert self.index.contains(KEYS) == [key in self.sizes for key in KEYS]
        assert [key in self.index for key in KEYS] == self.index.contains(KEYS)
        assert len(self.index) == len(self.sizes)
        assert self.index.used_bytes == sum(self.sizes.values())
        assert self.index.coldest_over_budget() is None
        self.index.check()


TestIndex = Index.TestCase
TestIndex.settings = scaled(150, 40)


@pytest.mark.parametrize("less_ns", [-1, 0, 1])
@pytest.mark.parametrize("sign", [-1, 1])
def test_a_use_time_is_due_after_a_minute(sign: int, less_ns: int) -> None:
    index = LruIndex(MAX_BYTES, lambda: sign * (STAMP_EVERY_NS - less_ns))
    index.fill([ScannedValue(0, KEYS[0], 1)])
    assert (index.use(KEYS[0]) == 0) == (less_ns > 0)


def test_more_than_the_budget_does_not_fit() -> None:
    index = LruIndex(MAX_BYTES, lambda: 0)
    index.reserve(MAX_BYTES)
    assert index.fits()
    index.reserve(1)
    assert not index.fits()
    assert index.coldest_over_budget() is None  # nothing to evict
