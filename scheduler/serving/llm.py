"""`LLM`: a model by its name, with text in and text out."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import jax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from ...kvcache import EventBatch, HostConfig, Tokens
from ...kvcache.storage import Storage
from ..engine import Engine, make_storage_namespace
from ..engine.calls import Group
from ..errors import EngineClosedError, RequestError
from ..models import load_model, tensor_parallel_mesh
from ..models.weights_digest import weights_digest
from ..request import Request
from ..terminal.interrupts import delay_interrupts
from ..text import TextTokenizer, locate_model
from .async_engine import DEFAULTS, AsyncEngine
from .outputs import Completion, GenerationOutput
from .params import GenerationParams
from .sizes import choose_sizes, device_memory, least_memory, sizes_of_process_0

_LOGGER = logging.getLogger("radixkv.scheduler.serving")
_POLL_S: Final = 1.0
"""How often an idle engine of a group looks for processes that are lost."""

Prompt = str | Tokens
Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A model that completes texts and chats, many at a time, for one thread.

    Prompts with a common prefix share its blocks, also from one call to the next.

    Attributes:
        engine: the engine, for `Engine.stats` and `Engine.reset_cache`.
        tokenizer: tokenizer and chat template; None if the checkpoint has none.
        sizes: sizes of the engine; `str` says in one line what they take of the memory.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        revision: str | None = None,
        dtype: DTypeLike = "auto",
        block_size: int = 16,
        num_blocks: int | None = None,
        max_model_len: int | None = None,
        max_running: int | None = None,
        token_budget: int | None = None,
        memory_fraction: float | None = None,
        on_events: Callable[[EventBatch], object] | None = None,
        host_memory: int | None = None,
        host: HostConfig | None = None,
        storage: Storage | str | None = None,
        mesh: Mesh | None = None,
        group: Group | None = None,
        warm_up_sampling: bool = True,
        **options: Any,
    ) -> None:
        """Load a model, allocate its blocks, and compile its programs.

        Args:
            model: directory of a Hugging Face checkpoint, or name on the hub; see `locate_model`.
            revision: branch, tag or commit on the hub.
            dtype: dtype of weights and KV; see `model_dtype`.
            block_size: tokens per block.
            num_blocks: number of blocks; default: as many as ``memory_fraction`` allows.
            max_model_len: limit of prompt and output together, in tokens; default: that of the
                model, or what fits into all blocks.
            max_running: most requests at a time; default: 128, or 16 on a CPU.
            token_budget: most tokens of a step; default: 1,024, or 256 on a CPU.
            memory_fraction: part of the device's memory that weights and blocks may take together;
                default: 0.9, or 0.3 on a CPU.
            on_events: takes the KV events of each step; see `Engine`.
            host_memory: bytes of the host tier, which keeps blocks that the device evicts; default:
                none, or with storage as many blocks as the device has, in at most a tenth of the
                machine's memory.
            host: the host tier in blocks, with its write policy, instead of host_memory.
            storage: URL of the storage, which keeps blocks for later processes, such as
                ``file:///var/tmp/blocks``; see `open_storage`. Or a storage that the caller closes.
            mesh: devices that share the model and its KV, such as ``jax.make_mesh((4,), ("tp",))``;
                see `shard_model`. Default: JAX's default device alone, or all devices of a group.
            group: the processes whose devices share the model, if they are several; see `Engine`.
                Those other than process 0 call ``engine.follow``. Defaults that depend on memory
                are those of the machine that has the least.
            warm_up_sampling: whether to compile what only some requests need as well; see `Engine`.
            **options: other options of `Engine`, such as ``preempt`` and ``reserve_tokens``.

        Raises:
            ModelNotFoundError: if there is no such model, or no network to load it.
            CheckpointError: if the model cannot be loaded.
            TensorParallelError: if it cannot be cut for the devices of the mesh.
            GroupError: if another process has other options, fails, or does not come.
            MissingExtraError: if a library of the extra ``text`` is needed and not installed.
            ConfigError, CountError: for sizes that cannot work, or do not fit the memory.
            StorageError: if the storage cannot be opened.
        """
        directory = locate_model(model, revision)
        has_tokenizer = (directory / "tokenizer.json").exists()
        self.tokenizer = TextTokenizer(directory) if has_tokenizer else None
        if group is not None:
            mesh = mesh or tensor_parallel_mesh(jax.device_count())
        loaded = load_model(directory, dtype, mesh=mesh)
        embedding = loaded.params.embedding
        weights = {id(leaf): leaf for leaf in jax.tree.leaves(loaded.params)}.values()  # some tied
        parts = (part.data for leaf in weights for part in leaf.addressable_shards)
        memory = device_memory(embedding, sum(part.nbytes for part in parts))
        if group is not None:
            memory = least_memory(memory, group)
        self.sizes = choose_sizes(
            loaded.config,
            embedding.dtype.itemsize,
            memory,
            kv_copies=1 if loaded.mesh is None else loaded.mesh.shape["copies"],
            block_size=block_size,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            max_running=max_running,
            token_budget=token_budget,
            memory_fraction=memory_fraction,
            host_memory=host_memory,
            has_storage=storage is not None and host is None,
        )
        if host is not None:
            self.sizes = replace(self.sizes, host_blocks=host.num_blocks)
        elif self.sizes.host_blocks:
            host = HostConfig(self.sizes.host_blocks)
        if group is not None:
            self.sizes = sizes_of_process_0(self.sizes, group)
        _LOGGER.info("%s: %s", model, self.sizes)
        namespace = None
        if storage is not None:
            revision = weights_digest(directory)
            namespace = make_storage_namespace(loaded, revision, self.sizes.block_size)
        self.engine = Engine(
            loaded,
            block_size=self.sizes.block_size,
            num_blocks=self.sizes.num_blocks,
            token_budget=self.sizes.token_budget,
            max_running=self.sizes.max_running,
            max_model_len=self.sizes.max_model_len,
            on_events=on_events,
            host=host,
            storage=storage,
            storage_namespace=namespace,
            group=group,
            warm_up_sampling=warm_up_sampling,
            **options,
        )
        self._poll_s = None if group is None else _POLL_S
        self._name = str(model)
        self._eos_token_ids = loaded.config.eos_token_ids
        self._numbers = itertools.count()
        self._is_served = False

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        params: GenerationParams | Sequence[GenerationParams] = DEFAULTS,
    ) -> list[GenerationOutput]:
        """Complete prompts, and return their outputs in order.

        If there are several samples of a prompt (`GenerationParams.n`), its output is the first of
        them, and `GenerationOutput.samples` has all.

        A ctrl-C ends the call after a step, and the next call works. A second one ends it at once,
        and may leave an engine that does not.

        Args:
            prompts: one text, or a list of prompts: each a text, or token ids.
            params: for all prompts, or for each of them.

        Raises:
            RequestError, TokenError, RequestTooLargeError: for a prompt or parameters that the
                model cannot take. Then nothing is generated.
            EngineClosedError: after `serve`.
        """
        if self._is_served:
            raise EngineClosedError("the engine is served by an AsyncEngine")
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        all_params = [params] * len(prompts) if isinstance(params, GenerationParams) else params
        if len(all_params) != len(prompts):
            raise RequestError(f"got params for {len(all_params)} of {len(prompts)} prompts")
        begun = [self._begin(*each) for each in zip(prompts, all_params, strict=True)]
        outputs = iter(self._run([sample for samples in begun for sample in samples]))
        result = []
        for samples in begun:
            first, *others = [next(outputs) for _ in samples]
            result.append(replace(first, others=tuple(others)))
        return result

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: GenerationParams | Sequence[GenerationParams] = DEFAULTS,
        **variables: object,
    ) -> list[GenerationOutput]:
        """Answer conversations, and return the outputs in order.

        Args:
            messages: one conversation, such as ``[{"role": "user", "content": "Hello"}]``, or a
                list of conversations.
            params: for all conversations, or for each of them.
            **variables: variables of the chat template, such as ``enable_thinking``.

        Raises:
            ChatTemplateError: if there is no chat template, or it refuses the messages.
            RequestError, TokenError, RequestTooLargeError, EngineClosedError: see `generate`.
        """
        if self.tokenizer is None:
            raise RequestError(f"{self._name} has no tokenizer, which a chat needs")
        is_one = len(messages) > 0 and isinstance(messages[0], Mapping)
        conversations: Any = [messages] if is_one else messages
        encode = self.tokenizer.encode_chat
        return self.generate([encode(each, **variables) for each in conversations], params)

    def close(self, *, timeout_s: float = 30.0) -> bool:
        """Finish the copies between the tiers, and close the storage; see `Engine.close`.

        Not after `serve`: the `AsyncEngine` does it.
        """
        return self._is_served or self.engine.close(timeout_s=timeout_s)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def serve(self) -> AsyncEngine:
        """Start an `AsyncEngine` over the engine, which `generate` can no longer use.

        It closes the engine, with its tiers.

        Raises:
            EngineClosedError: if it was called before.
            RuntimeError: if there can be no more threads; the engine is closed then.
        """
        if self._is_served:
            raise EngineClosedError("the engine is served by an AsyncEngine")
        served = AsyncEngine(
            self.engine, self.tokenizer, eos_token_ids=self._eos_token_ids, poll_s=self._poll_s
        )
        self._is_served = True
        return served

    def __repr__(self) -> str:
        return f"LLM({self._name!r}: {self.sizes})"

    def _begin(self, prompt: Prompt, params: GenerationParams) -> list[tuple[Request, Completion]]:
        """Make a request for each sample of a prompt."""
        name = f"prompt-{next(self._numbers)}"
        requests = params.make_requests(name, prompt, self.tokenizer, self._eos_token_ids)
        return [
            (request, Completion(request, self.tokenizer, params.stop, name=name, index=index))
            for index, request in enumerate(requests)
        ]

    def _run(self, begun: Sequence[tuple[Request, Completion]]) -> list[GenerationOutput]:
        completions = {request.request_id: completion for request, completion in begun}
        outputs: dict[str, GenerationOutput] = {}
        # The engine could not go on after a step of which a ctrl-C left out a part.
        with delay_interrupts() as raise_interrupt:
            try:
                for request, _ in begun:
                    self.engine.add_request(request)
                while self.engine.has_work:
                    ended = self.engine.step()
                    # The device computes the next step meanwhile.
                    for request in (*ended, *self.engine.scheduler.running):
                        completion = completions.get(request.request_id)
                        if completion is not None and (
                            request.finish_reason or completion.has_stop
                        ):
                            self._look(request, completion, outputs)
                    raise_interrupt()
            except BaseException:
                for request, _ in begun:
                    self.engine.abort(request.request_id)
                raise
        return [outputs[request.request_id] for request, _ in begun]

    def _look(
        self, request: Request, completion: Completion, outputs: dict[str, GenerationOutput]
    ) -> None:
        """Keep the output if the request has ended, or if a stop string ends it now."""
        output = completion.take(len(request.output_tokens), request.finish_reason)
        if output is not None and output.finish_reason is not None:
            outputs[request.request_id] = output
            self.engine.abort(request.request_id)
