"""Planted bugs of the gateway and of its messages with nodes."""

from __future__ import annotations

from typing import Final

from .bugs import bug

OUTBOX: Final = "handoff/resend.py"
LINK: Final = "handoff/node_reporter.py"
REMOTE: Final = "handoff/network_gateway.py"
GATEWAY: Final = "handoff/gateway.py"
RETRIES: Final = "handoff/retries.py"
_SENT_AGAIN: Final = "                self._waiting[place] = replace(waiting, sent_at=now)\n"

GATEWAY_BUGS: Final = [
    bug(
        "what is lost is not said again",
        OUTBOX,
        ("                due.resend.append(addressed)\n", ""),
    ),
    bug("what is lost is said again once", OUTBOX, (_SENT_AGAIN, "")),
    bug(
        "what was heard is said again",
        OUTBOX,
        ("            del self._waiting[peer, ack.key]\n", "            pass\n"),
    ),
    bug(
        "what was heard before counts for what is said now",
        OUTBOX,
        ("waiting is not None and DeliveryAck.of(waiting.message) == ack", "waiting is not None"),
    ),
    bug(
        "what another has heard counts",
        OUTBOX,
        ("self._waiting.get((peer, ack.key))", "next(iter(self._waiting.values()), None)"),
        ("del self._waiting[peer, ack.key]", "self.forget(ack.key)"),
    ),
    bug(
        "what is said first of an attempt is all that is said",
        OUTBOX,
        ("        self._waiting.pop((peer, message.key), None)\n", ""),
        (
            "        self._waiting[peer, message.key] = _Waiting(message, now, now)",
            "        self._waiting.setdefault((peer, message.key), _Waiting(message, now, now))",
        ),
    ),
    bug(
        "who has waited the longest is said again last",
        OUTBOX,
        (
            "            del self._waiting[place]\n            addressed",
            "            addressed",
        ),
    ),
    bug(
        "what nobody hears is said for ever",
        OUTBOX,
        ("if now - waiting.first_sent_at >= self._patience_s:", "if False:"),
    ),
    bug(
        "it is given up at once",
        OUTBOX,
        ("waiting.first_sent_at >= self._patience_s", "waiting.first_sent_at >= 0"),
    ),
    bug(
        "it is said to nodes that have gone",
        OUTBOX,
        ("if place[0] == peer]", "if False]"),
    ),
    bug(
        "P begins an attempt as often as it is asked to",
        LINK,
        ("        if not is_new:\n", "        if False:\n"),
    ),
    bug(
        "P begins what an earlier life was asked for",
        LINK,
        ("run.epoch == self._epoch and ", ""),
        ("        if run.epoch != self._epoch:\n", "        if False:\n"),
    ),
    bug(
        "P forgets at once what it was asked to begin",
        LINK,
        ("if now - self._begun[key] < self._remember_s:", "if False:"),
    ),
    bug(
        "P answers the first copy alone",
        LINK,
        (
            "        self._messages.append(DeliveryAck.of(run))\n"
            "        is_new = self.is_new(run)\n",
            "        is_new = self.is_new(run)\n"
            "        self._messages += [DeliveryAck.of(run)] if is_new else []\n",
        ),
    ),
    bug(
        "what P refuses to begin is not reported",
        LINK,
        (
            "            self.report(PrefillFailed(run.key, str(error), is_final=True), now)",
            "            pass",
        ),
    ),
    bug("a report is said once", LINK, ("        self._reports.add(GATEWAY, message, now)\n", "")),
    bug(
        "the gateway does not say what it has heard",
        REMOTE,
        ("                self._actions.append(SendToNode(peer, DeliveryAck.of(report)))\n", ""),
    ),
    bug(
        "the gateway asks once",
        REMOTE,
        ("                    self._unacked.add(route.prefill, run, self._now)\n", ""),
    ),
    bug(
        "the gateway waits for ever for who does not take a request in",
        REMOTE,
        (
            "        for peer, message in expired:\n",
            "        for peer, message in expired[:0]:\n",
        ),
    ),
    bug(
        "the gateway goes on asking for what nobody wants",
        REMOTE,
        (
            "                    self._unacked.forget(key)\n                    self",
            "                    self",
        ),
    ),
    bug(
        "the gateway goes on asking for what it has an answer to",
        REMOTE,
        ("                self._unacked.forget(report.key)  # P has received RunPrefill\n", ""),
    ),
    bug(
        "any life of a node is believed",
        REMOTE,
        ("elif known is not None and known.epoch == epoch:", "elif known is not None:"),
    ),
    bug(
        "a node that was is taken for a new one",
        REMOTE,
        ("if known is not None and epoch < known.epoch:", "if False:"),
    ),
    bug(
        "a node that has come back has lost nothing",
        REMOTE,
        ("(known.epoch, known.status) != (epoch, status)", "known.status != status"),
    ),
    bug(
        "a silent node is waited for",
        REMOTE,
        ("if now - node.heard_at >= self._silence_s:", "if False:"),
    ),
    bug(
        "nobody is told that an attempt is given up",
        REMOTE,
        (
            'SendToNode(peer, CancelAttempt(key, "cancelled"))\n',
            'SendToNode(peer, DeliveryAck(key, "cancelled"))\n',
        ),
    ),
    bug(
        "the end of a request is handed out twice",
        GATEWAY,
        ("        ended, self._ended = self._ended, []\n", "        ended = list(self._ended)\n"),
    ),
    bug(
        "a node is busy with what has ended",
        GATEWAY,
        (
            "        self._routes.pop(key, None)\n        self._router.finished(key)\n",
            "        pass\n",
        ),
    ),
    bug(
        "another gateway gives attempts the names of an earlier one's",
        GATEWAY,
        ("#{self._epoch:x}.", "#"),
    ),
    bug(
        "what a lost decode node has not said, P will say",
        RETRIES,
        (
            '        self.decode_failed(key, "the decode node was lost")\n',
            "        if self._requests[key.request_id].is_started:\n"
            '            self.decode_failed(key, "the decode node was lost")\n',
        ),
    ),
    bug(
        "a failure that is told twice counts twice",
        RETRIES,
        (
            "return self.begins_at is None and attempt == self.attempt",
            "return attempt == self.attempt",
        ),
    ),
    bug(
        "what an older attempt says counts",
        RETRIES,
        (
            "return self.begins_at is None and attempt == self.attempt",
            "return self.begins_at is None",
        ),
    ),
]
