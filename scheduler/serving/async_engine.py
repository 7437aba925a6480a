"""`AsyncEngine`: an engine for asyncio, with streams of outputs."""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Final, TypeVar

from ...kvcache import Tokens
from ..engine import Engine
from ..errors import RequestError, StreamError
from ..request import MAX_TOKENS
from ..text import Guided, TextTokenizer
from ..text.guided import TokenGuide
from .engine_thread import Consumer, EngineThread
from .observer import EngineObserver
from .outputs import Completion, GenerationOutput
from .params import GenerationParams

T = TypeVar("T")

DEFAULTS: Final = GenerationParams()


class AsyncEngine:
    """Serves requests from any number of event loops and threads, with streams of outputs.

    The engine runs on a thread of its own, which is the only one that may use it from now on. It
    waits for no consumer: the outputs of a slow one coalesce.

    Use it as an asynchronous context manager. On leaving, it waits until all requests have ended;
    an exception aborts them.

    Attributes:
        tokenizer: the tokenizer, or None.
        max_new_tokens: limit of an output in tokens, besides that of the model.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: TextTokenizer | None = None,
        *,
        eos_token_ids: Collection[int] = (),
        poll_s: float | None = None,
        failures: dict[str, str] | None = None,
        max_new_tokens: int = MAX_TOKENS,
    ) -> None:
        """Start the thread of an engine.

        Args:
            engine: the engine; `close` closes it, too.
            tokenizer: for prompts, outputs and stop strings as text. It decodes where an output is
                awaited, not on the engine's thread.
            eos_token_ids: tokens that end every output, such as `ModelConfig.eos_token_ids`.
            poll_s: how often to step an engine without work; None for never.
            failures: why ended requests have failed, by id; those that were told are removed.
            max_new_tokens: most tokens of an output that the engine takes, which refuses more.

        Raises:
            RuntimeError: if there can be no more threads; the engine is closed then.
        """
        self.tokenizer = tokenizer
        self.max_new_tokens = max_new_tokens
        self._eos_token_ids = frozenset(eos_token_ids)
        self._names = itertools.count()
        self._thread = EngineThread(engine, poll_s=poll_s, failures=failures)

    def generate(
        self,
        prompt: str | Tokens,
        params: GenerationParams = DEFAULTS,
        *,
        request_id: str | None = None,
        priority: int = 0,
        namespace: bytes = b"",
        guide: TokenGuide | None = None,
    ) -> OutputStream:
        """Add a prompt, and return the outputs of its samples as they come.

        Args:
            prompt: text or token ids. The tokens of a chat are those of
                `TextTokenizer.encode_chat`.
            params: how to continue the prompt.
            request_id: unique among active requests; default: a new one. If there are several
                samples, the engine calls them ``request_id#0`` and so on.
            priority, namespace: see `Request`.
            guide: what `make_guide` returned, instead of ``params.guided``, which this call
                compiles.

        Raises:
            RequestError, TokenError: for arguments of the wrong type or out of range, and for text
                or stop strings without a tokenizer. What only the engine can check, such as the
                length, is raised by the stream.
            EngineClosedError: after `close`.
            EngineFailedError: if the engine has failed.
        """
        if request_id is None:
            request_id = f"request-{next(self._names)}"
        requests = params.make_requests(
            request_id,
            prompt,
            self.tokenizer,
            self._eos_token_ids,
            priority=priority,
            namespace=namespace,
            guide=guide,
        )
        completions = [
            Completion(request, self.tokenizer, params.stop, name=request_id, index=index)
            for index, request in enumerate(requests)
        ]
        return OutputStream(self, self._thread.submit(requests), completions, request_id)

    def make_guide(self, guided: Guided) -> TokenGuide:
        """Compile what outputs must be, for any number of prompts.

        This may take seconds. It works without Python's lock: call it in another thread than that
        of an event loop.

        Raises:
            RequestError: if ``guided`` cannot be compiled, or there is no tokenizer.
            MissingExtraError: if a library is not installed.
        """
        if self.tokenizer is None:
            raise RequestError("guided output needs a tokenizer, and the engine has none")
        return self.tokenizer.guide(guided, self._eos_token_ids)

    async def call(self, function: Callable[[Engine], T]) -> T:
        """Call a function with the engine between two steps, and return its result.

        Such as `Engine.stats`, or a function that calls `Engine.reset_cache` with new weights.

        Raises:
            EngineClosedError: after `close`.
            EngineFailedError: if the engine has failed.
        """
        return await asyncio.wrap_future(self.submit_call(function))

    def submit_call(self, function: Callable[[Engine], T]) -> Future[T]:
        """Do what `call` does, but return a future at once, from any thread.

        Raises:
            EngineClosedError, EngineFailedError: see `call`.
        """
        return self._thread.call(function)

    def observe(self, observer: EngineObserver) -> None:
        """Tell an observer about all requests and steps from now on.

        Raises:
            EngineClosedError: after `close`.
            EngineFailedError: if the engine has failed.
        """
        self._thread.observe(observer)

    @property
    def failure(self) -> BaseException | None:
        """What the engine has failed with, or None."""
        return self._thread.failure

    def when_ended(self, function: Callable[[], object]) -> None:
        """Call a function when the engine is closed or has failed, on any thread."""
        self._thread.ended.add_done_callback(lambda _: function())

    async def close(self, *, drain: bool = True, timeout_s: float = 30.0) -> bool:
        """Refuse new requests, end the active ones, and close the engine.

        Args:
            drain: whether active requests run to their ends; otherwise they are aborted, which
                their streams report. A second call may abort those that a first one waits for.
            timeout_s: for the copies between the tiers; see `Engine.close`.

        Returns:
            Whether the threads of the host tier stopped within timeout_s.
        """
        self._thread.close(drain=drain, timeout_s=timeout_s)
        return await asyncio.wrap_future(self._thread.ended)

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close(drain=kind is None)

    def __del__(self) -> None:
        if hasattr(self, "_thread"):  # the constructor may have failed
            self._thread.close_soon(drain=False, timeout_s=30.0)


class OutputStream(AsyncIterator[GenerationOutput]):
    """The outputs of one prompt, for one task.

    Each output is that of one sample (`GenerationOutput.index`), and has all its tokens so far, so
    that an iteration that comes late misses nothing. The last one of each sample has a
    ``finish_reason``; after those of all samples, the iteration ends. The request is aborted if the
    iteration is cancelled, and if the stream is closed or dropped before its end.

    Attributes:
        request_id: id of the request.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        consumer: Consumer,
        completions: Sequence[Completion],
        request_id: str,
    ) -> None:
        self.request_id = request_id
        self._engine = engine  # which is open while a stream is
        self._consumer = consumer
        # The samples that have not ended; the first one has waited longest for its turn.
        self._live = deque(zip(consumer.deliveries, completions, strict=True))

    @property
    def has_ended(self) -> bool:
        """Whether there is no further output."""
        return not self._live

    def abort(self) -> None:
        """End all samples, from any thread; their last outputs have the finish reason "abort"."""
        for delivery in self._consumer.deliveries:
            self._engine._thread.abort(delivery)

    async def aclose(self) -> None:
        """Abort the request if it runs, and end the iteration."""
        self._close()

    async def __anext__(self) -> GenerationOutput:
        """Wait for the next output.

        Raises:
            RequestError, RequestTooLargeError: if the engine refuses the request.
            EngineFailedError: if the engine has failed.
            StreamError: if another task waits for the stream, or it belongs to another event loop.
        """
        consumer, loop = self._consumer, asyncio.get_running_loop()
        if consumer.loop is None:
            consumer.loop = loop  # before the first look, so that no change goes unnoticed
        self._check_consumer(loop)
        try:
            while self._live:
                if (output := self._take()) is not None:
                    return output
                consumer.waiter = loop.create_future()
                await consumer.waiter
        except BaseException:
            self._close()
            raise
        finally:
            consumer.waiter = None
        raise StopAsyncIteration

    def _check_consumer(self, loop: asyncio.AbstractEventLoop) -> None:
        name = f"the stream of request {self.request_id!r}"
        if self._consumer.loop is not loop:
            raise StreamError(f"{name} belongs to another event loop")
        if self._consumer.waiter is not None:
            raise StreamError(f"{name} is in use by another task")

    def _take(self) -> GenerationOutput | None:
        """Return the next output that is there; samples take turns."""
        live = self._live
        for _ in range(len(live)):
            delivery, completion = live[0]
            if delivery.error is not None:
                raise delivery.error
            reason = delivery.finish_reason  # first: then the number of tokens is final
            output = completion.take(delivery.num_tokens, reason)
            if output is not None and output.finish_reason is not None:
                live.popleft()
                if reason is None:  # a stop string ends it while the engine goes on
                    self._engine._thread.abort(delivery, output.finish_reason)
            else:
                live.rotate(-1)
            if output is not None:
                return output
        return None

    def _close(self) -> None:
        for delivery, _ in self._live:
            if delivery.finish_reason is None:
                self._engine._thread.abort(delivery)
        self._live.clear()

    def __del__(self) -> None:
        if hasattr(self, "_live"):
            self._close()
