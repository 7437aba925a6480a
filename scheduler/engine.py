"""The engine: a scheduler, a model and the arrays of blocks, one compiled program per shape."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Compiled
from jaxtyping import Array, Int32

from ..kvcache import BlockArrays, CacheManager, CacheStats
from .batching import Shape, Shapes, pack, unpack
from .compilations import compilation_counter
from .errors import ConfigError, RequestError
from .mixed import MixedScheduler
from .models import Model, ModelConfig, Params, forward
from .models.transformer import Pools
from .plan import Chunk, SchedulerStats
from .policy import Policy
from .request import Request
from .sampling import sample


@dataclass(frozen=True)
class EngineStats:
    """What an engine has done so far.

    Attributes:
        steps: programs run.
        padding_tokens: tokens that the programs computed only to fill their shapes.
        prefill_tokens_computed: tokens of prefill chunks, recomputed ones included.
        compilations_at_warm_up: what XLA compiled when the engine was made; programs that an
            engine of the same sizes compiled before, in this process, are used again.
        compilations_after_warm_up: what it compiled during steps: 0, unless something is wrong.
        scheduler, cache: see `SchedulerStats` and `CacheStats`.
    """

    steps: int
    padding_tokens: int
    prefill_tokens_computed: int
    compilations_at_warm_up: int
    compilations_after_warm_up: int
    scheduler: SchedulerStats
    cache: CacheStats


class Engine:
    """Serves requests with a model over a paged KV cache.

    All programs are compiled when it is made. It owns the arrays: one thread may use it.

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
    ) -> None:
        """Allocate the arrays and compile every program.

        Args:
            model: from `load_model`; KV has the dtype of its parameters.
            block_size: tokens per block.
            num_blocks: usable blocks.
            token_budget: tokens of a step; prefill chunks fill it.
            max_running: requests that hold blocks at a time, at most token_budget.
            max_model_len: longest prompt and output together, in tokens.
            prefix_cache, policy, reserve_tokens: of `MixedScheduler`.

        Raises:
            ConfigError, CountError: for sizes that cannot work; before anything is allocated.
        """
        config = model.config
        if not 1 <= max_model_len <= config.max_positions:
            raise ConfigError(
                f"max_model_len must be at least 1 and at most the model's "
                f"{config.max_positions} positions, got {max_model_len}"
            )
        self.max_model_len = max_model_len
        self.manager = CacheManager(num_blocks, block_size)
        self.scheduler = MixedScheduler(
            self.manager,
            token_budget=token_budget,
            max_running=max_running,
            policy=policy,
            reserve_tokens=reserve_tokens,
            prefix_cache=prefix_cache,
        )
        self._model = model
        self._arrays = BlockArrays.zeros(
            num_layers=config.num_layers,
            num_blocks=num_blocks,
            kv_heads=config.num_kv_heads,
            block_size=block_size,
            head_dim=config.head_dim,
            dtype=model.params.embedding.dtype,
        )
        self._shapes = Shapes(
            token_budget=token_budget,
            max_running=max_running,
            table_width=-(-max_model_len // block_size),
        )
        self._steps = self._padding_tokens = self._late_compilations = 0
        self._counter = compilation_counter()
        before = self._counter.count
        self._programs = self._compile()
        self._warm_up_compilations = self._counter.count - before

    def _compile(self) -> dict[Shape, Compiled]:
        """Compile every shape, the largest first: what does not fit in memory fails at once."""
        shapes = sorted((*self._shapes.decode, *self._shapes.extend), key=lambda s: -s.num_tokens)
        return {
            shape: _program.lower(
                self._model.config,
                shape,
                self._model.params,
                np.zeros(sum(shape.sizes), np.int32),
                self._arrays.keys,
                self._arrays.values,
            ).compile()
            for shape in shapes
        }

    def add_request(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: for a token outside the vocabulary, a request longer than
                `max_model_len`, or the id of a live request.
            RequestTooLargeError: if it could not run to its limit even alone.
        """
        vocab_size = self._model.config.vocab_size
        bad = np.flatnonzero((request.prompt < 0) | (request.prompt >= vocab_size))
        if len(bad):
            raise RequestError(
                f"request {request.request_id!r}: token {request.prompt[bad[0]]} at place {bad[0]} "
                f"is outside the vocabulary of {vocab_size}"
            )
        length = request.num_prompt_tokens + request.max_new_tokens
        if length > self.max_model_len:
            raise RequestError(
                f"request {request.request_id!r}: {request.num_prompt_tokens} prompt tokens and "
                f"{request.max_new_tokens} new ones are more than max_model_len "
                f"{self.max_model_len}"
            )
        self.scheduler.add(request)

    def abort(self, request_id: str) -> bool:
        """End a request in any state; False if no live one has this id."""
        return self.scheduler.abort(request_id)

    @property
    def has_work(self) -> bool:
        """Whether any request has yet to end."""
        return self.scheduler.has_work

    def step(self) -> list[Request]:
        """Run one step; return the requests that ended in it."""
        if not self.scheduler.has_work:
            return []
        plan = self.scheduler.schedule()
        before = self._counter.count
        next_tokens = self._run(plan.chunks)
        self._late_compilations += self._counter.count - before
        return self.scheduler.update(plan, next_tokens)

    def run(self) -> list[Request]:
        """Run until every request has ended; return those that did, in order of their ends."""
        finished = []
        while self.has_work:
            finished += self.step()
        return finished

    def _run(self, chunks: list[Chunk]) -> list[int]:
        shape = self._shapes.fit(chunks)
        packed = pack(chunks, shape, self.manager.tables, self.manager.block_size)
        next_tokens, self._arrays.keys, self._arrays.values = self._programs[shape](
            self._model.params, jax.device_put(packed), self._arrays.keys, self._arrays.values
        )
        self._steps += 1
        self._padding_tokens += shape.num_tokens - sum([chunk.length for chunk in chunks])
        tokens: list[int] = np.asarray(next_tokens).tolist()
        return tokens[: len(chunks)]

    def stats(self) -> EngineStats:
        """Return what was done so far."""
        scheduler = self.scheduler.stats()
        return EngineStats(
            steps=self._steps,
            padding_tokens=self._padding_tokens,
            prefill_tokens_computed=scheduler.prefill_tokens,
            compilations_at_warm_up=self._warm_up_compilations,
            compilations_after_warm_up=self._late_compilations,
            scheduler=scheduler,
            cache=self.manager.stats(),
        )


def _step(
    config: ModelConfig,
    shape: Shape,
    params: Params,
    packed: Int32[Array, " packed"],
    k_pools: Pools,
    v_pools: Pools,
) -> tuple[Int32[Array, " rows"], Pools, Pools]:
    batch, sampling = unpack(packed, shape)
    logits, k_pools, v_pools = forward(
        config, params, batch, k_pools, v_pools, decode=shape.is_decode
    )
    return sample(logits.astype(jnp.float32), sampling), k_pools, v_pools


# One function for all engines, so that JAX finds the programs of an earlier one.
_program = jax.jit(_step, static_argnums=(0, 1), donate_argnums=(4, 5))
