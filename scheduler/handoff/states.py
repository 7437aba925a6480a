"""The states of an attempt on each side, and every way from one to the next.

A side asserts that each of its moves is in the table; the documentation prints it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final


class PrefillState(enum.Enum):
    """Where an attempt is on P."""

    NEW = "new"
    PREPARING = "preparing"
    ASKING = "asking"
    COMPUTING = "computing"
    COMMITTED = "committed"
    WITHDRAWN = "withdrawn"
    GONE = "gone"


class DecodeState(enum.Enum):
    """Where an attempt is on D."""

    NEW = "new"
    LOADING = "loading"
    RECEIVING = "receiving"
    QUARANTINED = "quarantined"
    STARTED = "started"
    ENDED = "ended"
    GONE = "gone"


PREFILL_MOVES: Final[Mapping[tuple[PrefillState, PrefillState], str]] = {
    (PrefillState.NEW, PrefillState.ASKING): "`begin`: blocks are admitted, ASK is sent",
    (PrefillState.NEW, PrefillState.PREPARING): "`begin`, D is asked later: blocks are admitted",
    (PrefillState.PREPARING, PrefillState.ASKING): "the first token is sampled; ASK is sent",
    (PrefillState.PREPARING, PrefillState.GONE): "given up",
    (PrefillState.ASKING, PrefillState.COMPUTING): "GRANT; what P has already is offered",
    (PrefillState.ASKING, PrefillState.COMMITTED): (
        "GRANT, and the first token was sampled: all is offered, COMMIT is sent"
    ),
    (PrefillState.ASKING, PrefillState.GONE): "REFUSE, ABORT, no answer in time, or given up",
    (PrefillState.COMPUTING, PrefillState.COMMITTED): "the first token is sampled; COMMIT is sent",
    (PrefillState.COMPUTING, PrefillState.WITHDRAWN): (
        "ABORT, D restarted, or given up, and parts were offered"
    ),
    (PrefillState.COMPUTING, PrefillState.GONE): (
        "ABORT that is fenced; or any end before a part was offered"
    ),
    (PrefillState.COMMITTED, PrefillState.GONE): "ACK; or ABORT that is fenced",
    (PrefillState.COMMITTED, PrefillState.WITHDRAWN): (
        "no ACK in time, ABORT, D restarted, or given up"
    ),
    (PrefillState.WITHDRAWN, PrefillState.GONE): "fenced: by the transport, by ACK or by ABORT",
}

DECODE_MOVES: Final[Mapping[tuple[DecodeState, DecodeState], str]] = {
    (DecodeState.NEW, DecodeState.RECEIVING): "ASK: blocks are admitted, GRANT is sent",
    (DecodeState.NEW, DecodeState.LOADING): "ASK, and the host has more of the prompt",
    (DecodeState.LOADING, DecodeState.RECEIVING): "the host's part has been copied; GRANT is sent",
    (DecodeState.LOADING, DecodeState.ENDED): "ABORT, P is silent, a newer attempt, or given up",
    (DecodeState.RECEIVING, DecodeState.STARTED): (
        "COMMIT and every part have come: published, ACK is sent"
    ),
    (DecodeState.RECEIVING, DecodeState.QUARANTINED): (
        "ABORT, P is silent, a pull failed or is late, a newer attempt, or given up; pulls are open"
    ),
    (DecodeState.RECEIVING, DecodeState.ENDED): "the same, and no pull is open",
    (DecodeState.QUARANTINED, DecodeState.ENDED): "every pull is fenced: the blocks are free",
    (DecodeState.STARTED, DecodeState.ENDED): "`finished`: the scheduler has released the lease",
    (DecodeState.ENDED, DecodeState.GONE): "nobody asks any more, or a newer attempt",
}
