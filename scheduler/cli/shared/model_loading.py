"""The model of a command: its dtype and its devices, as the options say."""

from __future__ import annotations

import argparse

import jax
from jax.sharding import Mesh

from ...engine.calls import Group
from ...models import Model, load_model, tensor_parallel_mesh
from ...terminal.interrupts import exit_on_interrupt


def mesh_of_options(arguments: argparse.Namespace, group: Group | None = None) -> Mesh | None:
    """Return the devices that --tp asks for; without it, all of a group, or None.

    Raises:
        TensorParallelError: if there are fewer.
    """
    number = arguments.tp or (None if group is None else jax.device_count())
    return None if number is None else tensor_parallel_mesh(number)


def load_model_of_options(arguments: argparse.Namespace, group: Group | None = None) -> Model:
    """Load the model of ``arguments.model_dir``; ctrl-C ends the process meanwhile."""
    mesh = mesh_of_options(arguments, group)
    with exit_on_interrupt():
        return load_model(arguments.model_dir, arguments.dtype or "auto", mesh=mesh)
