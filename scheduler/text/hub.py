"""Find a model: a directory, or a repository of the Hugging Face Hub."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from ..errors import ConfigError
from ..models.errors import MissingExtraError
from .errors import ModelNotFoundError

_HUB_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")

_FILES: Final = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model*.safetensors",
    "model.safetensors.index.json",
)
"""Files that are used. Many repositories hold the same weights in other formats as well."""


def locate_model(model: str | Path, revision: str | None = None) -> Path:
    """Return the directory of a model; download it if it is the name of a repository.

    The hub's cache and environment variables apply: ``HF_HOME``, ``HF_TOKEN``, ``HF_HUB_OFFLINE``.

    Args:
        model: a directory, or a name such as "Qwen/Qwen3-0.6B". A directory goes first.
        revision: branch, tag or commit of the repository; default: its main branch.

    Raises:
        ModelNotFoundError: if there is neither, or no network and the cache does not have it.
        MissingExtraError: if the library ``huggingface_hub`` is needed and not installed.
        ConfigError: for the revision of a directory.
    """
    directory = Path(model).expanduser()
    if model != "" and directory.is_dir():
        if revision is not None:
            raise ConfigError(f"revision {revision!r} is for the hub, but {model} is a directory")
        return directory
    if isinstance(model, Path) or not _HUB_NAME.fullmatch(model):
        raise ModelNotFoundError(model, "no such directory, and not the name of a hub repository")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise MissingExtraError(Path(model), "huggingface_hub", "text") from None
    try:
        found = snapshot_download(model, revision=revision, allow_patterns=list(_FILES))
    except Exception as error:  # of the hub, of its HTTP client, or of the file system
        reason = " ".join(str(error).split()) or repr(error)
        raise ModelNotFoundError(
            model, f"no such directory, and not found on the hub: {reason}"
        ) from error
    return Path(str(found))
