"""The engine: a scheduler, a model and the arrays of blocks, one compiled program per shape."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Compiled
from jaxtyping import Array, Int32

from ..kvcache import BlockArrays, CacheManager, HostConfig
from ..kvcache.storage import Storage, StorageNamespace
from .batching import Shape, Shapes, pack, unpack
from .compilations import compilation_counter
from .engine_stats import EngineStats
from .engine_tiers import EngineTiers, check_namespace, check_params
from .errors import ConfigError, RequestError
from .mixed import MixedScheduler
from .models import Model, ModelConfig, Params, forward
from .models.transformer import Pools
from .plan import Chunk
from .policy import Policy
from .request import Request
from .sampling import sample
from .tier_requests import Preempt


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
        preempt: Preempt = "recompute",
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
        config = model.config
        check_namespace(model, storage, storage_namespace)
        if not 1 <= max_model_len <= config.max_positions:
            raise ConfigError(
                f"max_model_len must be at least 1 and at most the model's "
                f"{config.max_positions} positions, got {max_model_len}"
            )
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
        tiers = self.manager.tiers
        self._tiers = None if tiers is None else EngineTiers(tiers, self._arrays, storage)
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
        """Run one step; return the requests that ended in it.

        If all wait for copies, it waits until one has ended.
        """
        if self._tiers is not None:
            self._tiers.collect()
        if not self.scheduler.has_work:
            self._dispatch()
            return []
        plan = self.scheduler.schedule()
        before = self._counter.count
        self._dispatch()
        next_tokens = self._run(plan.chunks) if plan.chunks else []
        self._late_compilations += self._counter.count - before
        if plan.chunks:
            return self.scheduler.update(plan, next_tokens)
        if self._tiers is not None:
            self._tiers.wait()
        return []

    def _dispatch(self) -> None:
        if self._tiers is not None:
            self._tiers.dispatch(self._arrays)

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
            weights_revision: what they are called in storage.

        Raises:
            ConfigError: for weights of other shapes, or without a new name where there is storage:
                what the old ones stored would be found. Nothing is changed.
        """
        if params is not None:
            check_params(self._model.params, params)
            storage = None if self.manager.tiers is None else self.manager.tiers.storage
            if storage is not None and weights_revision in ("", storage.weights_revision):
                raise ConfigError(
                    f"storage has KV of weights_revision {storage.weights_revision!r}: other "
                    "weights need another one"
                )
            self._model = replace(self._model, params=params)
        self.scheduler.reset_cache(keep, weights_revision)

    def close(self, *, timeout_s: float = 30.0) -> bool:
        """Let copies end that are under way, such as what storage is to keep; stop the threads.

        Only without a host tier may the engine be used afterwards. Storage stays open.

        Returns:
            Whether the threads have stopped within timeout_s; if not, call it again.
        """
        return self._tiers is None or self._tiers.close(self._arrays, timeout_s)

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
            copies=None if self._tiers is None else self._tiers.stats(),
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
