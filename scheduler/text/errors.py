"""Errors of names, tokenizers and chat templates.

::

    CheckpointError
    ├── ModelNotFoundError
    └── ChatTemplateError
"""

from __future__ import annotations

from pathlib import Path

from ..models.errors import CheckpointError


class ModelNotFoundError(CheckpointError):
    """A model is neither a directory nor on the hub, or the hub cannot be reached."""

    def __init__(self, model: str | Path, problem: str) -> None:
        super().__init__(f"{model}: {problem}")
        self.model = model


class ChatTemplateError(CheckpointError):
    """A checkpoint has no chat template, or the template refuses the messages."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path
