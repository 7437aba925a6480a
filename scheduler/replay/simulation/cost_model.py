"""Roofline cost model of a step, with the figures of named models and GPUs.

A step takes the longer of its arithmetic and its memory traffic, plus a fixed overhead::

    flops = 2 * parameters * tokens + sum over chunks of 4 * layers * width * (n^2 - p^2) / 2
    bytes = weights + KV read (n per chunk) + KV written (n - p per chunk)
    time  = max(flops / reached FLOP/s, bytes / reached bandwidth) + overhead

where a chunk computes positions p .. n - 1 of a request and width is heads * head_dim. The result
is an estimate for planning; `load_costs` reads measured figures from a JSON file.

Copies run beside the steps, each direction on its own, and take ``bytes / reached bandwidth``: of
the host link between device and host, of the network between nodes, and of the drives between host
and storage.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ....kvcache.errors import RadixKVError
from ...step_plan import StepPlan

DEFAULT_MODEL = "llama3-8b"
DEFAULT_GPU = "h200x2"


class CostError(RadixKVError, ValueError):
    """An unknown model or GPU, a malformed cost file, or a model that does not fit the GPU."""


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """Figures of a model that determine its costs.

    Attributes:
        name: Name in reports.
        parameters: Number of weights that each token is multiplied with.
        layers, heads, kv_heads, head_dim: Shape of the attention.
        bytes_per_parameter, bytes_per_kv_value: Size of a value; 2 for bfloat16.
    """

    name: str
    parameters: float
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    bytes_per_parameter: float = 2.0
    bytes_per_kv_value: float = 2.0

    @property
    def weight_bytes(self) -> float:
        """Size of the weights."""
        return self.parameters * self.bytes_per_parameter

    @property
    def kv_bytes_per_token(self) -> float:
        """Size of the keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.bytes_per_kv_value


@dataclass(frozen=True, slots=True)
class GpuCosts:
    """Figures of one GPU, and the number of GPUs that share the model (tensor parallelism).

    Attributes:
        name: Name in reports.
        flops_per_s: Peak arithmetic, dense bfloat16.
        bytes_per_s: Peak memory bandwidth.
        memory_bytes: Size of the memory.
        count: Number of GPUs; each has its own host link, network and drive.
        host_bytes_per_s: Bandwidth of the host link in one direction.
        network_bytes_per_s: Bandwidth between nodes in one direction.
        storage_write_bytes_per_s, storage_read_bytes_per_s: Bandwidth of the drive.
    """

    name: str
    flops_per_s: float
    bytes_per_s: float
    memory_bytes: float
    count: int = 1
    host_bytes_per_s: float = 64e9
    network_bytes_per_s: float = 50e9
    storage_write_bytes_per_s: float = 3.5e9
    storage_read_bytes_per_s: float = 6.5e9


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Efficiencies and latencies of a running engine: assumptions, not measurements.

    Attributes:
        flops_efficiency, bandwidth_efficiency, host_link_efficiency, network_efficiency,
            storage_efficiency: Fraction of the peak that is reached.
        overhead_s: Time per step for launches, sampling and the host.
        message_s: Latency of a message between nodes.
        lookup_s: Time of a lookup in storage.
        memory_fraction: Fraction of GPU memory for weights and KV.
    """

    flops_efficiency: float = 0.5
    bandwidth_efficiency: float = 0.7
    overhead_s: float = 0.002
    memory_fraction: float = 0.9
    host_link_efficiency: float = 0.8
    network_efficiency: float = 0.8
    message_s: float = 0.0005
    storage_efficiency: float = 0.8
    lookup_s: float = 0.001


MODELS: Mapping[str, ModelCosts] = {
    model.name: model
    for model in (  # from the config.json of each
        ModelCosts("llama3-8b", 8.03e9, layers=32, heads=32, kv_heads=8, head_dim=128),
        ModelCosts("llama3-70b", 70.6e9, layers=80, heads=64, kv_heads=8, head_dim=128),
        ModelCosts("qwen3-8b", 8.19e9, layers=36, heads=32, kv_heads=8, head_dim=128),
        ModelCosts("qwen3-32b", 32.8e9, layers=64, heads=64, kv_heads=8, head_dim=128),
    )
}
"""Sizes of the models that `named_costs` knows, by name."""

GPUS: Mapping[str, GpuCosts] = {
    gpu.name: gpu
    # Data sheets of the SXM parts, dense bfloat16. They give the host link for both directions
    # together: 64 GB/s for PCIe 4.0 x16 and 128 GB/s for PCIe 5.0 x16. The network is that of
    # NVIDIA's DGX: one ConnectX-6 (200 Gb/s) or ConnectX-7 (400 Gb/s) per GPU. Storage is one PCIe
    # 4.0 NVMe drive per GPU, with the figures that Samsung announced for its PM9A3 in May 2020: up
    # to 3,500 MB/s written and 6,500 MB/s read.
    for gpu in (
        GpuCosts("a100", 312e12, 2.039e12, 80e9, host_bytes_per_s=32e9, network_bytes_per_s=25e9),
        GpuCosts("h100", 989e12, 3.35e12, 80e9, host_bytes_per_s=64e9),
        GpuCosts("h200", 989e12, 4.8e12, 141e9, host_bytes_per_s=64e9),
    )
}
"""Speeds of the GPUs that `named_costs` knows, by name."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """Costs of one model on one kind of GPU."""

    model: ModelCosts
    gpu: GpuCosts
    step: StepCosts = StepCosts()

    def step_s(self, num_tokens: int, context_tokens: int, attention_pairs: float) -> float:
        """Return the seconds that a step takes.

        Args:
            num_tokens: Tokens computed in all chunks.
            context_tokens: Sum over chunks of n, the tokens attended to, including its own.
            attention_pairs: Sum over chunks of (n^2 - p^2) / 2; see ``attention_pairs``.
        """
        model, gpu, step = self.model, self.gpu, self.step
        flops = 2 * model.parameters * num_tokens
        flops += 4 * model.layers * model.heads * model.head_dim * attention_pairs
        moved = model.weight_bytes + (context_tokens + num_tokens) * model.kv_bytes_per_token
        compute_s = flops / (gpu.flops_per_s * gpu.count * step.flops_efficiency)
        memory_s = moved / (gpu.bytes_per_s * gpu.count * step.bandwidth_efficiency)
        return max(compute_s, memory_s) + step.overhead_s

    def plan_s(self, plan: StepPlan) -> float:
        """Return the seconds that a planned step takes."""
        # A decode chunk is one token at position s: n = s + 1, and (n^2 - s^2) / 2 = s + 1/2.
        starts = int(plan.decode.starts.sum(dtype=np.int64))
        context = starts + plan.num_decode
        pairs = starts + 0.5 * plan.num_decode
        for chunk in plan.prefill:
            end = chunk.start + chunk.length
            context += end
            pairs += attention_pairs(chunk.start, end)
        return self.step_s(plan.num_tokens, context, pairs)

    @property
    def host_bytes_per_s(self) -> float:
        """Bandwidth reached between device and host in one direction, over all GPUs."""
        return self.gpu.host_bytes_per_s * self.gpu.count * self.step.host_link_efficiency

    @property
    def network_bytes_per_s(self) -> float:
        """Bandwidth reached between two nodes in one direction, over all GPUs of a node."""
        return self.gpu.network_bytes_per_s * self.gpu.count * self.step.network_efficiency

    @property
    def storage_write_bytes_per_s(self) -> float:
        """Bandwidth reached from host to storage, over the drives of all GPUs."""
        gpu = self.gpu
        return gpu.storage_write_bytes_per_s * gpu.count * self.step.storage_efficiency

    @property
    def storage_read_bytes_per_s(self) -> float:
        """Bandwidth reached from storage to host, over the drives of all GPUs."""
        gpu = self.gpu
        return gpu.storage_read_bytes_per_s * gpu.count * self.step.storage_efficiency

    def num_blocks(self, block_size: int) -> int:
        """Return the number of KV blocks that fit beside the weights.

        Raises:
            CostError: If the weights leave no room for a block.
        """
        usable = self.gpu.memory_bytes * self.gpu.count * self.step.memory_fraction
        num_blocks = int(
            (usable - self.model.weight_bytes) // (self.model.kv_bytes_per_token * block_size)
        )
        if num_blocks < 1:
            raise CostError(
                f"{self.model.name} does not fit: "
                f"its weights are {self.model.weight_bytes / 1e9:.1f} GB, "
                f"and {self.gpu.name} has {usable / 1e9:.1f} GB usable "
                f"(try {re.sub(r'x[0-9]+$', '', self.gpu.name)}x{2 * self.gpu.count})"
            )
        return num_blocks


def attention_pairs(start: int, end: int) -> float:
    """Return the number of query-key pairs of positions start .. end - 1 in causal attention."""
    return (end * end - start * start) / 2


def named_costs(model: str | None = None, gpu: str | None = None) -> CostModel:
    """Look up a cost model.

    Args:
        model: A name in `MODELS`; None for ``DEFAULT_MODEL``.
        gpu: A name in `GPUS`, with the suffix ``xN`` for a model split over N of them; None for
            ``DEFAULT_GPU``.

    Raises:
        CostError: For an unknown name; the message lists the known ones.
    """
    model, gpu = model or DEFAULT_MODEL, gpu or DEFAULT_GPU
    if model not in MODELS:
        raise CostError(f"no model {model!r}; known: {', '.join(MODELS)}")
    match = re.fullmatch(r"(.+?)(?:x([1-9][0-9]{0,3}))?", gpu)
    if match is None or match[1] not in GPUS:
        known = ", ".join(GPUS)
        raise CostError(f"no GPU {gpu!r}; known: {known}, each also as 'h100x2' for several")
    gpu_costs = dataclasses.replace(GPUS[match[1]], name=gpu, count=int(match[2] or 1))
    return CostModel(MODELS[model], gpu_costs)


def load_costs(path: Path, model: str | None = None, gpu: str | None = None) -> CostModel:
    """Read figures from a JSON file; the named model and GPU supply the others.

    ::

        {"model": {"parameters": 7.6e9}, "gpu": {"count": 2}, "step": {"overhead_s": 0.004}}

    Each section may hold any field of `ModelCosts`, `GpuCosts` or `StepCosts`.

    Raises:
        CostError: If the file cannot be read, or has an unknown or malformed figure.
    """
    try:
        sections = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CostError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise CostError(f"{path}: is not JSON: {error}") from None
    if not isinstance(sections, dict):
        raise CostError(f"{path}: must be a JSON object with model, gpu and step")
    unknown = sorted(set(sections) - {"model", "gpu", "step"})
    if unknown:
        raise CostError(f"{path}: has no section {unknown[0]!r}; known: model, gpu, step")
    named = named_costs(model, gpu)
    return CostModel(
        _override(path, "model", named.model, sections),
        _override(path, "gpu", named.gpu, sections),
        _override(path, "step", named.step, sections),
    )


_Section = TypeVar("_Section", ModelCosts, GpuCosts, StepCosts)


def _override(path: Path, section: str, costs: _Section, sections: Mapping[str, Any]) -> _Section:
    figures = sections.get(section, {})
    if not isinstance(figures, dict):
        raise CostError(f"{path}: {section} must be a JSON object, got {json.dumps(figures)}")
    known = {field.name: field.type for field in dataclasses.fields(costs)}
    for name, value in figures.items():
        if name not in known:
            raise CostError(f"{path}: {section} has no figure {name!r}; known: {', '.join(known)}")
        _check_figure(f"{path}: {section}.{name}", name, known[name], value)
    return dataclasses.replace(costs, **figures)


def _check_figure(place: str, name: str, kind: object, value: object) -> None:
    if kind == "str":
        if not isinstance(value, str):
            raise CostError(f"{place} must be a string, got {json.dumps(value)}")
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e30:
        raise CostError(f"{place} must be a number below 1e30, got {json.dumps(value)}")
    if kind == "int" and not isinstance(value, int):
        raise CostError(f"{place} must be an integer, got {value!r}")
    if value < 0 or (value == 0 and name not in ("overhead_s", "message_s", "lookup_s")):
        raise CostError(f"{place} must be above 0, got {value!r}")
    if value > 1 and (name.endswith("_efficiency") or name == "memory_fraction"):
        raise CostError(f"{place} must be at most 1, got {value!r}")
