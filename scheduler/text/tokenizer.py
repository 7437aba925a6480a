"""`TextTokenizer`: text to tokens and back, as a checkpoint says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import RequestError
from ..models import CheckpointFileError, load_tokenizer
from .chat_template import ChatTemplate
from .detokenizer import Detokenizer


class TextTokenizer:
    """The tokenizer and the chat template of a checkpoint. Threads may share it."""

    def __init__(self, directory: str | Path) -> None:
        """Load ``tokenizer.json``, and the chat template if there is one.

        Raises:
            CheckpointFileError: if a file cannot be read, or there is no tokenizer.
            MissingExtraError: if the library ``tokenizers`` is not installed.
        """
        directory = Path(directory)
        tokenizer = load_tokenizer(directory)
        if tokenizer is None:
            raise CheckpointFileError(directory, "no tokenizer.json")
        # A file may ask for truncation to the length that its model was trained on.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._template = ChatTemplate(directory)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a prompt, with the special tokens that the tokenizer adds.

        Raises:
            RequestError: if text is not a str, or half of a surrogate pair is in it.
        """
        return self._encode(text, add_special_tokens=True)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **variables: object) -> list[int]:
        """Return the tokens of a conversation, up to where the model's answer begins.

        Args:
            messages: such as ``[{"role": "user", "content": "Hello"}]``.
            **variables: variables of the chat template, such as ``enable_thinking``.

        Raises:
            RequestError: if messages are not dictionaries, or there is none.
            ChatTemplateError: if there is no chat template, or it refuses the messages.
            MissingExtraError: if the library ``jinja2`` is not installed.
        """
        text = self._template.render(messages, **variables)
        return self._encode(text, add_special_tokens=False)  # which the template has written

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens, without special ones."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True)

    def detokenizer(self) -> Detokenizer:
        """Return a decoder of tokens that come one after another."""
        return Detokenizer(self._tokenizer)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if not isinstance(text, str):
            raise RequestError(f"a prompt must be text or token ids, got {text!r}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"the prompt is not text: {error}") from error
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
