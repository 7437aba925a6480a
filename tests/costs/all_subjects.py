"""All subjects: of the core, of engines, and of nodes."""

from __future__ import annotations

from typing import Final

from . import engine_subjects, node_subjects, subjects

SUBJECTS: Final = (*subjects.SUBJECTS, *engine_subjects.SUBJECTS, *node_subjects.SUBJECTS)
BY_NAME: Final = {subject.name: subject for subject in SUBJECTS}
