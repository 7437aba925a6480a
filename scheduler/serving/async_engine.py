"""`AsyncEngine`: an engine for asyncio, with streams of outputs."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Collection
from types import TracebackType
from typing import Final, TypeVar

from ...kvcache import Tokens
from ..engine import Engine
from ..errors import StreamError
from ..text import TextTokenizer
from .engine_thread import Delivery, EngineThread
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
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: TextTokenizer | None = None,
        *,
        eos_token_ids: Collection[int] = (),
    ) -> None:
        """Start the thread of an engine.

        Args:
            engine: the engine; `close` closes it, too.
            tokenizer: for prompts, outputs and stop strings as text. It decodes where an output is
                awaited, not on the engine's thread.
            eos_token_ids: tokens that end every output, such as `ModelConfig.eos_token_ids`.
        """
        self.tokenizer = tokenizer
        self._eos_token_ids = frozenset(eos_token_ids)
        self._names = itertools.count()
        self._thread = EngineThread(engine)

    def generate(
        self,
        prompt: str | Tokens,
        params: GenerationParams = DEFAULTS,
        *,
        request_id: str | None = None,
        priority: int = 0,
        namespace: bytes = b"",
    ) -> OutputStream:
        """Add a request, and return its outputs as they come.

        Args:
            prompt: text or token ids. The tokens of a chat are those of
                `TextTokenizer.encode_chat`.
            params: how to continue the prompt.
            request_id: unique among active requests; default: a new one.
            priority, namespace: see `Request`.

        Raises:
            RequestError, TokenError: for arguments of the wrong type or out of range, and for text
                or stop strings without a tokenizer. What only the engine can check, such as the
                length, is raised by the stream.
            EngineClosedError: after `close`.
            EngineFailedError: if the engine has failed.
        """
        if request_id is None:
            request_id = f"request-{next(self._names)}"
        request = params.make_request(
            request_id,
            prompt,
            self.tokenizer,
            self._eos_token_ids,
            priority=priority,
            namespace=namespace,
        )
        completion = Completion(request, self.tokenizer, params.stop)
        return OutputStream(self, self._thread.submit(request), completion)

    async def call(self, function: Callable[[Engine], T]) -> T:
        """Call a function with the engine between two steps, and return its result.

        Such as `Engine.stats`, or a function that calls `Engine.reset_cache` with new weights.

        Raises:
            EngineClosedError: after `close`.
            EngineFailedError: if the engine has failed.
        """
        return await asyncio.wrap_future(self._thread.call(function))

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
    """The outputs of one request, for one task.

    Each output has all tokens so far, so that an iteration that comes late misses nothing. The last
    one has a ``finish_reason``. The request is aborted if the iteration is cancelled, and if the
    stream is closed or dropped before its end.
    """

    def __init__(self, engine: AsyncEngine, delivery: Delivery, completion: Completion) -> None:
        self._engine = engine  # which is open while a stream is
        self._delivery = delivery
        self._completion = completion
        self._has_ended = False

    @property
    def request_id(self) -> str:
        """Id of the request."""
        return self._delivery.request.request_id

    def abort(self) -> None:
        """End the request, from any thread; the last output has the finish reason "abort"."""
        self._engine._thread.abort(self._delivery)

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
        delivery, loop = self._delivery, asyncio.get_running_loop()
        if delivery.loop is None:
            delivery.loop = loop  # before the first look, so that no change goes unnoticed
        self._check_consumer(loop)
        try:
            while not self._has_ended:
                if (output := self._take()) is not None:
                    return output
                delivery.waiter = loop.create_future()
                await delivery.waiter
        except BaseException:
            self._close()
            raise
        finally:
            delivery.waiter = None
        raise StopAsyncIteration

    def _check_consumer(self, loop: asyncio.AbstractEventLoop) -> None:
        name = f"the stream of request {self.request_id!r}"
        if self._delivery.loop is not loop:
            raise StreamError(f"{name} belongs to another event loop")
        if self._delivery.waiter is not None:
            raise StreamError(f"{name} is in use by another task")

    def _take(self) -> GenerationOutput | None:
        delivery = self._delivery
        if delivery.error is not None:
            self._has_ended = True
            raise delivery.error
        reason = delivery.finish_reason  # first: then the number of tokens is final
        output = self._completion.take(delivery.num_tokens, reason)
        if output is not None and output.finish_reason is not None:
            self._close()  # a stop string may end it while the engine goes on
        return output

    def _close(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            if self._delivery.finish_reason is None:
                self.abort()

    def __del__(self) -> None:
        if hasattr(self, "_has_ended"):
            self._close()
