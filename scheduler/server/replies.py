"""Responses: whole ones, and the chunks of streams, as OpenAI's clients read them.

With ``return_token_ids`` they have the fields of vLLM: ``token_ids`` in each choice, and
``prompt_token_ids`` in a choice of a completion, but beside the choices of a chat.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol

from ..request import TokenLogprob
from ..serving import GenerationOutput
from ..text import TextTokenizer

Json = dict[str, Any]


class Reply(Protocol):
    """Makes the responses to one request."""

    def whole(self, outputs: Sequence[GenerationOutput]) -> Json:
        """Return the response with the output of each choice, without usage."""

    def opening(self) -> list[Json]:
        """Return the chunks of a stream before the first output."""

    def chunk(self, index: int, output: GenerationOutput) -> Json:
        """Return the chunk with what is new of the output of a choice."""

    def last(self) -> Json:
        """Return a chunk without choices, for the usage."""


class TokenNames:
    """Writes log probabilities with the texts of tokens, or their ids without a tokenizer."""

    def __init__(self, tokenizer: TextTokenizer | None) -> None:
        self._tokenizer = tokenizer

    def name(self, token: int) -> str:
        """Return the text of a token, or ``token_id:7`` as vLLM does."""
        return f"token_id:{token}" if self._tokenizer is None else self._tokenizer.name(token)

    def of_completion(self, records: Sequence[TokenLogprob], offset: int) -> Json:
        """Return the object of a completion; the first token is at an offset of the text."""
        names = [self.name(record.token_id) for record in records]
        offsets = [offset]
        for name in names:
            offsets.append(offsets[-1] + len(name))
        return {
            "text_offset": offsets[:-1],
            "tokens": names,
            "token_logprobs": [_finite(record.logprob) for record in records],
            "top_logprobs": [
                {self.name(token): _finite(logprob) for token, logprob in _with_chosen(record)}
                for record in records
            ],
        }

    def of_chat(self, records: Sequence[TokenLogprob]) -> Json:
        """Return the object of a chat."""
        content = [
            {
                **self._entry(record.token_id, record.logprob),
                "top_logprobs": [self._entry(*each) for each in record.top],
            }
            for record in records
        ]
        return {"content": content, "refusal": None}

    def of_prompt(self, records: Sequence[TokenLogprob | None]) -> list[Json | None]:
        """Return the list of vLLM: of each token of a prompt, an object by token id."""
        return [None if record is None else self._by_id(record) for record in records]

    def _by_id(self, record: TokenLogprob) -> Json:
        top = [(token, logprob, rank) for rank, (token, logprob) in enumerate(record.top, start=1)]
        return {
            str(token): {
                "logprob": _finite(logprob),
                "rank": rank,
                "decoded_token": self.name(token),
            }
            for token, logprob, rank in [*top, (record.token_id, record.logprob, record.rank)]
        }

    def _entry(self, token: int, logprob: float) -> Json:
        name = self.name(token)
        return {"token": name, "logprob": _finite(logprob), "bytes": list(name.encode())}


def _with_chosen(record: TokenLogprob) -> list[tuple[int, float]]:
    return [*record.top, (record.token_id, record.logprob)]


def _finite(logprob: float) -> float:
    """Return a number that JSON has, as vLLM does."""
    return max(logprob, -9999.0)


class CompletionReply:
    """Responses of /v1/completions."""

    def __init__(
        self,
        head: Json,
        prompts: Sequence[Sequence[int]],
        names: TokenNames,
        *,
        has_token_ids: bool,
    ) -> None:
        """Begin.

        Args:
            head: fields of every response: id, created, model.
            prompts: token ids of the prompt of each choice.
            names: writes log probabilities.
            has_token_ids: whether the responses have token ids.
        """
        self._head = {**head, "object": "text_completion"}
        self._prompts = prompts
        self._names = names
        self._offsets: dict[int, int] = {}
        self._has_token_ids = has_token_ids
        self._begun: set[int] = set()

    def whole(self, outputs: Sequence[GenerationOutput]) -> Json:
        """Return the response."""
        choices = []
        for index, output in enumerate(outputs):
            choice = _choice(index, output, text=output.text)
            self._write_logprobs(choice, output.logprobs)
            if output.prompt_logprobs is not None:
                choice["prompt_logprobs"] = self._names.of_prompt(output.prompt_logprobs)
            if self._has_token_ids:
                choice["prompt_token_ids"] = self._prompts[index]
                choice["token_ids"] = output.token_ids
            choices.append(choice)
        return {**self._head, "choices": choices}

    def opening(self) -> list[Json]:
        """Return nothing."""
        return []

    def chunk(self, index: int, output: GenerationOutput) -> Json:
        """Return a chunk; the first one of a choice has the token ids of its prompt."""
        choice = _choice(index, output, text=output.new_text)
        self._write_logprobs(choice, new_logprobs(output))
        if self._has_token_ids:
            is_first = index not in self._begun
            self._begun.add(index)
            choice["prompt_token_ids"] = self._prompts[index] if is_first else None
            choice["token_ids"] = output.new_token_ids
        return {**self._head, "choices": [choice]}

    def last(self) -> Json:
        """Return a chunk for the usage."""
        return {**self._head, "choices": []}

    def _write_logprobs(self, choice: Json, records: Sequence[TokenLogprob] | None) -> None:
        if records is not None:
            offset = self._offsets.get(choice["index"], 0)
            choice["logprobs"] = written = self._names.of_completion(records, offset)
            self._offsets[choice["index"]] = offset + sum(map(len, written["tokens"]))


class ChatReply:
    """Responses of /v1/chat/completions, which has one prompt."""

    def __init__(
        self,
        head: Json,
        prompt: Sequence[int],
        names: TokenNames,
        *,
        has_token_ids: bool,
        num_choices: int,
    ) -> None:
        """Begin; see `CompletionReply`."""
        self._names = names
        self._head = head
        self._num_choices = num_choices
        self._prompt = prompt
        self._has_token_ids = has_token_ids

    def whole(self, outputs: Sequence[GenerationOutput]) -> Json:
        """Return the response."""
        choices = []
        for index, output in enumerate(outputs):
            message = {"role": "assistant", "content": output.text}
            choice = _choice(index, output, message=message)
            if output.logprobs is not None:
                choice["logprobs"] = self._names.of_chat(output.logprobs)
            if self._has_token_ids:
                choice["token_ids"] = output.token_ids
            choices.append(choice)
        response = {**self._head, "object": "chat.completion", "choices": choices}
        if (records := outputs[0].prompt_logprobs) is not None:
            response["prompt_logprobs"] = self._names.of_prompt(records)
        if self._has_token_ids:
            response["prompt_token_ids"] = self._prompt
        return response

    def opening(self) -> list[Json]:
        """Return the chunks that name the role of each choice."""
        chunks = []
        for index in range(self._num_choices):
            delta = {"role": "assistant", "content": ""}
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            chunks.append({**self.last(), "choices": [choice]})
        if self._has_token_ids:
            chunks[0]["prompt_token_ids"] = self._prompt
        return chunks

    def chunk(self, index: int, output: GenerationOutput) -> Json:
        """Return a chunk."""
        delta = {"content": output.new_text} if output.new_text else {}
        choice = _choice(index, output, delta=delta)
        if (records := new_logprobs(output)) is not None:
            choice["logprobs"] = self._names.of_chat(records)
        if self._has_token_ids:
            choice["token_ids"] = output.new_token_ids
        return {**self.last(), "choices": [choice]}

    def last(self) -> Json:
        """Return a chunk for the usage."""
        return {**self._head, "object": "chat.completion.chunk", "choices": []}


def new_logprobs(output: GenerationOutput) -> Sequence[TokenLogprob] | None:
    """Return the records of the new tokens of an output."""
    if output.logprobs is None:
        return None
    return output.logprobs[len(output.token_ids) - len(output.new_token_ids) :]


def usage(outputs: Collection[GenerationOutput]) -> Json:
    """Return how many tokens the outputs have, and how many of their prompts any tier had.

    A prompt counts once, with the hits of its first sample.
    """
    by_index = sorted(outputs, key=lambda output: -output.index)
    prompts = {output.request_id: output for output in by_index}.values()
    num_prompt = sum(output.num_prompt_tokens for output in prompts)
    num_new = sum(len(output.token_ids) for output in outputs)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_new,
        "total_tokens": num_prompt + num_new,
        "prompt_tokens_details": {"cached_tokens": sum(sum(each.hits) for each in prompts)},
    }


def _choice(index: int, output: GenerationOutput, **content: object) -> Json:
    return {
        "index": index,
        **content,
        "logprobs": None,
        "finish_reason": output.finish_reason,
    }
