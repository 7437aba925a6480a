"""Outputs: what a request has generated so far, as objects of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..request import FinishReason, Request
from ..text import TextTokenizer
from ..text.output_text import OutputText


class PrefixHits(NamedTuple):
    """Prompt tokens whose KV was found in each tier when the request began."""

    device: int = 0
    host: int = 0
    storage: int = 0


@dataclass(frozen=True, slots=True)
class GenerationOutput:
    """The output of a request so far.

    Attributes:
        request_id: id of the request.
        num_prompt_tokens: length of the prompt.
        text: text so far, without special tokens, unfinished characters, and what may be the begin
            of a stop string; empty without a tokenizer.
        new_text: the end of it, which the output before did not have.
        token_ids: tokens generated so far, with the token that ended the output.
        new_token_ids: the last of them, which the output before did not have.
        finish_reason: "length", "stop" or "abort"; None while the request runs.
        hits: prompt tokens that were found in the cache.
    """

    request_id: str
    num_prompt_tokens: int
    text: str
    new_text: str
    token_ids: tuple[int, ...]
    new_token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    hits: PrefixHits


class Completion:
    """Makes the outputs of one request from its tokens, for one consumer.

    The outputs do not depend on how many tokens come at a time, except for their number.

    Attributes:
        has_stop: whether a stop string may end the output before the request ends.
    """

    def __init__(
        self, request: Request, tokenizer: TextTokenizer | None, stop: Sequence[str]
    ) -> None:
        """Begin without tokens.

        Args:
            request: the request, whose tokens are read.
            tokenizer: decodes the tokens; None for outputs without text.
            stop: strings that end the output; they need a tokenizer.
        """
        self.has_stop = bool(stop)
        self._request = request
        self._token_ids: tuple[int, ...] = ()
        self._text: OutputText | None = None
        if tokenizer is not None:
            self._text = OutputText(tokenizer.detokenizer(), stop)

    def take(self, num_tokens: int, reason: FinishReason | None) -> GenerationOutput | None:
        """Return the output of the first `num_tokens` tokens; None if there is nothing new.

        It ends before them if there is a stop string; the caller then aborts the request.

        Args:
            num_tokens: number of tokens that the engine has appended, no fewer than before.
            reason: why the request has ended, or None.
        """
        request, taken = self._request, len(self._token_ids)
        if num_tokens == taken and reason is None:
            return None
        new = request.output_tokens[taken:num_tokens]
        text = before = ""
        if self._text is not None:
            before = self._text.text
            num_used = self._text.push(new, is_end=reason is not None)
            text = self._text.text
            if num_used is not None:
                new, reason = new[:num_used], "stop"
        self._token_ids += tuple(new)
        return GenerationOutput(
            request_id=request.request_id,
            num_prompt_tokens=request.num_prompt_tokens,
            text=text,
            new_text=text[len(before) :],
            token_ids=self._token_ids,
            new_token_ids=tuple(new),
            finish_reason=reason,
            hits=PrefixHits(
                request.num_hit_tokens, request.num_host_hit_tokens, request.num_storage_hit_tokens
            ),
        )
