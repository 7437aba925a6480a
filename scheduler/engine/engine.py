"""The engine: a scheduler and a model, in steps."""

from __future__ import annotations

from collections.abc import Collection

from ...kvcache import CacheManager, HostConfig
from ...kvcache.storage import Storage, StorageNamespace
from ..mixed import MixedScheduler
from ..models import Model, Params
from ..policy import Policy
from ..preemption import PreemptMode
from ..request import Request
from .model_runner import ModelRunner
from .stats import EngineStats


class Engine:
    """Serves requests with a model over a paged KV cache.

    All programs are compiled when it is made. It owns the arrays: one thread may use it. With a
    host tier it has threads, too: `close` it.

    Attributes:
        manager: holds the block tables.
        scheduler: plans the steps.
    """

    def __init__(
        self,
        model: Model,
        *,
        block_size: int,
        num_blocks: int,
        token_budget: int,
        max_running: int,
        max_model_len: int,
        prefix_cache: bool = True,
        policy: Policy | None = None,
        reserve_tokens: int | None = 512,
        preempt: PreemptMode = "recompute",
        host: HostConfig | None = None,
        storage: Storage | None = None,
        storage_namespace: StorageNamespace | None = None,
    ) -> None:
        """Allocate the arrays and compile every program.

        Args:
            model: from `load_model`; KV has the dtype of its parameters.
            block_size: tokens per block.
            num_blocks: usable blocks.
            token_budget: tokens of a step; prefill chunks fill it.
            max_running: requests that hold blocks at a time, at most token_budget.
            max_model_len: longest prompt and output together, in tokens.
            prefix_cache, policy, reserve_tokens, preempt: of `MixedScheduler`.
            host: a tier in the memory of the host, under the device.
            storage: under the host; it stays the caller's, but only the engine may poll it.
            storage_namespace: whose blocks it keeps; see `make_storage_namespace`.

        Raises:
            ConfigError, CountError, StorageConfigError: for what cannot work; before anything is
                allocated.
        """
        self.max_model_len = max_model_len
        self.manager = CacheManager(num_blocks, block_size, host=host, storage=storage_namespace)
        self.scheduler = MixedScheduler(
            self.manager,
            token_budget=token_budget,
            max_running=max_running,
            policy=policy,
            reserve_tokens=reserve_tokens,
            prefix_cache=prefix_cache,
            preempt=preempt,
        )
        self._runner = ModelRunner(
            model,
            self.manager,
            token_budget=token_budget,
            max_running=max_running,
            max_model_len=max_model_len,
            storage=storage,
        )

    def add_request(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: for a token outside the vocabulary, a request longer than
                `max_model_len`, or the id of a live request.
            RequestTooLargeError: if it could not run to its limit even alone.
            EngineClosedError: after close, with a host tier.
        """
        self._runner.check_request(request)
        self.scheduler.add(request)

    def abort(self, request_id: str) -> bool:
        """End a request in any state; False if no live one has this id."""
        return self.scheduler.abort(request_id)

    @property
    def has_work(self) -> bool:
        """Whether any request has yet to end."""
        return self.scheduler.has_work

    def step(self) -> list[Request]:
        """Run one step; return the requests that ended in it.

        If all wait for copies, it waits until one has ended.

        Raises:
            EngineClosedError: after close, with a host tier.
        """
        self._runner.collect()
        if not self.scheduler.has_work:
            self._runner.dispatch()
            return []
        plan = self.scheduler.schedule()
        next_tokens = self._runner.step(plan.chunks)
        if plan.chunks:
            return self.scheduler.update(plan, next_tokens)
        self._runner.wait()
        return []

    def run(self) -> list[Request]:
        """Run until every request has ended; return those that did, in order of their ends."""
        finished = []
        while self.has_work:
            finished += self.step()
        return finished

    def reset_cache(
        self,
        keep: Collection[bytes] = (),
        *,
        params: Params | None = None,
        weights_revision: str = "",
    ) -> None:
        """Forget the KV of all tiers, and go on with other weights, if some are given.

        Live requests keep their tokens and compute KV for them anew: from the next token on, the
        new weights decide. Abort first those that shall not go on.

        Args:
            keep: namespaces whose published KV stays.
            params: other weights of the same shapes; None: those of now.
            weights_revision: what they are called in storage. The name of earlier weights is
                right for those same weights, whose KV is then found; with others the tokens are
                wrong, and nothing here can see it.

        Raises:
            ConfigError: for weights of other shapes, or, where there is storage, without a name or
                under that of those of now. Nothing is changed.
        """
        if params is not None:
            self._runner.check_params(params, weights_revision)
        self.scheduler.reset_cache(keep, weights_revision)
        if params is not None:
            self._runner.set_params(params)

    def close(self, *, timeout_s: float = 30.0) -> bool:
        """Let copies end that are under way, such as what storage is to keep; stop the threads.

        Without a host tier the engine may be used afterwards; with one it takes no request and no
        step any more. Storage stays open.

        Returns:
            Whether the threads have stopped within timeout_s; if not, call it again.
        """
        return self._runner.close(timeout_s)

    def stats(self) -> EngineStats:
        """Return what was done so far."""
        return self._runner.stats(self.scheduler.stats())
