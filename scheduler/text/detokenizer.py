"""Incremental detokenizing: the text of tokens that come one after another."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BYTE_TOKEN: Final = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """Decodes tokens as they come. Text once given stays, and all of it is the decoding of all.

    Two things are not final before the next token: a character of which some bytes have yet to
    come, and a run of byte tokens (``<0x0A>``), whose text changes if it becomes invalid UTF-8.

    Only the last tokens are decoded anew: those that may change, behind others as context, because
    decoders treat the first token in a special way (such as removing its space)::

        tokens     [ ......... | context | open ]
        decoded                 ^^^^^^^^^^^^^^^^
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
        self._num_context = 0  # leading tokens of the window whose text has been given
        self._context_length = 0  # characters of them
        self._open = ""

    def push(self, tokens: Sequence[int]) -> None:
        """Append tokens. Special ones, and those that the tokenizer does not know, have no text."""
        names = {token: self._tokenizer.id_to_token(token) for token in tokens}
        new = [token for token in tokens if names[token] not in self._no_text]
        if not new:
            return
        self._window += new
        decoded = self._decode(self._window)
        self._open = decoded[self._context_length :]
        if self._open.endswith(_REPLACEMENT) or _BYTE_TOKEN.fullmatch(names[new[-1]] or ""):
            self.pending = self._open.rstrip(_REPLACEMENT)
            return
        self.text += self._open
        self.pending = self._open = ""
        self._window = self._window[self._num_context :]
        self._num_context, self._context_length = len(self._window), len(self._decode(self._window))

    def finish(self) -> None:
        """Make all text final, also that of unfinished characters."""
        self.text += self._open
        self.pending = self._open = ""

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)
