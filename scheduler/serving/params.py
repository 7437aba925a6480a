"""What a caller may ask of one generation."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ...kvcache import Tokens
from ..errors import RequestError
from ..request import GREEDY, Request, SamplingParams
from ..text import TextTokenizer


@dataclass(frozen=True)
class GenerationParams:
    """How a prompt is continued, and where the output ends.

    Attributes:
        max_tokens: limit of the output in tokens, at least 1.
        sampling: sampling parameters; default: greedy.
        stop: a string or strings that end the text, which is cut before the first of them. Their
            last token stays in the output.
        stop_token_ids: tokens that end the output, besides the model's end tokens. The token stays
            in the output.
        ignore_eos: whether to continue after the model's end tokens.

    Raises:
        RequestError: if `stop` is anything else, or an empty string.
    """

    max_tokens: int = 256
    sampling: SamplingParams = GREEDY
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        is_list = isinstance(stop, Sequence) and not isinstance(stop, bytes)
        if not (is_list and all(isinstance(each, str) and each for each in stop)):
            raise RequestError(f"stop must be strings that are not empty, got {self.stop!r}")
        object.__setattr__(self, "stop", tuple(stop))

    def make_request(
        self,
        request_id: str,
        prompt: str | Tokens,
        tokenizer: TextTokenizer | None,
        eos_token_ids: Collection[int],
        *,
        priority: int = 0,
        namespace: bytes = b"",
    ) -> Request:
        """Make a request for the engine.

        Raises:
            RequestError, TokenError: see `Request`; also for text without a tokenizer.
        """
        if tokenizer is None and (self.stop or isinstance(prompt, str)):
            what = "prompt is text" if isinstance(prompt, str) else f"stop is {self.stop!r}"
            raise RequestError(f"request {request_id!r}: {what}, but the engine has no tokenizer")
        if isinstance(prompt, str):
            assert tokenizer is not None, "checked above"
            prompt = tokenizer.encode(prompt)
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
