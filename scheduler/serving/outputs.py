"""Outputs: what a request has generated so far, as objects of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..request import FinishReason, Request


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
        token_ids: tokens generated so far, with the token that ended the output.
        new_token_ids: the last of them, which the output before did not have.
        finish_reason: "length", "stop" or "abort"; None while the request runs.
        hits: prompt tokens that were found in the cache.
    """

    request_id: str
    num_prompt_tokens: int
    token_ids: tuple[int, ...]
    new_token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    hits: PrefixHits


class Completion:
    """Makes the outputs of one request from its tokens, for one consumer."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._token_ids: tuple[int, ...] = ()

    def take(self, num_tokens: int, reason: FinishReason | None) -> GenerationOutput | None:
        """Return the output of the first `num_tokens` tokens; None if there is nothing new.

        Args:
            num_tokens: number of tokens that the engine has appended, no fewer than before.
            reason: why the request has ended, or None.
        """
        request, taken = self._request, len(self._token_ids)
        if num_tokens == taken and reason is None:
            return None
        new = tuple(request.output_tokens[taken:num_tokens])
        self._token_ids += new
        return GenerationOutput(
            request_id=request.request_id,
            num_prompt_tokens=request.num_prompt_tokens,
            token_ids=self._token_ids,
            new_token_ids=new,
            finish_reason=reason,
            hits=PrefixHits(
                request.num_hit_tokens, request.num_host_hit_tokens, request.num_storage_hit_tokens
            ),
        )
