"""Ctrl-C in the library: at the end of what must be whole, and only where Python raises it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from radixkv.scheduler.terminal.interrupts import delay_interrupts


@pytest.fixture(autouse=True)
def python_handles_ctrl_c() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("is_asked", [True, False])
def test_a_ctrl_c_waits_for_the_question_or_the_end(is_asked: bool) -> None:
    done: list[str] = []

    def work() -> None:
        with delay_interrupts() as raise_interrupt:
            raise_interrupt()
            signal.raise_signal(signal.SIGINT)
            done.append("after the first")
            if is_asked:
                raise_interrupt()
            done.append("to the end")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["after the first", "to the end"][: 2 - is_asked]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_second_ctrl_c_does_not_wait() -> None:
    def work() -> None:
        with delay_interrupts():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            raise AssertionError("the work goes on")

    with pytest.raises(KeyboardInterrupt):
        work()


def test_a_handler_of_the_program_stays() -> None:
    calls: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: calls.append(number))
    with delay_interrupts() as raise_interrupt:
        signal.raise_signal(signal.SIGINT)
        raise_interrupt()
    assert calls == [signal.SIGINT]


def test_another_thread_has_no_interrupts() -> None:
    def work(use: Callable[[], None]) -> None:
        with delay_interrupts() as raise_interrupt:
            use()
            raise_interrupt()

    used: list[bool] = []
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work, lambda: used.append(True)).result()
    assert used
