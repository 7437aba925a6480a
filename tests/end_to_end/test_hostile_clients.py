"""Hostile clients of a server in a process of its own: a small version of the command."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from .hostile_clients import ATTACKS, attack_server, attacked, fill, make_model


def has_namespaces() -> bool:
    """Whether this user may mount a small file system for a process."""
    command = ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return (
        shutil.which("unshare") is not None and not subprocess.run(command, check=False).returncode
    )


def test_others_do_not_notice_hostile_clients(tmp_path: Path) -> None:
    """Each answer is right, and connections leave nothing. Where it can be, the disk is full."""
    model, disk = tmp_path / "model", tmp_path / "disk"
    model.mkdir()
    disk.mkdir(mode=0o700)
    make_model(model)
    everything = tuple(each for each, _ in ATTACKS)
    with attacked(model, disk, has_disk=has_namespaces()) as server:
        before = server.descriptors()
        if has_namespaces():
            fill(server, disk)
        ways = [(everything, 3 * len(ATTACKS))]
        [result] = attack_server(server, ways, patience_s=1.0, num_descriptors=before)
        assert (result.failures, result.descriptors) == ([], before)
        assert result.answers >= 4
        if has_namespaces():
            fill(server, disk)  # it is full still, when what is being written has ended
        assert server.stop() == 0
        assert "Traceback" not in server.log
