"""What a caller may ask of one generation."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ...kvcache import Tokens
from ..request import GREEDY, Request, SamplingParams


@dataclass(frozen=True)
class GenerationParams:
    """How a prompt is continued, and where the output ends.

    Attributes:
        max_tokens: limit of the output in tokens, at least 1.
        sampling: sampling parameters; default: greedy.
        stop_token_ids: tokens that end the output, besides the model's end tokens. The token stays
            in the output.
        ignore_eos: whether to continue after the model's end tokens.
    """

    max_tokens: int = 256
    sampling: SamplingParams = GREEDY
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False

    def make_request(
        self,
        request_id: str,
        prompt: Tokens,
        eos_token_ids: Collection[int],
        *,
        priority: int = 0,
        namespace: bytes = b"",
    ) -> Request:
        """Make a request for the engine.

        Raises:
            RequestError, TokenError: see `Request`.
        """
        end_tokens = () if self.ignore_eos else tuple(eos_token_ids)
        return Request(
            request_id,
            prompt,
            self.max_tokens,
            priority=priority,
            sampling=self.sampling,
            stop_token_ids=(*self.stop_token_ids, *end_tokens),
            namespace=namespace,
        )
