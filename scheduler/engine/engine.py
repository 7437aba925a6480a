"""The engine: serves requests with a model, step by step, on one node."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection

from jax.sharding import Mesh

from ...kvcache import CacheManager, EventBatch, HostConfig
from ...kvcache.storage import Storage, StorageNamespace, StorageWorkers, open_storage
from ...kvcache.tokens import check_namespaces
from ..batching.preemption import PreemptMode
from ..mixed import MixedScheduler
from ..models import Model, Params, shard_model
from ..policy import Policy
from ..request import Request
from ..step_plan import StepPlan
from .calls import Group
from .group_runners import runner_class
from .model_runner import ModelRunner
from .stats import EngineStats


class Engine:
    """Serves requests with a model over a paged KV cache.

    All programs are compiled at construction. The engine owns the arrays, so use it from one thread
    only. With a host tier it has threads of its own: `close` it.

    Attributes:
        manager: holds the block tables.
        scheduler: plans the steps.
        advanced: requests to which the last call of `step` may have given tokens, or a
            `reset_cache` before it; those that ended are among them.
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
        depth: int = 2,
        host: HostConfig | None = None,
        storage: Storage | str | None = None,
        storage_namespace: StorageNamespace | None = None,
        storage_max_bytes: int | None = None,
        warm_up_sampling: bool = False,
        on_events: Callable[[EventBatch], object] | None = None,
        mesh: Mesh | None = None,
        group: Group | None = None,
    ) -> None:
        """Allocate the arrays and compile every program.

        Args:
            model: from `load_model`; KV has the dtype of its parameters.
            block_size: tokens per block.
            num_blocks: number of usable blocks.
            token_budget: most tokens of a step; prefill chunks fill it.
            max_running: most requests that hold blocks at a time; at most token_budget.
            max_model_len: limit of prompt and output together, in tokens.
            prefix_cache, policy, reserve_tokens, preempt: see `MixedScheduler`.
            depth: most steps in flight. With 2, the default, the host plans and dispatches a step
                while the device computes the one before; with 1 they take turns. The tokens are
                the same.
            host: configuration of the host tier.
            storage: storage tier below the host: a URL, see `open_storage`, or a storage that the
                caller closes and only the engine polls.
            storage_namespace: identity of the stored blocks; see `make_storage_namespace`.
            storage_max_bytes: size limit of a ``file:`` URL; default: 16 GiB.
            warm_up_sampling: whether to compile the programs that only some requests need, for
                min_p, penalties, masks and logprobs, now. Otherwise each is compiled when a
                request first needs it, and that step waits for it. Those for prompt_logprobs always
                are.
            on_events: takes the KV events of each step, on the thread of the engine, which waits
                for it; None records none. See `CacheManager.take_events`.
            mesh: devices that share the model and its KV; see `shard_model`. Default: those of the
                model. The tokens are the same, up to the rounding of sums.
            group: the processes whose devices are in the mesh, if they are several; see
                `ProcessGroup`. Every process makes an engine with the same options. That of
                process 0 serves; the others `follow` it, and ignore storage, preempt and on_events.

        Raises:
            GroupError: if another process has other options, or does not come.
            TensorParallelError: if the model cannot be cut for the devices of the mesh.
            ConfigError, CountError, StorageConfigError: for options that cannot work, before
                anything is allocated.
            StorageError: if the storage of a URL cannot be opened.
        """
        if mesh is not None:
            model = shard_model(model, mesh)
        if group is not None and group.process_id:
            storage = storage_namespace = on_events = None
            preempt = "recompute"  # what this scheduler never does may need storage
        self.max_model_len = max_model_len
        self.manager = CacheManager(
            num_blocks,
            block_size,
            host=host,
            storage=storage_namespace,
            record_events=on_events is not None,
        )
        self._on_events = on_events
        self.scheduler = MixedScheduler(
            self.manager,
            token_budget=token_budget,
            max_running=max_running,
            policy=policy,
            reserve_tokens=reserve_tokens,
            prefix_cache=prefix_cache,
            preempt=preempt,
            depth=depth,
        )
        self._in_flight: deque[StepPlan] = deque()
        self._finished: list[Request] = []  # before `step` could return them
        self.advanced: list[Request] = []
        self._advanced: list[Request] = []  # since then
        self._opened: StorageWorkers | None = None
        if isinstance(storage, str):
            storage = self._opened = open_storage(
                storage, storage_namespace, max_bytes=storage_max_bytes
            )
        try:
            make_runner = ModelRunner if group is None else runner_class(group)
            self._runner = make_runner(
                model,
                self.manager,
                token_budget=token_budget,
                max_running=max_running,
                max_model_len=max_model_len,
                storage=storage,
                warm_up_sampling=warm_up_sampling,
                samples=prefix_cache,
                group=group,
            )
        except BaseException:
            self._close_opened()
            raise

    def add_request(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: for a token outside the vocabulary, more tokens than ``max_model_len``, or
                the id of an active request.
            RequestTooLargeError: if it could not run to its limit even alone.
            EngineClosedError: after close, with a host tier.
        """
        self._runner.check_request(request)
        self.scheduler.add(request)

    def abort(self, request_id: str) -> bool:
        """End a request in any state; return False if no active request has this id."""
        return self.scheduler.abort(request_id)

    @property
    def has_work(self) -> bool:
        """Whether any request has yet to end, or to be returned by `step`."""
        return self.scheduler.has_work or bool(self._finished)

    def step(self) -> list[Request]:
        """Plan and dispatch one step, and read the first one in flight if they are ``depth``.

        If nothing can be dispatched, read a step in flight, or block until a copy has ended.

        Returns:
            The requests that ended in the step that was read.

        Raises:
            EngineClosedError: after close, with a host tier.
        """
        self._runner.collect()
        if not self.scheduler.has_work:
            self._runner.dispatch()
            return self._end_step()
        if len(self._in_flight) == self.scheduler.depth:  # a ctrl-C has ended the last wait
            self._sample()
            self._read()
        plan = self.scheduler.schedule()
        self._runner.start(plan)
        if plan.num_chunks:
            self._in_flight.append(plan)
        self._sample()
        if self._in_flight and (
            not plan.num_chunks or len(self._in_flight) == self.scheduler.depth
        ):
            self._read()
        elif not plan.num_chunks:
            self._runner.wait()
        return self._end_step()

    def _sample(self) -> None:
        """Choose the tokens of the last step, after the steps before it that it needs."""
        while not self._runner.sample():
            self._read()

    def _end_step(self) -> list[Request]:
        if self._on_events is not None:
            self._report_events(self._on_events)
        self.advanced, self._advanced = self._advanced, []
        finished, self._finished = self._finished, []
        return finished

    def _report_events(self, on_events: Callable[[EventBatch], object]) -> None:
        batch = self.manager.take_events()
        if batch is not None:
            on_events(batch)

    def _read(self) -> None:
        """Wait for the first step in flight, and apply its results."""
        next_tokens, plan = self._runner.read(), self._in_flight.popleft()
        self._finished += self.scheduler.update(plan, next_tokens)
        self._advanced += plan.requests
        self._runner.append_logprobs(plan)

    def run(self) -> list[Request]:
        """Run until every request has ended; return them in the order in which they ended."""
        finished = []
        while self.has_work:
            finished += self.step()
        return finished

    def follow(self, get_params: Callable[[str], Params] | None = None) -> None:
        """Execute what process 0 of the group dispatches, until it closes the group.

        Args:
            get_params: returns new weights by their ``weights_revision``, when process 0 has got
                them by `reset_cache`. Its errors end the group, as other errors do.

        Raises:
            GroupError: if process 0 is lost, sends what cannot follow from what it sent before, or
                has other weights, or new ones without ``get_params``.
            ConfigError: for weights of other shapes, or in process 0.
        """
        self._runner.follow(get_params)

    def reset_cache(
        self,
        keep: Collection[bytes] = (),
        *,
        params: Params | None = None,
        weights_revision: str = "",
    ) -> None:
        """Drop the KV of all tiers, and optionally replace the weights.

        Active requests keep their tokens, with those of the steps in flight, and recompute the KV;
        their next tokens come from the new weights. Before the reset, abort requests that should
        not continue.

        Args:
            keep: namespaces whose published KV stays.
            params: new weights of the same shapes; None keeps the current ones. In a group, the
                other processes get theirs by `follow`, and this waits for them.
            weights_revision: name of the weights in storage. If you return to earlier weights, pass
                their name to find their KV. The name of different weights gives wrong tokens, which
                the engine cannot detect.

        Raises:
            ConfigError: for weights of other shapes, or, with storage, for new weights under an
                empty or the current name. Nothing is changed.
            GroupError: if another process does not get the same weights in the time of the group.
        """
        if params is not None:
            self._runner.check_params(params, weights_revision)
        check_namespaces("keep", keep)
        self._sample()
        while self._in_flight:
            self._read()
        self.scheduler.reset_cache(keep, weights_revision)
        if params is not None:
            self._runner.set_params(params, weights_revision)
        if self._on_events is not None:
            self._report_events(self._on_events)

    def close(self, *, timeout_s: float = 30.0) -> bool:
        """Finish the copies in flight, such as write-backs to storage, and stop the threads.

        An engine with a host tier accepts no requests or steps afterwards; one without can still be
        used. A storage that the engine opened is closed; one of the caller's stays open.

        Returns:
            Whether the threads stopped within timeout_s; if not, call `close` again.
        """
        closed = self._runner.close(timeout_s)
        if self._on_events is not None:
            self._report_events(self._on_events)
        return closed and self._close_opened()

    def _close_opened(self) -> bool:
        """Close the storage that the engine opened; return whether its threads have stopped."""
        return self._opened is None or self._opened.close()

    def __repr__(self) -> str:
        queues = self.scheduler
        return (
            f"Engine({len(queues.running):,} running, {len(queues.waiting):,} waiting, "
            f"{len(self._in_flight)} steps in flight; {self.manager!r})"
        )

    def stats(self) -> EngineStats:
        """Return the counts so far."""
        return self._runner.stats(self.scheduler.stats())
