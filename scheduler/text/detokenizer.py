"""Incremental detokenizing: the text of tokens that come one after another."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"

_MAX_RUN: Final = 16
"""Byte tokens whose text waits for the end of their run, at most."""

_NUM_CONTEXT: Final = 4
"""Tokens after which a decoder stands where it stood with all tokens before, also inside a
character: it has at most three more bytes, and a token has at least one."""


class Detokenizer:
    """Decodes tokens as they come. Text once given stays, and all of it is the decoding of all.

    Two things are not final before the next token: a character of which some bytes have yet to
    come, and a run of byte tokens (``<0x0A>``), whose text changes if it becomes invalid UTF-8. A
    run of more than 16 is decoded in parts, each for itself: otherwise a run without end would have
    no text, and take longer for each token.

    Only the last tokens are decoded anew: those that may change, behind others as context, because
    decoders treat the first token in a special way (such as removing its space)::

        tokens     [ ......... | window ]
        decoded                 ^^^^^^^^ of which the first characters have been given
        text       "..................." + pending

    Attributes:
        text: text so far that is final.
        pending: text after it, as it is now, without an unfinished character.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.text = ""
        self.pending = ""
        self._tokenizer = tokenizer
        # By name, as in the library: a normalizer may have renamed the token, which then has text.
        added = tokenizer.get_added_tokens_decoder().values()
        self._no_text = {None, *(each.content for each in added if each.special)}
        self._window: list[int] = []
        self._num_given = 0  # characters of the window's text that have been given
        self._run = bytearray()  # byte tokens at the end of the window
        self._open = ""

    def push(self, tokens: Sequence[int]) -> None:
        """Append tokens. Special ones, and those that the tokenizer does not know, have no text."""
        names = {token: self._tokenizer.id_to_token(token) for token in tokens}
        new = [token for token in tokens if names[token] not in self._no_text]
        if not new:
            return
        for token in new:
            self._window.append(token)
            byte = _BYTE_TOKEN.fullmatch(names[token] or "")
            if byte is None:
                self._run.clear()
            else:
                self._run += bytes.fromhex(byte[1])
                if len(self._run) == _MAX_RUN:
                    self._cut_run()
        self._open = self._decode(self._window)[self._num_given :]
        if self._run:
            self.pending = self._open.rstrip(_REPLACEMENT)
            return
        num_open = self._open.endswith(_REPLACEMENT)  # bytes of one character are one of these
        final = self._open[: len(self._open) - num_open]
        self.text += final
        self.pending, self._open = "", self._open[len(final) :]
        del self._window[: -_NUM_CONTEXT if num_open else -1]
        self._num_given = len(self._decode(self._window)) - num_open

    def finish(self) -> None:
        """Make all text final, also that of unfinished characters."""
        self.text += self._open
        self.pending = self._open = ""

    def _cut_run(self) -> None:
        """Make the text of a run of byte tokens final, but for an unfinished character."""
        _, num_whole = codecs.utf_8_decode(self._run, "replace")
        del self._run[:num_whole]
        cut = len(self._window) - len(self._run)
        self.text += self._decode(self._window[:cut])[self._num_given :]
        # A byte token that is one character, whatever follows it.
        letter = self._tokenizer.token_to_id("<0x41>")
        context = [] if letter is None else [letter]
        self._window[:cut] = context
        self._num_given = len(self._decode(context))

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)
