"""The scheduler itself: what it finds, and that a seed repeats a run."""

import pytest

from . import baton
from .baton import Deadlock, Livelock, Run, Schedule
from .explore import Explorer, Found, Scenario
from .primitives import (
    Condition,
    Event,
    Lock,
    SimpleQueue,
    Thread,
    ThreadPoolExecutor,
    now,
    sleep,
    together,
)

SEEDS = range(200)


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def add(self) -> None:
        self.count += 1


def run(function, seed: int = 0, preemptions: int | None = None) -> Run:
    made = Run(Schedule(seed, preemptions, 50), {__file__})
    made.execute(function)
    return made


def adds_twice() -> None:
    counter = Counter()
    together(counter.add, counter.add)
    assert counter.count == 2, "an addition is lost"


@pytest.mark.parametrize("preemptions", [None, 1, 2])
def test_it_finds_a_lost_update(preemptions):
    errors = [run(adds_twice, seed, preemptions).error for seed in SEEDS]
    assert any(isinstance(error, AssertionError) for error in errors)
    assert not all(errors)


def test_without_preemptions_nothing_is_lost():
    assert not any(run(adds_twice, seed, 0).error for seed in SEEDS)


def test_a_seed_repeats_a_run():
    for seed in range(20):
        first, second = (run(adds_twice, seed) for _ in range(2))
        assert first.interleaving() == second.interleaving()
        assert type(first.error) is type(second.error)
    assert len({run(adds_twice, seed).interleaving() for seed in range(20)}) > 5


def test_a_lock_keeps_the_others_out():
    def adds_with_a_lock() -> None:
        counter, lock = Counter(), Lock()

        def add() -> None:
            with lock:
                counter.add()

        together(add, add)
        assert counter.count == 2

    assert not any(run(adds_with_a_lock, seed).error for seed in SEEDS)


def test_a_deadlock_is_found_and_shown():
    def takes_both_ways() -> None:
        first, second = Lock(), Lock()

        def forth() -> None:
            with first, second:
                pass

        def back() -> None:
            with second, first:
                pass

        together(forth, back)

    [error, *_] = [each for seed in SEEDS if (each := run(takes_both_ways, seed).error)]
    assert isinstance(error, Deadlock)
    assert "all threads wait\n  main: " in str(error)
    assert "caller 1: threads/test_baton.py:" in str(error)


def test_a_lost_notification_is_a_deadlock():
    def notifies_once() -> None:
        changed = Condition()

        def wait() -> None:
            with changed:
                changed.wait()  # without a look at what it waits for

        def notify() -> None:
            with changed:
                changed.notify()

        together(wait, notify)

    errors = [run(notifies_once, seed).error for seed in SEEDS]
    assert any(isinstance(error, Deadlock) for error in errors)
    assert not all(errors)


def test_a_livelock_is_found(monkeypatch):
    def never_ends() -> None:
        counter = Counter()
        while counter.count >= 0:
            counter.add()

    monkeypatch.setattr(baton, "_MAX_POINTS", 1_000)
    error = run(never_ends).error
    assert isinstance(error, Livelock)
    assert str(error) == "no end after 1000 points"


def test_time_passes_when_all_wait():
    seen = []

    def waits() -> None:
        event = Event()
        queue: SimpleQueue[int] = SimpleQueue()

        def put() -> None:
            sleep(3.0)
            queue.put(1)
            event.set()

        assert event.wait(2.0) is False
        seen.append(now())
        Thread(put).start()
        assert queue.get(timeout=9.0) == 1
        assert event.wait(9.0) is True
        seen.append(now())

    assert run(waits).error is None
    assert seen == [1_002.0, 1_005.0]


def test_daemons_end_with_the_run():
    def starts_a_daemon() -> None:
        Thread(Event().wait, daemon=True).start()

    made = run(starts_a_daemon)
    assert made.error is None
    assert not any(task.thread.is_alive() for task in made._tasks)


def test_a_pool_runs_what_is_submitted():
    results: list[int] = []

    def submits() -> None:
        pool = ThreadPoolExecutor(2)
        futures = [pool.submit(pow, number, 2) for number in range(4)]
        results.extend(future.result(1.0) for future in futures)

    assert run(submits).error is None
    assert results == [0, 1, 4, 9]


def test_a_failure_names_the_seed_and_the_interleaving():
    def fails() -> None:
        together(lambda: sleep(1.0), lambda: 1 / 0)

    with pytest.raises(Found) as found:
        Explorer(Scenario([], fails)).check(range(7, 9))
    assert str(found.value).startswith(
        "fails fails with seed 7: ZeroDivisionError('division by zero')\n"
        "The threads ran to these places, in this order:\n  main ► "
    )
