"""The thread of an engine: takes commands from any thread, steps, and tells consumers.

Nothing waits for a consumer, and nothing is queued for one. A request's tokens stay where the
engine appends them; the thread publishes how many there are::

    engine thread          event loop of the consumer
    num_tokens = 7
    is_posted?  no ──────► wake: is_posted = False, then read 7 tokens
    num_tokens = 8
    is_posted?  no ──────► wake (waits in the loop, which is busy)
    num_tokens = 9
    is_posted?  yes        wake: is_posted = False, then read 9 tokens at once

Only the engine thread sets `is_posted`, after it has written the state. Only the loop clears it,
before it reads the state. So no change is missed, and a loop has one wake-up of a consumer at most.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import TypeVar

from ...kvcache import RadixKVError
from ...kvcache.cleanup import give_back
from ..engine import Engine
from ..errors import EngineClosedError, EngineFailedError, HandoffFailedError, SchedulerError
from ..request import FinishReason, Request
from .observer import EndReason, EngineObserver

T = TypeVar("T")


class Consumer:
    """Where one task waits for the samples of a prompt.

    Attributes:
        deliveries: a request for each sample.
        loop, waiter: set by the consumer: its event loop, and the future that it waits for.
        is_posted: whether a wake-up is on its way to the loop.
    """

    __slots__ = ("deliveries", "is_posted", "loop", "waiter")

    def __init__(self, requests: Iterable[Request]) -> None:
        self.deliveries = [Delivery(request, self) for request in requests]
        self.loop: asyncio.AbstractEventLoop | None = None
        self.waiter: asyncio.Future[None] | None = None
        self.is_posted = False

    def wake(self) -> None:
        """Let the consumer look again; only on its event loop."""
        self.is_posted = False
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


class Delivery:
    """A request's state, written by the engine thread and read by one consumer without a lock.

    Attributes:
        request: the request; after `submit`, only the engine thread changes it.
        consumer: who reads it.
        num_tokens: number of tokens that the consumer may read. It is written before
            `finish_reason`, and read after it.
        finish_reason: set when `num_tokens` is final.
        error: why the request was refused, or failed.
    """

    __slots__ = ("consumer", "error", "finish_reason", "num_tokens", "request")

    def __init__(self, request: Request, consumer: Consumer) -> None:
        self.request = request
        self.consumer = consumer
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.error: RadixKVError | None = None


class EngineThread:
    """Owns an engine, and runs it on a thread of its own until it is closed or fails.

    All methods may be called from any thread.

    Attributes:
        ended: done when the thread has ended; its result is that of `Engine.close`.
        failure: what the engine has failed with, or None.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        poll_s: float | None = None,
        failures: dict[str, str] | None = None,
    ) -> None:
        """Start the thread.

        Args:
            engine: the engine.
            poll_s: how often to step an engine without work; None for never.
            failures: why ended requests have failed, by id; the thread removes what it has told.

        Raises:
            RuntimeError: if there can be no more threads; the engine is closed then.
        """
        self._poll_s = poll_s
        self.failure: BaseException | None = None
        self._failures = {} if failures is None else failures
        self.ended: Future[bool] = Future()
        self.ended.set_running_or_notify_cancel()  # so that no waiter can cancel it
        self._observers: tuple[EngineObserver, ...] = ()
        self._engine = engine
        # A SimpleQueue is reentrant: a finalizer may put a command while another is being put.
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._lock = threading.Lock()  # of the next three
        self._refusal: SchedulerError | None = None
        self._deliveries: set[Delivery] = set()  # not ended
        self._calls: set[Future[object]] = set()
        # Those in the engine; of the engine thread alone. The id of a request that has ended may be
        # that of a new one before the step that tells its end.
        self._active: dict[Request, Delivery] = {}
        self._is_closing = False
        self._timeout_s = 0.0
        # A daemon, because Python joins other threads before it runs `atexit`.
        self._thread = threading.Thread(target=self._run, name="radixkv-engine", daemon=True)
        try:
            atexit.register(self._close_at_exit)
            self._thread.start()
        except BaseException:
            if self._thread.is_alive():  # an interrupt
                give_back(partial(self.close, drain=False, timeout_s=0.0))
            else:
                unregister = partial(atexit.unregister, self._close_at_exit)
                give_back(unregister, partial(engine.close, timeout_s=0.0))
            raise

    def submit(self, requests: Sequence[Request]) -> Consumer:
        """Add the requests of one consumer to the engine; it refuses all of them or none.

        Raises:
            EngineClosedError, EngineFailedError: after `close`, or a failure.
        """
        consumer = Consumer(requests)
        with self._lock:
            self._check_open()
            for observer in self._observers:  # first: if one raises, nothing is submitted
                for request in requests:
                    observer.request_submitted(request)
            self._deliveries.update(consumer.deliveries)
            self._commands.put(partial(self._add, consumer))
        return consumer

    def abort(self, delivery: Delivery, reason: FinishReason = "abort") -> None:
        """End a request before the next step; without effect if it has ended.

        Args:
            delivery: the request.
            reason: what observers are told: "stop" if its consumer found a stop string.
        """
        self._commands.put(partial(self._abort, delivery, reason))

    def observe(self, observer: EngineObserver) -> None:
        """Tell an observer about all requests and steps from now on, until the thread ends.

        Raises:
            EngineClosedError, EngineFailedError: after `close`, or a failure.
        """
        with self._lock:
            self._check_open()
            self._observers += (observer,)

    def call(self, function: Callable[[Engine], T]) -> Future[T]:
        """Call a function with the engine between two steps.

        Raises:
            EngineClosedError, EngineFailedError: after `close`, or a failure.
        """
        future: Future[T] = Future()
        with self._lock:
            self._check_open()
            self._calls.add(future)  # type: ignore[arg-type]  # only its exception is set
            self._commands.put(partial(self._call, function, future))
        return future

    def close(self, *, drain: bool, timeout_s: float) -> None:
        """Refuse new requests, and end the thread when those that are active have ended.

        Args:
            drain: whether to let them run to their ends; otherwise they are aborted.
            timeout_s: see `Engine.close`.
        """
        with self._lock:
            if self._refusal is None:
                self._refusal = EngineClosedError("the engine is closed")
        self.close_soon(drain=drain, timeout_s=timeout_s)

    def close_soon(self, *, drain: bool, timeout_s: float) -> None:
        """Close, but take no lock: for finalizers, which may run while their thread holds it."""
        self._commands.put(partial(self._begin_close, drain, timeout_s))

    def _close_at_exit(self) -> None:
        self.close(drain=False, timeout_s=30.0)
        self._thread.join(timeout=60.0)

    def _check_open(self) -> None:
        refusal = self._refusal
        if refusal is not None:  # each caller gets its own, because a raise changes the traceback
            raise type(refusal)(*refusal.args) from refusal.__cause__

    # On the engine thread

    def _run(self) -> None:
        try:
            try:
                self._serve()
            finally:
                closed = self._engine.close(timeout_s=self._timeout_s)
        except BaseException as error:
            self.ended.set_exception(error)
        else:
            self.ended.set_result(closed)
        atexit.unregister(self._close_at_exit)  # only now: a thread that ends within JAX aborts

    def _serve(self) -> None:
        try:
            while not self._is_closing or self._engine.has_work:
                self._obey()
                if self._engine.has_work or self._poll_s is not None:
                    observers = self._observers  # one that comes meanwhile sees the next step
                    for observer in observers:
                        observer.step_begins()
                    self._publish(self._engine.step())
                    for observer in observers:
                        observer.step_ended(self._engine, self._engine.scheduler.running)
        except BaseException as error:  # whatever it is, nobody may wait for ever
            self._fail(error)
        for observer in self._observers:
            observer.engine_ended(self._engine)

    def _obey(self) -> None:
        """Execute the commands that are there; wait for one if the engine has no work."""
        block = not self._engine.has_work
        while True:
            try:
                command = self._commands.get(block, self._poll_s)
            except Empty:
                return
            command()
            block = False

    def _add(self, consumer: Consumer) -> None:
        added: list[Delivery] = []
        try:
            for delivery in consumer.deliveries:
                self._engine.add_request(delivery.request)
                added.append(delivery)
        except RadixKVError as error:
            for delivery in added:
                self._engine.abort(delivery.request.request_id)
            for delivery in consumer.deliveries:
                delivery.error = error
                self._tell_end(delivery, "refused")
            self._post(consumer.deliveries)
        else:
            self._active.update((each.request, each) for each in added)

    def _abort(self, delivery: Delivery, reason: FinishReason = "abort") -> None:
        request = delivery.request
        is_open = request in self._active and request.finish_reason is None
        if is_open and self._engine.abort(request.request_id):
            self._end(delivery, reason)
            self._post([delivery])

    def _call(self, function: Callable[[Engine], T], future: Future[T]) -> None:
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(function(self._engine))
            except Exception as error:
                future.set_exception(error)
        with self._lock:
            self._calls.discard(future)

    def _begin_close(self, drain: bool, timeout_s: float) -> None:
        self._is_closing, self._timeout_s = True, timeout_s
        if not drain:
            for delivery in list(self._active.values()):
                self._abort(delivery)

    def _publish(self, ended: Sequence[Request]) -> None:
        """Tell the consumers about the tokens of a step, and about requests that ended in it."""
        changed = []
        for request in ended:
            delivery = self._active.get(request)
            if delivery is not None:
                assert request.finish_reason is not None, f"{request!r} has not ended"
                if request.request_id in self._failures:
                    self._end_failed(delivery, self._failures.pop(request.request_id))
                else:
                    self._end(delivery, request.finish_reason)
                changed.append(delivery)
        for request in self._engine.advanced:
            delivery = self._active.get(request)
            if delivery is not None and delivery.num_tokens != len(request.output_tokens):
                delivery.num_tokens = len(request.output_tokens)
                changed.append(delivery)
        self._post(changed)

    def _end(self, delivery: Delivery, reason: FinishReason) -> None:
        request = delivery.request
        del self._active[request]
        delivery.num_tokens = len(request.output_tokens)
        delivery.finish_reason = request.finish_reason
        self._tell_end(delivery, reason)

    def _end_failed(self, delivery: Delivery, reason: str) -> None:
        del self._active[delivery.request]
        delivery.error = HandoffFailedError(f"request {delivery.request.request_id!r}: {reason}")
        self._tell_end(delivery, "error")

    def _tell_end(self, delivery: Delivery, reason: EndReason) -> None:
        for observer in self._observers:
            observer.request_ended(delivery.request, reason)

    def _post(self, deliveries: Collection[Delivery]) -> None:
        """Wake the consumers of changed requests, those of an event loop with one call.

        Only then are requests that have ended forgotten: if an observer raises before, `_fail`
        tells their consumers.
        """
        by_loop: dict[asyncio.AbstractEventLoop, list[Consumer]] = {}
        for delivery in deliveries:
            consumer = delivery.consumer
            loop = consumer.loop
            # A loop that is closed may not have come to its last wake-up.
            if loop is not None and (not consumer.is_posted or loop.is_closed()):
                consumer.is_posted = True
                by_loop.setdefault(loop, []).append(consumer)
        for loop, consumers in by_loop.items():
            try:
                loop.call_soon_threadsafe(_wake, consumers)
            except RuntimeError:  # the loop is closed: nobody will read on
                for consumer in consumers:
                    consumer.loop = None
                    for delivery in consumer.deliveries:
                        self._abort(delivery)
        ended = [each for each in deliveries if each.finish_reason or each.error]
        if ended:
            with self._lock:
                self._deliveries.difference_update(ended)

    def _fail(self, error: BaseException) -> None:
        """Refuse everything from now on, and raise the error in all who wait."""
        with self._lock:
            self.failure, self._refusal = error, _failed(error)
            deliveries, self._deliveries = self._deliveries, set()
            calls, self._calls = self._calls, set()
        self._active.clear()
        failed = [each for each in deliveries if each.finish_reason is None and each.error is None]
        for delivery in failed:
            delivery.error = _failed(error)
        self._post(deliveries)
        for call in calls:
            if call.running() or call.set_running_or_notify_cancel():
                call.set_exception(_failed(error))
        for delivery in failed:  # after all who wait have been told: an observer may raise again
            for observer in self._observers:
                observer.request_ended(delivery.request, "error")


def _wake(consumers: Iterable[Consumer]) -> None:
    for consumer in consumers:
        consumer.wake()


def _failed(error: BaseException) -> EngineFailedError:
    failed = EngineFailedError(f"the engine has failed: {error!r}")
    failed.__cause__ = error
    return failed
