"""Runs a model over the block arrays: compiled programs, and copies between the tiers."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final, NamedTuple, TypeAlias

import jax
import numpy as np
from jaxtyping import Array, Int32

from ...kernels import AttentionBackend, attention_backend
from ...kernels.backends import target_device
from ...kvcache import BlockArrays, CacheManager
from ...kvcache.copies.block_copies import BlockCopies
from ...kvcache.storage import Storage
from ...kvcache.tokens import as_count
from ..errors import ConfigError, RequestError
from ..models import Model, Params
from ..models.checkpoint import shard_params
from ..models.tensor_parallel import pool_sharding, whole
from ..request import Request
from ..step_plan import BlockCopy, SchedulerStats, StepPlan
from .adjustments import Adjustments
from .batch_state import DeviceBatch, Needs
from .calls import Group
from .compilations import compilation_counter
from .logprobs import Logprobs, StepLogprobs
from .programs import Programs, Rows, empty_rows
from .stats import EngineStats
from .step_arrays import Shapes, pack
from .storage_namespace import check_namespace
from .tier_copies import TierCopies

GetParams: TypeAlias = Callable[[str], Params]
"""Returns weights by their name; see `Engine.follow`."""

_BLOCKS_PER_COPY: Final = 8
"""Blocks that one program copies for new samples; fewer are padded."""


class _Results(NamedTuple):
    """Tokens of a step in flight, how many of them are not padding, and log probabilities."""

    tokens: Int32[Array, " rows"]
    num_chunks: int
    logprobs: StepLogprobs | None


class _Pending(NamedTuple):
    """A step whose tokens have yet to be chosen."""

    plan: StepPlan
    rows: Rows
    tokens: Int32[Array, " rows"]
    needs: int


class ModelRunner:
    """Computes the steps that a scheduler plans, in an engine of any role.

    All programs are compiled at construction. The runner owns the arrays, so use it from one thread
    only. With a host tier it has threads of its own: `close` it.

    Attributes:
        model: configuration and parameters.
        manager: holds the block tables.
        max_model_len: limit of prompt and output together, in tokens.
        arrays: KV pools; replace them only on the thread that uses the runner.
    """

    def __init__(
        self,
        model: Model,
        manager: CacheManager,
        *,
        token_budget: int,
        max_running: int,
        max_model_len: int,
        storage: Storage | None = None,
        decode: bool = True,
        warm_up_sampling: bool = False,
        samples: bool = False,
        num_groups: int = 1,
        group: Group | None = None,
    ) -> None:
        """Allocate the arrays for all blocks of a manager, and compile every program.

        Args:
            model: from `load_model`; KV has the dtype of its parameters.
            manager: manager of the blocks.
            token_budget, max_running: most tokens and most rows of a step; see `MixedScheduler`.
            max_model_len: limit of prompt and output together, in tokens.
            storage: storage tier below the manager's host tier.
            decode: whether to compile the decode programs.
            warm_up_sampling: see `Engine`.
            samples: whether to compile the copy of blocks from one sample to another.
            num_groups: number of groups of layers that `start` tells apart.
            group: the processes whose devices share the model, if they are several.

        Raises:
            ConfigError, CountError: for options that cannot work, before anything is allocated.
        """
        config = model.config
        namespace = None if manager.tiers is None else manager.tiers.storage
        check_namespace(model, storage, namespace)
        _check_group(model, group)
        max_model_len = as_count("max_model_len", max_model_len, minimum=1)
        if max_model_len > config.max_positions:
            raise ConfigError(
                f"max_model_len must be at most the model's {config.max_positions} positions, "
                f"got {max_model_len}"
            )
        self.manager = manager
        self.max_model_len = max_model_len
        self.model = model
        self.arrays = BlockArrays.zeros(
            num_layers=config.num_layers,
            num_blocks=manager.num_blocks,
            kv_heads=config.num_kv_heads,
            block_size=manager.block_size,
            head_dim=config.head_dim,
            dtype=model.params.embedding.dtype,
            sharding=pool_sharding(model.mesh),
        )
        on_devices = whole(model.mesh)
        self._shapes = Shapes(
            token_budget=token_budget,
            max_running=max_running,
            decode=decode,
        )
        self._attention = _choose_attention(model, self.arrays, token_budget, max_running)
        self._results: deque[_Results] = deque()
        self._read_logprobs: StepLogprobs | None = None
        self._pending: _Pending | None = None
        self._steps = self._padding_tokens = self._late_compilations = 0
        self._warm_up_compilations = 0
        self._counter = compilation_counter()
        with self.warming_up():
            width = -(-max_model_len // manager.block_size)
            self._batch = DeviceBatch(max_running, width, on_devices)
            shapes = (*self._shapes.decode, *self._shapes.extend)
            self._programs = Programs(
                model, self.arrays, self._batch.state, shapes, manager.block_size, num_groups
            )
            self._adjustments = Adjustments(
                max_running, max_running, max_model_len, config.vocab_size, on_devices
            )
            self._logprobs = Logprobs()
            if warm_up_sampling:
                self._logprobs.warm_up(self._programs.logits)
                rows, last_tokens = empty_rows(max_running), self._batch.state.last_tokens
                self._adjustments.warm_up(self._programs.logits, rows, last_tokens)
            self._copies: BlockCopies | None = None
            if samples:
                size = min(_BLOCKS_PER_COPY, max_running)
                self._copies = BlockCopies(self.arrays, size, ["copy"], min_blocks=size)
            # Last, because it has threads: nobody would close them after an error.
            tiers = manager.tiers
            self._tiers = None if tiers is None else TierCopies(tiers, self.arrays, storage)

    def check_request(self, request: Request) -> None:
        """Check that the model can take a request.

        Raises:
            RequestError: for a token outside the vocabulary, or more tokens than max_model_len.
            EngineClosedError: after close, with a host tier.
        """
        if self._tiers is not None:
            self._tiers.check_open()
        vocab_size = self.model.config.vocab_size
        bad = np.flatnonzero((request.prompt < 0) | (request.prompt >= vocab_size))
        if len(bad):
            raise RequestError(
                f"request {request.request_id!r}: token {request.prompt[bad[0]]} at position "
                f"{bad[0]} is outside the vocabulary of {vocab_size}"
            )
        length = request.num_prompt_tokens + request.max_new_tokens
        if length > self.max_model_len:
            raise RequestError(
                f"request {request.request_id!r}: {request.num_prompt_tokens} prompt tokens and "
                f"{request.max_new_tokens} new ones are more than max_model_len "
                f"{self.max_model_len}"
            )

    # A step: `collect`, then the scheduler plans, then `step` or `dispatch`; with guided requests
    # `start`, and `read` until `sample`

    def collect(self) -> None:
        """Report completed copies between the tiers to the manager.

        Raises:
            EngineClosedError: after close, with a host tier.
        """
        if self._tiers is not None:
            self._tiers.check_open()
            self._tiers.collect()

    def dispatch(self) -> None:
        """Start the copies between the tiers that the manager has ordered."""
        if self._tiers is not None:
            self._tiers.dispatch(self.arrays)

    def step(self, plan: StepPlan) -> list[int]:
        """Dispatch copies, compute a plan, and return the token sampled after each chunk."""
        self.start(plan)
        return self.read() if plan.num_chunks else []

    @property
    def is_ready(self) -> bool:
        """Whether `read` would not wait for the first step in flight."""
        tokens: Any = self._results[0].tokens  # JAX's types lack is_ready
        return bool(tokens.is_ready())

    def start(self, plan: StepPlan, wrote: Callable[[int], None] | None = None) -> None:
        """Dispatch copies and a plan, without waiting for its results; see `read`.

        Args:
            plan: the plan.
            wrote: is told of each group of layers but the last one when all that writes its KV is
                dispatched; what it dispatches runs before the next group.
        """
        with self.counting_compilations():
            self.dispatch()
            if plan.copies:
                self._copy(plan.copies)
            if plan.num_chunks:
                self._compute(plan, wrote)
                if not self._awaits_tokens(plan):
                    self._finish()

    def sample(self) -> bool:
        """Dispatch the choice of the tokens of the last step, if `start` has not.

        A guided request needs the mask of its next token, which the host computes from the token
        before. The device computes the step meanwhile, up to its logits.

        Returns:
            False if a step in flight has that token: ``read`` and ``update`` it, and call again.
        """
        if self._pending is not None:
            if self._awaits_tokens(self._pending.plan):
                return False
            with self.counting_compilations():
                self._finish()
        return True

    def _awaits_tokens(self, plan: StepPlan) -> bool:
        """Tell whether a guided request of the last step has tokens that were not read."""
        pending = self._pending
        return (
            pending is not None
            and bool(pending.needs & Needs.GUIDE)
            and any(
                request.guide is not None
                and request.finish_reason is None
                and start + length > request.num_tokens
                for request, start, length in plan.chunks
            )
        )

    def read(self) -> list[int]:
        """Wait for the first step in flight; return the token sampled after each chunk."""
        results = self._results[0]
        tokens: list[int] = np.asarray(results.tokens).tolist()  # a ctrl-C ends most waits here
        self._results.popleft()
        self._read_logprobs = results.logprobs
        return tokens[: results.num_chunks]

    def append_logprobs(self, plan: StepPlan) -> None:
        """Give requests the log probabilities of the step that was read, after its ``update``."""
        if self._read_logprobs is not None:
            self._read_logprobs.append(plan)
            self._read_logprobs = None

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        """Count compilations in this context as warm-up, before the first step."""
        before = self._counter.count
        yield
        self._warm_up_compilations += self._counter.count - before

    @contextmanager
    def counting_compilations(self) -> Iterator[None]:
        """Count compilations in this context, where none is expected."""
        before = self._counter.count
        yield
        self._late_compilations += self._counter.count - before

    def wait(self) -> None:
        """Wait until a copy between the tiers has ended, if there is a host tier."""
        if self._tiers is not None:
            self._tiers.wait()

    def _copy(self, copies: Sequence[BlockCopy]) -> None:
        """Dispatch the copies of a plan."""
        assert self._copies is not None, "copies are planned, and not compiled"
        sources = np.array([copy.source for copy in copies], np.int32)
        destinations = np.array([copy.destination for copy in copies], np.int32)
        for piece, size in self._copies.pieces(len(copies)):
            self._copies.copy(self.arrays, sources[piece], destinations[piece], size)

    def _compute(self, plan: StepPlan, wrote: Callable[[int], None] | None) -> None:
        """Dispatch a step, up to its most likely tokens."""
        tables = self.manager.tables
        slots = self._batch.send(plan, tables)
        shape = self._shapes.fit(plan.num_tokens, plan.num_chunks)
        packed = pack(plan, slots, shape, tables, self.manager.block_size)
        needs = self._batch.needs(slots)
        next_tokens, rows, self._batch.state = self._programs.run(
            shape,
            self.model.params,
            packed,
            self._batch.state,
            self.arrays,
            keep_hidden=bool(needs & Needs.PROMPT_LOGPROBS),
            wrote=wrote,
        )
        self._steps += 1
        self._padding_tokens += shape.num_tokens - plan.num_tokens
        self._pending = _Pending(plan, rows, next_tokens, needs)

    def _finish(self) -> None:
        """Dispatch what follows the logits of a step, and let its tokens be read."""
        assert self._pending is not None, "no step was computed"
        plan, rows, next_tokens, needs = self._pending
        self._pending = logprobs = None
        if needs:
            next_tokens = self._sample(plan, rows, next_tokens, needs)
            if needs & (Needs.LOGPROBS | Needs.PROMPT_LOGPROBS):
                logprobs = self._compute_logprobs(plan, next_tokens, needs)
        next_tokens.copy_to_host_async()
        self._results.append(_Results(next_tokens, plan.num_chunks, logprobs))

    def _compute_logprobs(self, plan: StepPlan, tokens: Array, needs: int) -> StepLogprobs:
        """Dispatch what the requests of a step want to know of their tokens."""
        output = prompt = None
        if needs & Needs.LOGPROBS:
            output = self._logprobs.of_output(self._programs.logits, tokens)
        if (hidden := self._programs.take_hidden()) is not None:
            prompt = self._logprobs.of_prompt(plan, self.model, *hidden)
        logprobs = StepLogprobs(output, prompt)
        logprobs.copy_to_host_async()
        return logprobs

    def _sample(self, plan: StepPlan, rows: Rows, tokens: Array, needs: int) -> Array:
        """Choose the tokens of a step that are not just the most likely ones."""
        programs, batch, adjustments = self._programs, self._batch, self._adjustments
        logits, state = programs.logits, batch.state
        adjustments.count_prompts(batch.to_count)
        batch.to_count.clear()
        if needs & Needs.ADJUSTS:
            adjusted = adjustments.adjust(plan, logits, rows, state.last_tokens)
            if adjusted is not None:
                logits, tokens, last_tokens = adjusted
                state = state._replace(last_tokens=last_tokens)
        if needs & Needs.DRAWS:
            tokens, state = programs.draw(logits, rows, tokens, state)
        if needs & Needs.COUNTS:
            adjustments.count(plan, rows, tokens)
        batch.state = state
        return tokens

    def follow(self, get_params: GetParams | None) -> None:
        """Execute the calls of process 0, see `Engine.follow`.

        Raises:
            ConfigError: in the only process of an engine, or in process 0.
        """
        raise ConfigError("follow is for the processes of a group other than process 0")

    def check_params(self, params: Params, weights_revision: str) -> None:
        """Check new weights before `set_params`.

        With storage, new weights need a new name; under the current one they would hit the KV of
        the current weights. A name from before the current weights is accepted: returning to
        earlier weights is valid, and only a digest could tell others from them.

        Raises:
            ConfigError: for weights of other shapes, or an empty or current name with storage.
        """
        if _shapes_of(params) != _shapes_of(self.model.params):
            raise ConfigError("params must have the same shapes and dtypes as those of the model")
        storage = None if self.manager.tiers is None else self.manager.tiers.storage
        if storage is not None and weights_revision in ("", storage.weights_revision):
            raise ConfigError(
                f"storage has KV of weights_revision {storage.weights_revision!r}: other "
                "weights need a name of their own"
            )

    def set_params(self, params: Params, weights_revision: str) -> None:
        """Replace the weights by checked ones; the caller resets the cache.

        Args:
            params: the weights.
            weights_revision: their name, which the other processes of a group need.
        """
        model = self.model
        self.model = replace(model, params=shard_params(model.config, params, model.mesh))

    def close(self, timeout_s: float) -> bool:
        """Finish copies between the tiers and stop their threads; see `Engine.close`."""
        return self._tiers is None or self._tiers.close(self.arrays, timeout_s)

    def stats(self, scheduler: SchedulerStats) -> EngineStats:
        """Return the counts so far, with those of the scheduler."""
        return EngineStats(
            dtype=self.arrays.keys[0].dtype.name,
            attention_backend=self._attention.backend,
            attention_reason=self._attention.reason,
            num_devices=len(self.arrays.keys[0].devices()),
            steps=self._steps,
            padding_tokens=self._padding_tokens,
            prefill_tokens_computed=scheduler.prefill_tokens,
            compilations_at_warm_up=self._warm_up_compilations,
            compilations_after_warm_up=self._late_compilations,
            scheduler=scheduler,
            cache=self.manager.stats(),
            copies=None if self._tiers is None else self._tiers.stats(),
        )


def _check_group(model: Model, group: Group | None) -> None:
    """Check that the devices of a model are those of the processes of a group."""
    devices = () if model.mesh is None else model.mesh.devices.flat
    processes = sorted({device.process_index for device in devices})
    expected = [jax.process_index()] if group is None else list(range(group.num_processes))
    if processes and processes != expected:
        raise ConfigError(
            f"the mesh has devices of processes {processes}, the engine is for {expected}: "
            "devices of several processes need a group, and a group needs devices of each"
        )


def _choose_attention(
    model: Model, arrays: BlockArrays, num_tokens: int, num_rows: int
) -> AttentionBackend:
    """Return the backend of attention; warn if an accelerator has no kernel for it."""
    config, pool = model.config, arrays.keys[0]
    num_heads = config.num_heads // (1 if model.mesh is None else model.mesh.size)
    made: Any = jax.ShapeDtypeStruct  # has no types in some versions
    q = made((num_tokens, num_heads, config.head_dim), model.params.embedding.dtype)
    pool = made(pool.sharding.shard_shape(pool.shape), pool.dtype)  # of one device
    attention, device = attention_backend(q, pool, num_rows), target_device()
    if attention.backend == "xla" and device.platform != "cpu":
        text = f"{device.name} computes attention by XLA, without a kernel made for it"
        warnings.warn(f"{text}: {attention.reason}", stacklevel=4)  # where the engine is made
    return attention


def _shapes_of(params: Params) -> list[tuple[str, tuple[int, ...], str]]:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return [(jax.tree_util.keystr(path), np.shape(x), str(x.dtype)) for path, x in leaves]
