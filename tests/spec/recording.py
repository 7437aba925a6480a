"""A stand-in that notes the calls of its methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


def plain(value: Any) -> Any:
    """Return arrays as lists, and lists as copies, because an adapter may overwrite them."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    return list(value) if isinstance(value, list) else value


class Recorder:
    """Stands for an object: notes each call of a method, and answers as it is told."""

    def __init__(self, **answers: Any) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.answers = answers

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            noted: tuple[Any, ...] = (name, *map(plain, given))
            self.calls.append((*noted, named) if named else noted)
            answer = self.answers.get(name)
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call
