"""`TextTokenizer`: text to tokens and back, as a checkpoint says."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from ..errors import RequestError
from ..models import CheckpointFileError, load_tokenizer
from .chat_template import ChatTemplate
from .detokenizer import Detokenizer
from .guided import Guided, GuideMaker, TokenGuide


class TextTokenizer:
    """The tokenizer and the chat template of a checkpoint. Threads may share it."""

    _lock = threading.Lock()  # of all tokenizers, see `GuideMaker.start`

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
        self._guide_makers: dict[frozenset[int], GuideMaker] = {}

    @cached_property
    def max_token_chars(self) -> int:
        """Length of the longest token in characters: a text has at least ``1 / max_token_chars``
        tokens per character, unless its normalizer shortens it.
        """
        return max(map(len, self._tokenizer.get_vocab()), default=1)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the tokens of a prompt, with the special tokens that the tokenizer adds.

        Raises:
            RequestError: if text is not a str, or half of a surrogate pair is in it.
        """
        if not isinstance(text, str):
            raise RequestError(f"a prompt must be text or token ids, got {text!r}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"the prompt is not text: {error}") from error
        # A batch, because `encode` holds the GIL.
        [encoding] = self._tokenizer.encode_batch_fast(
            [text], add_special_tokens=add_special_tokens
        )
        return list(encoding.ids)

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
        text = self.render_chat(messages, **variables)
        return self.encode(text, add_special_tokens=False)  # which the template has written

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **variables: object) -> str:
        """Return the text of a conversation, of which `encode_chat` returns the tokens.

        Raises:
            RequestError, ChatTemplateError, MissingExtraError: see `encode_chat`.
        """
        return self._template.render(messages, **variables)

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens, without special ones."""
        [text] = self._tokenizer.decode_batch([list(tokens)], skip_special_tokens=True)
        return text

    def name(self, token: int) -> str:
        """Return the text of one token, also of a special one; not all are whole characters."""
        return self._tokenizer.decode([token], skip_special_tokens=False)

    def guide(self, guided: Guided, end_token_ids: Collection[int]) -> TokenGuide:
        """Return which tokens may follow, from the begin of a guided output.

        The first call for the same end tokens reads the vocabulary, in up to a second.

        Args:
            guided: what the text must be.
            end_token_ids: tokens that end the output, once the text may end.

        Raises:
            RequestError: for a grammar that cannot be compiled, or without end tokens.
            MissingExtraError: if the library ``llguidance`` is not installed.
        """
        ends = frozenset(end_token_ids)
        with self._lock:
            if ends not in self._guide_makers:
                self._guide_makers[ends] = GuideMaker(self._tokenizer, ends)
            made = self._guide_makers[ends].start(guided)
        return made.result()

    def detokenizer(self) -> Detokenizer:
        """Return a decoder of tokens that come one after another."""
        return Detokenizer(self._tokenizer)
