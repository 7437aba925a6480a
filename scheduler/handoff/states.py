"""States of an attempt on each side, and the transitions between them.

Each side asserts that every transition is in its table. The documentation prints the tables.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final


class PrefillState(enum.Enum):
    """State of an attempt on P."""

    NEW = "new"
    PREPARING = "preparing"
    ASKING = "asking"
    COMPUTING = "computing"
    COMMITTED = "committed"
    WITHDRAWN = "withdrawn"
    GONE = "gone"


class DecodeState(enum.Enum):
    """State of an attempt on D."""

    NEW = "new"
    LOADING = "loading"
    RECEIVING = "receiving"
    QUARANTINED = "quarantined"
    STARTED = "started"
    ENDED = "ended"
    GONE = "gone"


PREFILL_MOVES: Final[Mapping[tuple[PrefillState, PrefillState], str]] = {
    (PrefillState.NEW, PrefillState.ASKING): "`begin`: P reserves blocks and sends ASK",
    (PrefillState.NEW, PrefillState.PREPARING): "`begin`: P reserves blocks and asks D later",
    (PrefillState.PREPARING, PrefillState.ASKING): "P has the first token and sends ASK",
    (PrefillState.PREPARING, PrefillState.GONE): "P gives up",
    (PrefillState.ASKING, PrefillState.COMPUTING): "GRANT: P offers what it has already",
    (PrefillState.ASKING, PrefillState.COMMITTED): (
        "GRANT, and P has the first token: P offers everything and sends COMMIT"
    ),
    (PrefillState.ASKING, PrefillState.GONE): "REFUSE, ABORT, no answer in time, or P gives up",
    (PrefillState.COMPUTING, PrefillState.COMMITTED): "P has the first token and sends COMMIT",
    (PrefillState.COMPUTING, PrefillState.WITHDRAWN): (
        "ABORT, D restarted, or P gives up, after parts were offered"
    ),
    (PrefillState.COMPUTING, PrefillState.GONE): (
        "ABORT that is fenced, or any end before a part was offered"
    ),
    (PrefillState.COMMITTED, PrefillState.GONE): "ACK, or ABORT that is fenced",
    (PrefillState.COMMITTED, PrefillState.WITHDRAWN): (
        "no ACK in time, ABORT, D restarted, or P gives up"
    ),
    (PrefillState.WITHDRAWN, PrefillState.GONE): "a fence: by the transport, ACK or ABORT",
}
"""Every move of an attempt on P from one state to another, and its cause."""

DECODE_MOVES: Final[Mapping[tuple[DecodeState, DecodeState], str]] = {
    (DecodeState.NEW, DecodeState.RECEIVING): "ASK: D reserves blocks and sends GRANT",
    (DecodeState.NEW, DecodeState.LOADING): "ASK, and the host tier has more of the prompt",
    (DecodeState.LOADING, DecodeState.RECEIVING): "the load has ended: D sends GRANT",
    (DecodeState.LOADING, DecodeState.ENDED): (
        "ABORT, P is silent, a newer attempt, or D gives up"
    ),
    (DecodeState.RECEIVING, DecodeState.STARTED): (
        "D has COMMIT and every part: it publishes and sends ACK"
    ),
    (DecodeState.RECEIVING, DecodeState.QUARANTINED): (
        "ABORT, P is silent, a pull failed or is late, a newer attempt, or D gives up, while pulls "
        "are open"
    ),
    (DecodeState.RECEIVING, DecodeState.ENDED): "the same, while no pull is open",
    (DecodeState.QUARANTINED, DecodeState.ENDED): "every pull is fenced: the blocks are free",
    (DecodeState.STARTED, DecodeState.ENDED): "`finished`: the scheduler has released the lease",
    (DecodeState.ENDED, DecodeState.GONE): "D has remembered it for remember_s",
}
"""Every move of an attempt on D from one state to another, and its cause."""
