"""Text: a checkpoint's tokenizer and chat template, incremental decoding, and stop strings.

Needs the extra `text`. Names are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .detokenizer import Detokenizer
    from .errors import ChatTemplateError, ModelNotFoundError
    from .guided import Guided
    from .hub import locate_model
    from .tokenizer import TextTokenizer

_MODULES = {
    "ChatTemplateError": "errors",
    "Detokenizer": "detokenizer",
    "Guided": "guided",
    "ModelNotFoundError": "errors",
    "TextTokenizer": "tokenizer",
    "locate_model": "hub",
}

__all__ = [
    "ChatTemplateError",
    "Detokenizer",
    "Guided",
    "ModelNotFoundError",
    "TextTokenizer",
    "locate_model",
]


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return getattr(import_module(f".{_MODULES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
