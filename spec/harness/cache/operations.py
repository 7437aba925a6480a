"""The operations of a cache world: its table, and weights that prefer some of them."""

from __future__ import annotations

from typing import Any, Final

from ..engine import Below
from ..operations import ALWAYS, Groups, Operation, Table, name_drawn, number
from .admit import admit, match, submit
from .compute import again, append, append_batch, begin_step, done, end_step, fail, forward, launch
from .end import check, drain, evict, finish, misuse, preempt, reset
from .requests import MAX_FLIGHTS, MAX_WAITING, NAMESPACES, TOKENS, draw_prompt
from .serve import serve
from .state import CacheState

COMMON: Final = ("submit", "admit", "forward", "finish")
"""Operations that every world needs."""


def groups(world: CacheState) -> Groups:
    """Return the names that operations apply to: of requests, of steps, or "" for none."""
    if world.config.get("serial"):
        return {"serial": [""]}
    waiting, running, idle, ready = [], [], [], []
    can_overlap = world.config.get("overlap", True)
    for name, request in world.requests.items():
        if request.state == "waiting":
            waiting.append(name)
        elif request.state == "running":
            running.append(name)
            if not request.job:
                num_tokens = len(request.tokens)
                if request.written < num_tokens:
                    idle.append(name)
                elif num_tokens < request.limit:
                    ready.append(name)
    return {
        ALWAYS: [""],
        "submit": [""] if len(waiting) < MAX_WAITING else [],
        "waiting": waiting,
        "admissible": waiting if len(running) < world.config["max_running"] else [],
        "running": running,
        "to compute": idle,
        "to grow": ready,
        "in flight": list(world.jobs),
        "misuse": [*running[:1], ""],
        "can begin": [""] if can_overlap and len(world.flights) < MAX_FLIGHTS else [],
        "steps": [""] if world.flights else [],
    }


def weights_of(table: Table[Any], rare: int, often: int) -> dict[str, int]:
    """Return the weights of a world that prefers some operations and makes others rare.

    Args:
        table: the operations.
        rare: one bit per operation outside `COMMON` that makes it rare.
        often: one bit per operation that makes it four times as frequent.
    """
    weights = table.weights()
    others = [word for word in weights if word not in COMMON]
    for bit, word in enumerate(others):
        if rare >> bit & 1:
            weights[word] = 1 if word != "reset" else 0
    for bit, word in enumerate(weights):
        if often >> bit & 1:
            weights[word] *= 4
    return weights


# How arguments are drawn: from the world, the name of a request or step, and choices


def new_name(world: CacheState, name: str, below: Below) -> str:
    """The name of the next request."""
    return f"r{len(world.past) + 1}"


def prompt(world: CacheState, name: str, below: Below) -> list[int]:
    """A prompt, often one that extends an earlier one, often of about whole blocks."""
    return draw_prompt(below, world.past, world.config, repeats=True)


def num_more(world: CacheState, name: str, below: Below) -> int:
    """By how many tokens a request may grow: none, or up to some blocks."""
    return below(8 + 2 * world.block_size)


def namespace(world: CacheState, name: str, below: Below) -> int:
    """The first namespace, or any."""
    return below(len(NAMESPACES)) if below(3) == 0 else 0


def num_tokens(world: CacheState, name: str, below: Below) -> int:
    """Some tokens to compute, or all."""
    return len(world.requests[name].tokens) if below(2) else 1 + below(5)


def new_step(world: CacheState, name: str, below: Below) -> str:
    """The name of the next step of a request."""
    return f"{name}.{world.requests[name].num_jobs + 1}"


def num_known(world: CacheState, name: str, below: Below) -> int:
    """The tokens of an earlier completion, or of the last one."""
    written = world.requests[name].written
    return below(written + 1) if world.promises.ignores_late else written


def tokens(world: CacheState, name: str, below: Below) -> list[int]:
    """The token of a decode step, or some blocks of tokens."""
    alphabet = world.config["alphabet"]
    most = 1 if below(3) else 3 * world.block_size + 1
    return [TOKENS[below(alphabet)] for _ in range(1 + below(most))]


def token_each(world: CacheState, name: str, below: Below) -> list[list[Any]]:
    """One token for each of several requests that can grow."""
    alphabet, names = world.config["alphabet"], groups(world)["to grow"]
    return [[each, TOKENS[below(alphabet)]] for each in names if below(3)]


CACHE_TABLE: Final[Table[CacheState]] = Table(groups, [
    Operation("submit", submit, 36, "submit",
              {"name": new_name, "prompt": prompt, "more": num_more, "namespace": namespace}),
    Operation("admit", admit, 40, "admissible", {"name": name_drawn}),
    Operation("forward", forward, 60, "to compute",
              {"name": name_drawn, "num_tokens": num_tokens}),
    Operation("append", append, 30, "to grow", {"name": name_drawn, "tokens": tokens}),
    Operation("finish", finish, 12, "running", {"name": name_drawn}),
    Operation("match", match, 16, "waiting", {"name": name_drawn}, needs="match"),
    Operation("append_batch", append_batch, 14, "to grow", {"tokens": token_each},
              needs="append_batch"),
    Operation("launch", launch, 18, "to compute",
              {"name": name_drawn, "num_tokens": num_tokens, "step": new_step}),
    Operation("done", done, 30, "in flight", {"step": name_drawn}),
    Operation("fail", fail, 4, "in flight", {"step": name_drawn}),
    Operation("again", again, 4, "running", {"name": name_drawn, "num_tokens": num_known}),
    Operation("preempt", preempt, 8, "running", {"name": name_drawn}),
    Operation("evict", evict, 6, ALWAYS, {"num_blocks": number(5)}, needs="evict"),
    Operation("reset", reset, 2, needs="reset"),
    Operation("misuse", misuse, 6, "misuse", {"kind": number(1 << 10), "name": name_drawn},
              needs="misuse"),
    Operation("check", check, 2, needs="check"),
    Operation("drain", drain, 2),
    Operation("begin_step", begin_step, 30, "can begin", needs="begin_step"),
    Operation("end_step", end_step, 12, "steps", needs="end_step"),
    Operation("serve", serve, 1, "serial",
              {"name": new_name, "prompt": prompt, "namespace": namespace}),
])  # fmt: skip
