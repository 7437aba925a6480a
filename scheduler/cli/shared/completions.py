"""The completions of `radixkv generate`: requests that may end at stop strings, and their texts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from ...request import Request, RequestStatus
from ...serving import GenerationOutput
from ...serving.outputs import Completion
from ...text import TextTokenizer


class Steps(Protocol):
    """What `Engine`, `Disaggregated` and `RemoteNodes` have in common."""

    @property
    def advanced(self) -> Sequence[Request]:
        """Requests that got tokens in the last step."""

    def abort(self, request_id: str) -> bool:
        """End a request in any state; return False if no open request has this id."""

    def step(self) -> list[Request]:
        """Run a step; return the requests that ended."""


class Completions:
    """The requests of all prompts, in order, and what they have generated.

    Attributes:
        has_stop: whether a text may end at a stop string: then tokens must come step by step.
    """

    def __init__(
        self, requests: Sequence[Request], tokenizer: TextTokenizer | None, stop: Sequence[str]
    ) -> None:
        """Begin without tokens.

        Args:
            requests: the requests, which have not begun.
            tokenizer: decodes the tokens; None if no texts are wanted.
            stop: strings that end a text; they need a tokenizer.
        """
        self.has_stop = bool(stop)
        self._requests = requests
        self._completions = {
            request: Completion(request, tokenizer, stop, name=request.request_id)
            for request in requests
        }
        self._stopped: dict[Request, GenerationOutput] = {}

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __len__(self) -> int:
        return len(self._requests)

    def step(self, engine: Steps) -> None:
        """Run a step, and end the requests whose texts have got a stop string in it."""
        engine.step()
        if not self.has_stop:
            return
        for request in engine.advanced:
            if request in self._stopped:
                continue  # it was in a step in flight
            completion, reason = self._completions[request], request.finish_reason
            output = completion.take(len(request.output_tokens), reason)
            if output is not None and output.finish_reason is not None:
                self._stopped[request] = output
                if reason is None:
                    engine.abort(request.request_id)

    def is_complete(self, request: Request) -> bool:
        """Whether a request has all of its tokens."""
        if (output := self._stopped.get(request)) is not None:
            return output.finish_reason != "abort"
        return request.status is RequestStatus.FINISHED

    def failures(self, reasons: Mapping[str, str]) -> dict[str, str]:
        """Return the reasons of the requests that have failed before their texts were complete."""
        complete = {request.request_id for request in self if self.is_complete(request)}
        return {name: reason for name, reason in reasons.items() if name not in complete}

    def outputs(self) -> list[GenerationOutput]:
        """Return the output of each request, after the last step; once."""
        outputs = []
        for request, completion in self._completions.items():
            output = self._stopped.get(request)
            if output is None:
                reason = request.finish_reason or "abort"
                output = completion.take(len(request.output_tokens), reason)
                assert output is not None, "a reason makes an output"
            outputs.append(output)
        return outputs
