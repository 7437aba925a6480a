"""All subjects: of the core, of engines, of nodes, and of transfer engines."""

from __future__ import annotations

from typing import Final

from . import engine_subjects, node_subjects, subjects, transfer_subjects

SUBJECTS: Final = (
    *subjects.SUBJECTS,
    *engine_subjects.SUBJECTS,
    *node_subjects.SUBJECTS,
    *transfer_subjects.SUBJECTS,
)
BY_NAME: Final = {subject.name: subject for subject in SUBJECTS}
