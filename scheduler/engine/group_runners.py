"""Runners on devices of several processes: one tells what it dispatches, the others do the same.

::

    process 0: LeadingRunner          a call                  others: FollowingRunner
    DeviceBatch.set_slot              request [packed]        the same method, of the same objects
    Programs.run, draw                step, draw
    Adjustments, Logprobs             set_counts, adjust, count, logprobs, prompt_logprobs
    BlockCopies                       gather, scatter, copy, copy_sample
    ModelRunner.set_params            weights, check_weights

Only arrays of the host travel. All arrays of devices lie where the same call has put them before,
in each process. Weights do not travel: each process gets its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from hashlib import sha256
from importlib.metadata import version
from typing import Any, Protocol

import jax
import numpy as np
from jaxtyping import Array, Float

from ...kvcache import BlockArrays, CacheManager, Int32Array
from ...kvcache.copies.block_copies import BlockCopies, Staging
from ..errors import CallError, ConfigError
from ..models import Batch, Model, Params
from ..request import Request
from .adjustments import Adjustments
from .batch_state import BatchState
from .calls import Call, Group, array_to_bytes, bytes_to_array, check_weights
from .logprobs import Logprobs, TopLogprobs
from .model_runner import GetParams, ModelRunner
from .programs import Programs, Rows
from .step_arrays import Shape


class Tell(Protocol):
    """Sends a call; see `Group.tell`."""

    def __call__(self, name: str, flags: Sequence[int] = (), *arrays: np.ndarray) -> None:
        """Send it."""


def runner_class(group: Group) -> type[ModelRunner]:
    """Return the class of the runner of this process."""
    return FollowingRunner if group.process_id else LeadingRunner


def describe_options(
    model: Model, manager: CacheManager, options: dict[str, Any]
) -> dict[str, str]:
    """Return what must be the same in all processes, by name."""
    named = {
        "radixkv": version("radixkv"),
        "jax": jax.__version__,
        "model": model.config.name,
        "configuration": model.config,
        "dtype": model.params.embedding.dtype,
        "weights": digest_params(model.params).hex(),
        "mesh": None if model.mesh is None else dict(model.mesh.shape),
        "block_size": manager.block_size,
        "num_blocks": manager.num_blocks,
        "host_blocks": None if manager.tiers is None else manager.tiers.config.num_blocks,
        **options,
    }
    return {name: str(value) for name, value in named.items()}


def digest_params(params: Params) -> bytes:
    """Return 8 bytes that tell weights apart, by those that every device has whole: the norms."""
    digest = sha256()
    for leaf in jax.tree.leaves(params):
        if isinstance(leaf, np.ndarray):
            digest.update(leaf.tobytes())
        elif leaf.is_fully_replicated:
            digest.update(np.asarray(leaf.addressable_data(0)).tobytes())
    return digest.digest()[:8]


class LeadingRunner(ModelRunner):
    """The runner of process 0: tells the group each call before it dispatches it itself."""

    def __init__(
        self, model: Model, manager: CacheManager, *, group: Group, storage: Any, **options: Any
    ) -> None:
        """Wait for the other processes, and make the runner; see `ModelRunner`.

        Raises:
            GroupError: if a process does not come, or has other options.
        """
        group.join(describe_options(model, manager, options))
        super().__init__(model, manager, group=group, storage=storage, **options)
        # What was made until here, every process has made in the same order.
        self._group, tell = group, group.tell
        set_slot = self._batch.set_slot

        def tell_slot(state: BatchState, packed: Int32Array) -> BatchState:
            tell("request", (), packed)
            return set_slot(state, packed)

        self._batch.set_slot = tell_slot
        self._programs = _LeadingPrograms(self._programs, tell)
        self._adjustments = _LeadingAdjustments(self._adjustments, tell)
        self._logprobs = _LeadingLogprobs(self._logprobs, tell)
        if self._tiers is not None:
            self._tiers.replace_copies(partial(_LeadingCopies, tell=tell))
        if self._copies is not None:
            self._copies = _LeadingCopies(self._copies, tell, "copy_sample")

    def collect(self) -> None:
        """Report completed copies, and look for processes that are lost; see `ModelRunner.collect`.

        Raises:
            GroupError: if one is.
        """
        self._group.check()
        super().collect()

    def read(self) -> list[int]:
        """Wait for the first step in flight, and for every process; see `ModelRunner.read`.

        Raises:
            GroupError: if a process is lost or late, or has executed another call.
        """
        results = self._results[0]
        self._group.wait((results.tokens, results.logprobs))
        return super().read()

    def set_params(self, params: Params, weights_revision: str) -> None:
        """Replace the weights, and wait until the other processes have, too.

        Raises:
            GroupError: if one is lost or late, or gets other weights.
        """
        super().set_params(params, weights_revision)
        self._group.tell("weights", (), bytes_to_array(weights_revision.encode()))
        # Only now, because the weights may be the results of programs that all processes run.
        digest = digest_params(self.model.params)
        self._group.tell("check_weights", (), bytes_to_array(digest))
        self._group.wait(())


class FollowingRunner(ModelRunner):
    """The runner of another process: executes the calls of process 0."""

    def __init__(
        self, model: Model, manager: CacheManager, *, group: Group, storage: Any, **options: Any
    ) -> None:
        """Join process 0, and make the runner; see `ModelRunner`.

        Raises:
            GroupError: if process 0 does not come, or has other options.
        """
        group.join(describe_options(model, manager, options))
        super().__init__(model, manager, group=group, storage=storage, **options)
        self._group = group
        self._tier_copies: BlockCopies | None = None
        if self._tiers is not None:
            self._tiers.replace_copies(self._keep)
        self._logits = self._programs.logits  # adjusted, if the last step's are
        self._step: tuple[Array, Rows] | None = None
        self._get_params: GetParams | None = None

    def _keep(self, copies: BlockCopies) -> BlockCopies:
        self._tier_copies = copies
        return copies

    def check_request(self, request: Request) -> None:
        """Refuse requests, which are for process 0.

        Raises:
            ConfigError: always.
        """
        process = self._group.process_id
        raise ConfigError(f"process {process} of the group takes no requests: call follow")

    def follow(self, get_params: GetParams | None) -> None:
        """Execute the calls of process 0, see `Engine.follow`."""
        self._get_params = get_params
        for call in self._group.calls():
            self.execute(call)

    def execute(self, call: Call) -> None:
        """Dispatch what process 0 has dispatched with the same arrays.

        Raises:
            CallError: for a call that there is not, or other weights.
            ConfigError: for weights of other shapes.
        """
        arrays = call.arrays
        match call.name:
            case "request":
                self._batch.state = self._batch.set_slot(self._batch.state, arrays[0])
            case "step":
                self._run(call.flags, arrays[0])
            case "gather":
                self._copies_of_tiers().gather(self.arrays, arrays[0], call.flags[0])
            case "scatter":
                self._copies_of_tiers().scatter(self.arrays, arrays[1:], arrays[0], call.flags[0])
            case "copy":
                self._copies_of_tiers().copy(self.arrays, arrays[0], arrays[1], call.flags[0])
            case "copy_sample" if self._copies is not None:
                self._copies.copy(self.arrays, arrays[0], arrays[1], call.flags[0])
            case "weights":
                self._take_weights(array_to_bytes(arrays[0]).decode())
            case "check_weights":
                check_weights(call, digest_params(self.model.params))
            case _:
                self._sample_as_told(call)

    def _take_weights(self, revision: str) -> None:
        if self._get_params is None:
            raise CallError("process 0 has new weights, and follow was called without get_params")
        params = self._get_params(revision)
        self.check_params(params, revision)
        self.set_params(params, revision)

    def _copies_of_tiers(self) -> BlockCopies:
        if self._tier_copies is None:
            raise CallError("process 0 copies blocks of a host tier, this process has none")
        return self._tier_copies

    def _run(self, flags: Sequence[int], packed: Int32Array) -> None:
        is_decode, num_tokens, num_rows, keep_hidden = flags
        tokens, rows, self._batch.state = self._programs.run(
            Shape(bool(is_decode), num_tokens, num_rows),
            self.model.params,
            packed,
            self._batch.state,
            self.arrays,
            keep_hidden=bool(keep_hidden),
        )
        self._step, self._logits = (tokens, rows), self._programs.logits

    def _sample_as_told(self, call: Call) -> None:
        """Execute a call that follows a step."""
        if self._step is None:
            raise CallError(f"call {call.name!r} of process 0 follows no step")
        (tokens, rows), arrays, state = self._step, call.arrays, self._batch.state
        match call.name:
            case "set_counts":
                self._adjustments.set_counts(arrays[0])
            case "adjust":
                is_counted = bool(call.flags[0])
                allowed = arrays[1] if len(arrays) == 2 else None
                given = self._logits, rows, arrays[0], is_counted, allowed, state.last_tokens
                self._logits, tokens, last_tokens = self._adjustments.adjust_rows(*given)
                self._batch.state = state._replace(last_tokens=last_tokens)
            case "draw":
                tokens, self._batch.state = self._programs.draw(self._logits, rows, tokens, state)
            case "count":
                self._adjustments.count_rows(rows, tokens, arrays[0])
            case "logprobs":
                self._logprobs.of_output(self._programs.logits, tokens)
            case "prompt_logprobs" if (hidden := self._programs.take_hidden()) is not None:
                self._logprobs.of_targets(arrays[0], self.model, *hidden)
            case _:
                raise CallError(f"no call is named {call.name!r}, or it does not follow this step")
        self._step = tokens, rows


# What process 0 has in place of the parts of a `ModelRunner`: each takes over the state of one


class _LeadingPrograms(Programs):
    def __init__(self, programs: Programs, tell: Tell) -> None:
        vars(self).update(vars(programs), _tell=tell)
        self._tell: Tell

    def run(
        self,
        shape: Shape,
        params: Params,
        packed: Int32Array,
        state: BatchState,
        arrays: BlockArrays,
        *,
        keep_hidden: bool = False,
        wrote: Any = None,
    ) -> tuple[Array, Rows, BatchState]:
        assert wrote is None, "groups of layers are not told"
        flags = shape.is_decode, shape.num_tokens, shape.num_rows, keep_hidden
        self._tell("step", flags, packed)
        return super().run(shape, params, packed, state, arrays, keep_hidden=keep_hidden)

    def draw(
        self, logits: Array, rows: Rows, tokens: Array, state: BatchState
    ) -> tuple[Array, BatchState]:
        self._tell("draw")
        return super().draw(logits, rows, tokens, state)


class _LeadingAdjustments(Adjustments):
    def __init__(self, adjustments: Adjustments, tell: Tell) -> None:
        vars(self).update(vars(adjustments), _tell=tell)
        self._tell: Tell

    def set_counts(self, packed: Int32Array) -> None:
        self._tell("set_counts", (), packed)
        super().set_counts(packed)

    def adjust_rows(
        self,
        logits: Array,
        rows: Rows,
        values: np.ndarray,
        is_counted: bool,
        allowed: Int32Array | None,
        last_tokens: Array,
    ) -> tuple[Array, Array, Array]:
        arrays = (values,) if allowed is None else (values, allowed)
        self._tell("adjust", (is_counted,), *arrays)
        return super().adjust_rows(logits, rows, values, is_counted, allowed, last_tokens)

    def count_rows(self, rows: Rows, tokens: Array, is_counted: np.ndarray) -> None:
        self._tell("count", (), is_counted)
        super().count_rows(rows, tokens, is_counted)


class _LeadingLogprobs(Logprobs):
    def __init__(self, logprobs: Logprobs, tell: Tell) -> None:
        vars(self).update(vars(logprobs), _tell=tell)
        self._tell: Tell

    def of_output(self, logits: Array, tokens: Array) -> TopLogprobs:
        self._tell("logprobs")
        return super().of_output(logits, tokens)

    def of_targets(
        self, targets: Int32Array, model: Model, batch: Batch, x: Float[Array, "tokens hidden"]
    ) -> TopLogprobs:
        self._tell("prompt_logprobs", (), targets)
        return super().of_targets(targets, model, batch, x)


class _LeadingCopies(BlockCopies):
    def __init__(self, copies: BlockCopies, tell: Tell, name: str = "copy") -> None:
        vars(self).update(vars(copies), _tell=tell, _name=name)
        self._tell: Tell
        self._name: str

    def gather(self, arrays: BlockArrays, ids: Int32Array, size: int) -> Staging:
        self.check_ids(ids)
        self._tell("gather", (size,), ids)
        return super().gather(arrays, ids, size)

    def to_host(self, staging: Staging) -> Staging:
        return super().to_host(tuple(each.addressable_data(0) for each in staging))

    def scatter(
        self, arrays: BlockArrays, staging: Sequence[Any], ids: Int32Array, size: int
    ) -> None:
        self.check_ids(ids)
        self._tell("scatter", (size,), ids, *staging)
        super().scatter(arrays, staging, ids, size)

    def copy(
        self, arrays: BlockArrays, sources: Int32Array, destinations: Int32Array, size: int
    ) -> None:
        self.check_ids(np.concatenate([sources, destinations]))
        self._tell(self._name, (size,), sources, destinations)
        super().copy(arrays, sources, destinations, size)
