"""The model of a command: its dtype and its devices, as the options say."""

from __future__ import annotations

import argparse
from pathlib import Path

from jax.sharding import Mesh

from ..models import Model, load_model, tensor_parallel_mesh


def mesh_of_options(arguments: argparse.Namespace) -> Mesh | None:
    """Return the devices that --tp asks for; None without it.

    Raises:
        TensorParallelError: if there are fewer.
    """
    return None if arguments.tp is None else tensor_parallel_mesh(arguments.tp)


def load_model_of_options(arguments: argparse.Namespace) -> Model:
    """Load the model of the directory that the options name."""
    mesh = mesh_of_options(arguments)
    return load_model(Path(arguments.model_dir), arguments.dtype or "auto", mesh=mesh)
