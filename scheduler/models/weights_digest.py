"""A name for the weights of a checkpoint, from what is in its files."""

from __future__ import annotations

from hashlib import file_digest, sha256
from pathlib import Path


def weights_digest(directory: str | Path) -> str:
    """Return a digest of every byte of a checkpoint's weights, as a name for what they compute.

    It reads all of them: a second for each GB or two. The same weights in other files have another
    digest, which costs no more than the hits.

    Raises:
        OSError: if a file cannot be read.
    """
    digest = sha256()
    for path in sorted(Path(directory).glob("*.safetensors")):
        with path.open("rb") as file:
            digest.update(file_digest(file, "sha256").digest())
    return digest.hexdigest()
