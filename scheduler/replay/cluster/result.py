"""How a simulated cluster of prefill and decode nodes is set up, and what it did."""

from __future__ import annotations

from dataclasses import dataclass

from ...handoff import Order
from ..checks import Check
from ..simulation.latency import Latencies
from ..simulation.simulation import SimulationConfig

_NODE = SimulationConfig()


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """How many nodes there are, and how each is set up.

    Attributes:
        num_prefill, num_decode: nodes.
        node: each of them; `reserve_tokens` is that of the decode nodes. It has no host tier.
        order: whether a decode node grants blocks before the prompt is computed; see
            `PrefillSide`.
    """

    num_prefill: int
    num_decode: int
    node: SimulationConfig = _NODE
    order: Order = "early"


@dataclass(frozen=True, slots=True)
class RoleResult:
    """What the nodes of one role did, on average where not said otherwise.

    Attributes:
        steps: of all of them.
        busy: the part of the time that a node is in a step.
        mean_occupancy, peak_occupancy: the part of the pool that requests hold, in steps; the peak
            is of the fullest node.
        evicted_blocks: of all of them.
    """

    steps: int
    busy: float
    mean_occupancy: float
    peak_occupancy: float
    evicted_blocks: int


@dataclass(frozen=True, slots=True)
class ClusterResult:
    """What happened in simulated time, and what it took in real time.

    Attributes:
        finished, refused: requests; refused ones need more blocks than a pool has.
        prompt_tokens: of the finished requests.
        hit_tokens: of these, found on the prefill nodes.
        own_tokens: found on the decode nodes, and not sent.
        sent_blocks, sent_bytes: from prefill to decode nodes.
        busy_refusals: how often a decode node had no room; the request was tried again.
        preemptions: on the decode nodes, for want of blocks.
        recomputed_tokens: computed again there.
        num_blocks: of each node.
        prefill, decode: by role.
        simulated_s: first arrival to last token.
        latencies: distributions, and goodput. The first token is there when a decode node has all
            of the prompt.
        scheduler_us_per_step: real CPU time of schedule and update; differs from run to run.
        wall_s: real time of the simulation; differs from run to run.
    """

    finished: int
    refused: int
    prompt_tokens: int
    hit_tokens: int
    own_tokens: int
    sent_blocks: int
    sent_bytes: float
    busy_refusals: int
    preemptions: int
    recomputed_tokens: int
    num_blocks: int
    prefill: RoleResult
    decode: RoleResult
    simulated_s: float
    latencies: Latencies
    scheduler_us_per_step: float
    wall_s: float
    checks: tuple[Check, ...]
