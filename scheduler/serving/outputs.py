"""Outputs: what a request has generated so far, as objects of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..request import FinishReason, Request, TokenLogprob
from ..text import TextTokenizer
from ..text.output_text import OutputText


class PrefixHits(NamedTuple):
    """Prompt tokens that were not computed when the request began, by the tier that had them."""

    device: int = 0
    host: int = 0
    storage: int = 0


@dataclass(frozen=True, slots=True)
class GenerationOutput:
    """The output of a prompt so far, or of one of its samples.

    Attributes:
        request_id: id that the caller gave, or that stands for the prompt.
        index: number of the sample, below `GenerationParams.n`.
        num_prompt_tokens: length of the prompt.
        text: text so far, without special tokens, unfinished characters, and what may be the begin
            of a stop string; empty without a tokenizer.
        new_text: the end of it, which the output before did not have.
        token_ids: tokens generated so far, with the token that ended the output.
        new_token_ids: the last of them, which the output before did not have.
        finish_reason: "length", "stop" or "abort"; None while the request runs. A guided output
            whose grammar was given up has "abort".
        hits: prompt tokens that were found in the cache.
        logprobs: the record of each of `token_ids`; None if not asked for.
        prompt_logprobs: None for the first token of the prompt, and the record of each other one;
            None if not asked for, and before the first output token.
        others: the other samples, in what `LLM.generate` returns; see `samples`.
    """

    request_id: str
    index: int
    num_prompt_tokens: int
    text: str
    new_text: str
    token_ids: tuple[int, ...]
    new_token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    hits: PrefixHits
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    others: tuple[GenerationOutput, ...] = ()

    @property
    def samples(self) -> tuple[GenerationOutput, ...]:
        """All samples of the prompt in order, of which `LLM.generate` returns the first."""
        return (self, *self.others)


class Completion:
    """Makes the outputs of one request from its tokens, for one consumer.

    The outputs do not depend on how many tokens come at a time, except for their number.

    Attributes:
        has_stop: whether a stop string may end the output before the request ends.
    """

    def __init__(
        self,
        request: Request,
        tokenizer: TextTokenizer | None,
        stop: Sequence[str],
        *,
        name: str,
        index: int = 0,
    ) -> None:
        """Begin without tokens.

        Args:
            request: the request, whose tokens are read.
            tokenizer: decodes the tokens; None for outputs without text.
            stop: strings that end the output; they need a tokenizer.
            name, index: see `GenerationOutput.request_id` and `GenerationOutput.index`.
        """
        self._name, self._index = name, index
        self.has_stop = bool(stop)
        self._request = request
        self._token_ids: tuple[int, ...] = ()
        self._logprobs: list[TokenLogprob] = []
        self._prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
        self._text: OutputText | None = None
        if tokenizer is not None:
            self._text = OutputText(tokenizer.detokenizer(), stop, request.sampling.min_tokens)

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
            request_id=self._name,
            index=self._index,
            num_prompt_tokens=request.num_prompt_tokens,
            text=text,
            new_text=text[len(before) :],
            token_ids=self._token_ids,
            new_token_ids=tuple(new),
            finish_reason=reason,
            hits=PrefixHits(
                request.num_hit_tokens, request.num_host_hit_tokens, request.num_storage_hit_tokens
            ),
            logprobs=self._take_logprobs(),
            prompt_logprobs=self._take_prompt_logprobs(),
        )

    def _take_logprobs(self) -> tuple[TokenLogprob, ...] | None:
        if self._request.logprobs is None:
            return None
        self._logprobs += self._request.output_logprobs[len(self._logprobs) : len(self._token_ids)]
        return tuple(self._logprobs)

    def _take_prompt_logprobs(self) -> tuple[TokenLogprob | None, ...] | None:
        records = self._request.prompt_records
        if self._prompt_logprobs is None and len(records) == self._request.num_prompt_tokens:
            self._prompt_logprobs = tuple(records)
        return self._prompt_logprobs
