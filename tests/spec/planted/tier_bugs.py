"""All bugs to plant into the tiers below the device."""

from __future__ import annotations

from .cost_bugs import TIER_COST_BUGS
from .event_bugs import TIER_EVENT_BUGS
from .host_bugs import HOST_BUGS
from .input_bugs import TIER_INPUT_BUGS
from .memory_bugs import TIER_MEMORY_BUGS
from .operation_bugs import OPERATION_BUGS
from .parking_bugs import PARKING_BUGS
from .prefetch_bugs import PREFETCH_BUGS
from .recency_bugs import RECENCY_BUGS
from .room_bugs import ROOM_BUGS
from .tiered_tree_bugs import TIERED_TREE_BUGS

TIER_BUGS = (
    *OPERATION_BUGS,
    *HOST_BUGS,
    *TIERED_TREE_BUGS,
    *PARKING_BUGS,
    *PREFETCH_BUGS,
    *ROOM_BUGS,
    *RECENCY_BUGS,
    *TIER_INPUT_BUGS,
    *TIER_MEMORY_BUGS,
    *TIER_EVENT_BUGS,
    *TIER_COST_BUGS,
)
