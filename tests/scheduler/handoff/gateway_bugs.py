"""Planted bugs of the gateway and of its messages with nodes."""

from __future__ import annotations

from typing import Final

from .bugs import bug

OUTBOX: Final = "gateway/resend.py"
LINK: Final = "gateway/node_reporter.py"
REMOTE: Final = "gateway/network_gateway.py"
GATEWAY: Final = "gateway/gateway.py"
RETRIES: Final = "gateway/retries.py"
_SENT_AGAIN: Final = "                self._waiting[place] = replace(waiting, sent_at=now)\n"

GATEWAY_BUGS: Final = [
    bug(
        "a lost message is not resent",
        OUTBOX,
        ("                due.resend.append(addressed)\n", ""),
    ),
    bug("a lost message is resent once", OUTBOX, (_SENT_AGAIN, "")),
    bug(
        "an acknowledged message is resent",
        OUTBOX,
        ("            del self._waiting[peer, ack.key]\n", "            pass\n"),
    ),
    bug(
        "the acknowledgement of an earlier message counts",
        OUTBOX,
        ("waiting is not None and DeliveryAck.of(waiting.message) == ack", "waiting is not None"),
    ),
    bug(
        "the acknowledgement of another peer counts",
        OUTBOX,
        ("self._waiting.get((peer, ack.key))", "next(iter(self._waiting.values()), None)"),
        ("del self._waiting[peer, ack.key]", "self.forget(ack.key)"),
    ),
    bug(
        "the first message of an attempt is not replaced",
        OUTBOX,
        ("        self._waiting.pop((peer, message.key), None)\n", ""),
        (
            "        self._waiting[peer, message.key] = _Waiting(message, now, now)",
            "        self._waiting.setdefault((peer, message.key), _Waiting(message, now, now))",
        ),
    ),
    bug(
        "a resent message keeps its old place",
        OUTBOX,
        (
            "            del self._waiting[place]\n            addressed",
            "            addressed",
        ),
    ),
    bug(
        "an unacknowledged message never expires",
        OUTBOX,
        ("if now - waiting.first_sent_at >= self._patience_s:", "if False:"),
    ),
    bug(
        "a message expires at once",
        OUTBOX,
        ("waiting.first_sent_at >= self._patience_s", "waiting.first_sent_at >= 0"),
    ),
    bug(
        "messages to gone nodes are resent",
        OUTBOX,
        ("if place[0] == peer]", "if False]"),
    ),
    bug(
        "P begins an attempt at each copy of RunPrefill",
        LINK,
        ("        if not is_new:\n", "        if False:\n"),
        seen_in="FastDeploy PR 5338",
    ),
    bug(
        "P begins attempts of an earlier epoch",
        LINK,
        ("run.epoch == self._epoch and ", ""),
        ("        if run.epoch != self._epoch:\n", "        if False:\n"),
    ),
    bug(
        "P forgets RunPrefill at once",
        LINK,
        ("if now - self._begun[key] < self._remember_s:", "if False:"),
    ),
    bug(
        "P acknowledges only the first copy",
        LINK,
        (
            "        self._messages.append(DeliveryAck.of(run))\n"
            "        is_new = self.is_new(run)\n",
            "        is_new = self.is_new(run)\n"
            "        self._messages += [DeliveryAck.of(run)] if is_new else []\n",
        ),
    ),
    bug(
        "P does not report a rejected request",
        LINK,
        (
            "            self.report(PrefillFailed(run.key, str(error), is_final=True), now)",
            "            pass",
        ),
    ),
    bug("a report is not resent", LINK, ("        self._reports.add(GATEWAY, message, now)\n", "")),
    bug(
        "the gateway does not acknowledge reports",
        REMOTE,
        ("                self._actions.append(SendToNode(peer, DeliveryAck.of(report)))\n", ""),
    ),
    bug(
        "RunPrefill is not resent",
        REMOTE,
        ("                    self._unacked.add(route.prefill, run, self._now)\n", ""),
    ),
    bug(
        "an expired RunPrefill is ignored",
        REMOTE,
        (
            "        for peer, message in expired:\n",
            "        for peer, message in expired[:0]:\n",
        ),
    ),
    bug(
        "RunPrefill is resent after a cancel",
        REMOTE,
        (
            "                    self._unacked.forget(key)\n                    self",
            "                    self",
        ),
    ),
    bug(
        "RunPrefill is resent after a report",
        REMOTE,
        ("                self._unacked.forget(report.key)  # P has received RunPrefill\n", ""),
    ),
    bug(
        "messages of any epoch are accepted",
        REMOTE,
        ("elif known is not None and known.epoch == epoch:", "elif known is not None:"),
        seen_in="FastDeploy PR 5338, FastDeploy PR 6024",
    ),
    bug(
        "a status of an earlier epoch replaces the node",
        REMOTE,
        ("if known is not None and epoch < known.epoch:", "if False:"),
    ),
    bug(
        "a restarted node keeps its attempts",
        REMOTE,
        ("(known.epoch, known.status) != (epoch, status)", "known.status != status"),
    ),
    bug(
        "a silent node is never gone",
        REMOTE,
        ("if now - node.heard_at >= self._silence_s:", "if False:"),
    ),
    bug(
        "an attempt that a new request has begun is sent to nodes that are gone since",
        REMOTE,
        ("        self._follow()  # what has begun must not outlive its nodes\n", ""),
    ),
    bug(
        "cancelled attempts are not sent to nodes",
        REMOTE,
        (
            'SendToNode(peer, CancelAttempt(key, "cancelled"))\n',
            'SendToNode(peer, DeliveryAck(key, "cancelled"))\n',
        ),
    ),
    bug(
        "the end of a request is returned twice",
        GATEWAY,
        ("        ended, self._ended = self._ended, []\n", "        ended = list(self._ended)\n"),
    ),
    bug(
        "ended attempts stay in the load",
        GATEWAY,
        (
            "        self._routes.pop(key, None)\n        self._router.finished(key)\n",
            "        pass\n",
        ),
    ),
    bug(
        "a new gateway reuses the names of attempts",
        GATEWAY,
        ("#{self._epoch:x}.", "#"),
    ),
    bug(
        "a lost decode node counts only after a reported start",
        RETRIES,
        (
            '            self._lose(key.request_id, request, "the decode node was lost")\n',
            "            if request.is_started:\n"
            '                self._lose(key.request_id, request, "the decode node was lost")\n',
        ),
    ),
    bug(
        "a failure that is reported twice counts twice",
        RETRIES,
        (
            "return self.begins_at is None and attempt == self.attempt",
            "return attempt == self.attempt",
        ),
    ),
    bug(
        "reports of an older attempt count",
        RETRIES,
        (
            "return self.begins_at is None and attempt == self.attempt",
            "return self.begins_at is None",
        ),
    ),
    bug(
        "an attempt that was lost counts as failed",
        RETRIES,
        ("        request.num_failed -= 1\n        self._retry", "        self._retry"),
    ),
    bug(
        "a request loses attempts for ever",
        RETRIES,
        ("        is_final = lost_for_s >= self._lost_s\n", "        is_final = False\n"),
    ),
    bug(
        "the time of the last lost attempt counts",
        RETRIES,
        ("        if request.losing_since is None:\n", "        if True:\n"),
    ),
    bug(
        "the next attempt goes to the pair that lost the last one",
        GATEWAY,
        (
            "        lost = self._lost_on.get(name, set())\n",
            "        lost: set[Route] = set()\n",
        ),
    ),
    bug(
        "two broken pairs take turns for ever",
        GATEWAY,
        ("        if not self._router.has_pair(lost):\n", "        if True:\n"),
    ),
    bug(
        "an attempt goes to a pair that does not hear each other",
        GATEWAY,
        (
            "                pairs |= {Route(peer, other), Route(other, peer)}\n",
            "                pass\n",
        ),
    ),
    bug(
        "only a prefill node's silence counts",
        GATEWAY,
        ("pairs |= {Route(peer, other), Route(other, peer)}", "pairs |= {Route(peer, other)}"),
    ),
    bug(
        "a node whose load changes is lost",
        REMOTE,
        (", load=IDLE)", ")"),
    ),
    bug(
        "the load of a node is that of its first status",
        REMOTE,
        ("replace(known, heard_at=self._now, load=load)", "replace(known, heard_at=self._now)"),
    ),
    bug(
        "tokens are told without regard to their position",
        REMOTE,
        ("new.tokens[num_heard - new.start :]", "new.tokens"),
    ),
    bug(
        "tokens after a gap are told",
        REMOTE,
        ("        elif new.start <= num_heard:\n", "        elif True:\n"),
        ("new.tokens[num_heard - new.start :]", "new.tokens[max(num_heard - new.start, 0) :]"),
    ),
    bug(
        "the gateway does not ask for tokens that are missing",
        REMOTE,
        ("        elif not followed.has_asked:\n", "        elif False:\n"),
    ),
    bug(
        "each message after a gap is answered by a question",
        REMOTE,
        ("        elif not followed.has_asked:\n", "        else:\n"),
    ),
    bug(
        "a lost question for tokens is not repeated",
        REMOTE,
        (
            "            elif followed.peer == peer and followed.has_asked:\n",
            "            elif False:\n",
        ),
    ),
    bug(
        "the gateway asks for tokens that it has",
        REMOTE,
        ("            followed.has_asked = False\n", "            pass\n"),
    ),
    bug(
        "the gateway asks always for tokens",
        REMOTE,
        ("if self._is_streaming and isinstance(report, Started)", "if isinstance(report, Started)"),
    ),
    bug(
        "tokens of an unwanted attempt are not answered",
        REMOTE,
        (
            'self._actions.append(SendToNode(peer, CancelAttempt(new.key, "cancelled")))',
            "pass",
        ),
    ),
    bug(
        "the tokens of another attempt are told again",
        GATEWAY,
        (
            "        known = request.output_tokens[start : start + len(tokens)]\n",
            "        known = []\n",
        ),
    ),
    bug(
        "the answer repeats what was told",
        GATEWAY,
        ("for token in tokens[len(request.output_tokens) :]:", "for token in tokens:"),
    ),
    bug(
        "another attempt may contradict what was told",
        GATEWAY,
        (
            "        if list(tokens[: len(known)]) == list(known):\n",
            "        if True:\n",
        ),
    ),
    bug(
        "D reports tokens that nobody asked for",
        LINK,
        (
            "            self._decoding[report.key] = report.request\n",
            "            self._decoding[report.key] = report.request\n"
            "            self._followed[report.key] = 0\n",
        ),
    ),
    bug(
        "D reports tokens of attempts that have ended",
        LINK,
        ("            self._followed.pop(report.key, None)\n", ""),
    ),
    bug(
        "D reports tokens as often as it can",
        LINK,
        ("if not self._followed or now < self._next_progress_at:", "if not self._followed:"),
    ),
    bug(
        "D reports all tokens in one message",
        LINK,
        ("            if not room or len", "            if len"),
        ("stop = start + room // cost", "stop = None"),
    ),
    bug(
        "log probabilities take no room",
        LINK,
        ("cost = 1 if request.logprobs is None else 2 + request.logprobs", "cost = 1"),
    ),
    bug(
        "log probabilities are reported from the beginning",
        LINK,
        ("request.output_logprobs[start:stop]", "request.output_logprobs[:stop]"),
    ),
    bug(
        "log probabilities that were told are told again",
        GATEWAY,
        ("(request, records[len(known) :])", "(request, records)"),
    ),
    bug(
        "the log probabilities of the last tokens are lost",
        GATEWAY,
        ("self._take_records(request, records[len(request.output_logprobs) - kept :])", "pass"),
    ),
    bug(
        "tokens count without their log probabilities",
        GATEWAY,
        ("if not is_wanted or len(records) == len(tokens):", "if True:"),
    ),
    bug(
        "other attempts report no log probabilities",
        GATEWAY,
        ("            logprobs=original.logprobs,\n", ""),
    ),
    bug(
        "the next attempt of a moved request lacks a token",
        GATEWAY,
        (
            "            original.tokens[: original.num_prompt_tokens + kept],\n",
            "            [*original.prompt, *original.output_tokens[1:kept]],\n",
        ),
    ),
    bug(
        "two decode nodes run a moved request",
        RETRIES,
        (
            '        self._retry(key.request_id, request, "it was preempted")\n',
            "        self._pausing[key.request_id] = request\n",
        ),
    ),
    bug(
        "a move counts as a failed attempt",
        RETRIES,
        ("        request.num_failed -= 1  # which it is not\n", ""),
    ),
    bug(
        "a moved request goes on after tokens of an earlier attempt",
        GATEWAY,
        ("self._num_kept[key] + len(tokens)", "len(request.output_tokens)"),
    ),
    bug(
        "a moved request generates too many tokens",
        GATEWAY,
        ("original.max_new_tokens - kept,", "original.max_new_tokens,"),
    ),
    bug(
        "the tokens of a moved request are counted from its first one",
        GATEWAY,
        ("        start += self._num_kept[key]\n", ""),
    ),
    bug(
        "the answer lacks the tokens before a move",
        GATEWAY,
        ("            tokens = [*request.output_tokens[:kept], *tokens]\n", ""),
    ),
    bug(
        "a moved request begins its counts again",
        GATEWAY,
        (
            "sampling=replace(sampling, num_continued=sampling.num_continued + kept)",
            "sampling=sampling",
        ),
    ),
    bug(
        "the tokens of a preempted request are told twice",
        GATEWAY,
        ("tokens[num_heard:], records[num_heard:])", "tokens, records)"),
    ),
    bug(
        "a request that fits nowhere with its tokens fails",
        GATEWAY,
        ("if is_final and self._kept.pop(key.request_id, 0):", "if False:"),
    ),
    bug(
        "a request moves to a full node",
        "gateway/router.py",
        ("<= node.num_free and name != besides", "and name != besides"),
    ),
    bug(
        "a request moves to the node that it leaves",
        "gateway/router.py",
        ("<= node.num_free and name != besides", "<= node.num_free"),
    ),
    bug(
        "a node where others wait has room",
        "gateway/remote_node.py",
        ("return 0 if load.num_waiting else num_blocks", "return num_blocks"),
    ),
    bug(
        "D reports a request as preempted that it has resumed",
        LINK,
        ("if request is None or request.status is not RequestStatus.PREEMPTED:", "if not request:"),
    ),
    bug(
        "a lost report of a preempted request is not repeated",
        LINK,
        (
            "                self._preempted[key] = now + self._retry_s\n",
            "                del self._preempted[key]\n",
        ),
    ),
    bug(
        "D reports the tokens of the same attempts first",
        LINK,
        ("            del self._followed[key]  # the others are first next time\n", ""),
    ),
    bug(
        "a healed connection is avoided for ever",
        REMOTE,
        (
            "        self._gateway.set_unheard(peer, unheard)\n",
            "        if unheard:\n            self._gateway.set_unheard(peer, unheard)\n",
        ),
    ),
]
