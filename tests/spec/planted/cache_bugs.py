"""All bugs to plant into `kvcache/`, without its tiers."""

from __future__ import annotations

from typing import Final

from .admission_bugs import ADMISSION_BUGS
from .change_bugs import CHANGE_BUGS
from .cost_bugs import COST_BUGS
from .event_bugs import EVENT_BUGS
from .extension_bugs import EXTENSION_BUGS
from .flight_bugs import FLIGHT_BUGS
from .input_bugs import INPUT_BUGS
from .memory_bugs import MEMORY_BUGS
from .plant import Bug
from .pool_bugs import POOL_BUGS
from .publish_bugs import PUBLISH_BUGS
from .release_bugs import RELEASE_BUGS
from .tree_bugs import TREE_BUGS

CACHE_BUGS: Final[tuple[Bug, ...]] = (
    *TREE_BUGS,
    *CHANGE_BUGS,
    *ADMISSION_BUGS,
    *EXTENSION_BUGS,
    *PUBLISH_BUGS,
    *FLIGHT_BUGS,
    *RELEASE_BUGS,
    *POOL_BUGS,
    *INPUT_BUGS,
    *MEMORY_BUGS,
    *EVENT_BUGS,
    *COST_BUGS,
)
