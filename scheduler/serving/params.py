"""What a caller may ask of one generation."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from ...kvcache import Tokens, as_tokens
from ..errors import RequestError
from ..request import GREEDY, Request, SamplingParams
from ..text import TextTokenizer
from ..text.guided import Guided, TokenGuide


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
        n: number of samples of the prompt. They share its blocks, and it is computed once. Sample
            ``i`` has the output of a request with the seed ``sampling.seed + i``.
        logprobs: report the log probability of each output token, and of this many most likely
            ones; 0 to 20.
        prompt_logprobs: the same of each prompt token, with the first sample. The whole prompt is
            computed, without hits, as in vLLM.
        guided: what the text of the output must be; needs the extra ``guided``.

    Raises:
        RequestError: if `stop` is anything else, or an empty string, if `n` is not an integer of at
            least 1, or if there are fewer tokens than ``sampling.min_tokens``.
    """

    max_tokens: int = 256
    sampling: SamplingParams = GREEDY
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    guided: Guided | None = None

    def __post_init__(self) -> None:
        if isinstance(self.n, bool) or not isinstance(self.n, int) or self.n < 1:
            raise RequestError(f"n must be an integer of at least 1, got {self.n!r}")
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        is_list = isinstance(stop, Sequence) and not isinstance(stop, bytes)
        if not (is_list and all(isinstance(each, str) and each for each in stop)):
            raise RequestError(f"stop must be strings that are not empty, got {self.stop!r}")
        object.__setattr__(self, "stop", tuple(stop))
        # What else is wrong with these two, `Request` says.
        is_checked = isinstance(self.sampling, SamplingParams) and isinstance(self.max_tokens, int)
        if is_checked and self.sampling.min_tokens > max(self.max_tokens, 0):
            raise RequestError(
                f"min_tokens must be at most max_tokens {self.max_tokens}, got "
                f"{self.sampling.min_tokens}"
            )

    def make_requests(
        self,
        request_id: str,
        prompt: str | Tokens,
        tokenizer: TextTokenizer | None,
        eos_token_ids: Collection[int],
        *,
        priority: int = 0,
        namespace: bytes = b"",
        guide: TokenGuide | None = None,
    ) -> list[Request]:
        """Make a request of the engine for each sample, with ids of their own if there are several.

        A guide stands for ``guided``, and is copied.

        Raises:
            RequestError, TokenError: see `Request`; also for text without a tokenizer, and for a
                grammar that cannot be compiled.
            MissingExtraError: if ``guided`` needs a library that is not installed.
        """
        if tokenizer is None and (self.stop or self.guided or isinstance(prompt, str)):
            what = f"stop is {self.stop!r}" if self.stop else "it is guided"
            what = "prompt is text" if isinstance(prompt, str) else what
            raise RequestError(f"request {request_id!r}: {what}, but the engine has no tokenizer")
        if isinstance(prompt, str):
            assert tokenizer is not None, "checked above"
            prompt = tokenizer.encode(prompt)
        if guide is None and self.guided is not None:
            assert tokenizer is not None, "checked above"
            guide = tokenizer.guide(self.guided, eos_token_ids)
        end_tokens = () if self.ignore_eos else tuple(eos_token_ids)
        tokens, seed = as_tokens(prompt), self.sampling.seed
        requests: list[Request] = []
        for index in range(self.n):
            request = Request(
                request_id if self.n == 1 else f"{request_id}#{index}",
                tokens,
                self.max_tokens,
                priority=priority,
                sampling=replace(self.sampling, seed=(seed + index) % 2**32),
                stop_token_ids=(
                    requests[0].stop_token_ids if requests else (*self.stop_token_ids, *end_tokens)
                ),
                namespace=namespace,
                logprobs=self.logprobs,
                prompt_logprobs=self.prompt_logprobs if index == 0 else None,
                guide=None if guide is None else guide.copy(),
                sample_of=requests[0] if requests else None,
            )
            requests.append(request)
        return requests
