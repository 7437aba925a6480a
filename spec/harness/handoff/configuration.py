"""Random choice of a hand-off's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ..engine import Below, Config

ORDERS: Final = ("early", "prefill_complete")

FAVOURED: Final = (
    "submit", "deliver", "duplicate", "drop", "cut", "compute", "decode", "complete", "pull_write",
    "pull_end", "pull_fence", "offer_fence", "copy", "tick", "evict", "cancel", "crash", "restart",
    "reset", "reboot", "leave", "hang", "hold", "release", "new_gateway",
)  # fmt: skip
"""Operations that a world may favour or neglect."""

ENDS: Final = ("pull_fence", "offer_fence")
"""Operations after which the transport does nothing more."""

PRESSURE: Final = ("submit", "cancel", "tick", "evict", "compute")
"""Operations that end attempts and use their blocks for others."""


PIECES: Final = ("deliver", "compute", "pull_write", "pull_end")
"""Operations by which many pieces of pulls arrive, or do not."""

AMPLE_HOST: Final = 400
"""Blocks of a host tier that never drops any."""


MORE_BLOCKS: Final = 40
"""Blocks that the second decode node has more than the first one: enough for any request."""


def draw_config(below: Below) -> Config:
    """Draw sizes, from too small for two requests to ample; some overload D.

    Each world favours some operations, and neglects others.
    """
    config: Config = {
        "prefill_blocks": (5, 8, 14)[below(3)],
        "decode_blocks": (6, 9, 16)[below(3)],
        "host_blocks": (0, 0, 4, 12)[below(4)],
        "block_size": 1 + below(3),
        "num_groups": 1 + below(2),
        "budget": (2, 5, 16)[below(3)],
        "max_running": (1, 2, 4)[below(3)],
        "order": ORDERS[below(2)],
        "reserve_tokens": (0, 0, 0, 2, None)[below(5)],
        "num_prefill": (1, 2)[below(2)],
        "num_decode": (1, 1, 2)[below(3)],
        "max_attempts": (1, 3, 3, 3)[below(4)],
        "request_s": (30, 5000, 5000)[below(3)],
        "max_overtaken": (1, 3, 256)[below(3)],
        "depth": (1, 2, 2, 3)[below(4)],
        "stream": below(3) != 2,
    }
    if below(5) < 2:
        config |= {
            "prefill_blocks": 24, "decode_blocks": 20, "budget": 16, "num_decode": 1,
            "max_running": (4, 6)[below(2)],
        }  # fmt: skip
    if config["host_blocks"] and below(2):
        config |= {"storage": True, "host_blocks": (config["host_blocks"], AMPLE_HOST)[below(2)]}
        if below(2):  # preempted requests may move to d1
            config |= {
                "num_decode": 2, "decode_blocks": 16, "more_blocks": MORE_BLOCKS, "max_running": 4,
                "prefill_blocks": 24, "budget": 16, "reserve_tokens": 0,
            }  # fmt: skip
    if not config.get("storage") and below(3) == 0:
        config["decode_block_size"] = 1 + below(4)
    if below(2):
        config["num_shards"] = 2 + below(2)
    factors = [(1, 10, 10, 10, 30)[below(5)] for _ in FAVOURED]
    config["rare"] = [word for word, each in zip(FAVOURED, factors, strict=True) if each == 1]
    config["often"] = [word for word, each in zip(FAVOURED, factors, strict=True) if each == 30]
    if below(3) == 0:  # pulls outlive their attempts
        config["rare"] = sorted({*config["rare"], *ENDS} - {*PRESSURE})
        config["often"] = sorted({*config["often"], *PRESSURE} - {*ENDS})
    if config.get("num_shards") and below(2):
        config["rare"] = sorted({*config["rare"]} - {*PIECES})
        config["often"] = sorted({*config["often"], *PIECES})
    return config


def weights_of(config: Config, weights: Mapping[str, int]) -> dict[str, int]:
    """Return the weights of the operations in a world: some are favoured, some neglected."""
    factor = dict.fromkeys(config.get("rare", ()), 1) | dict.fromkeys(config.get("often", ()), 30)
    return {word: weight * factor.get(word, 10) for word, weight in weights.items()}
