"""Table of the operations of a world with tiers, by word."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ..cache import end as cache_end
from .admit import (
    admit,
    append,
    append_batch,
    done,
    evict,
    fail,
    fork,
    forward,
    launch,
    match,
    publish_again,
    submit,
)
from .copies import early, fence, late, result, second, wrong_result
from .preempt import finish, park, preempt, unpark
from .storage import cancel, drain, elsewhere, prefetch, reset, serve
from .take import take

OPERATIONS: Final[dict[str, Callable[..., bool]]] = {
    "submit": submit, "match": match, "admit": admit, "forward": forward, "launch": launch,
    "done": done, "fail": fail, "again": publish_again, "append": append,
    "append_batch": append_batch, "finish": finish, "preempt": preempt, "evict": evict,
    "park": park, "unpark": unpark, "fork": fork, "prefetch": prefetch, "cancel": cancel,
    "elsewhere": elsewhere, "take": take, "result": result, "fence": fence, "late": late,
    "second": second, "early": early, "wrong_result": wrong_result, "reset": reset,
    "misuse": cache_end.misuse, "check": cache_end.check, "drain": drain, "serve": serve,
}  # fmt: skip
"""Operations by word. Each returns False and does nothing if a name does not exist."""
