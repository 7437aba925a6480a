"""Guided decoding: which tokens keep an output inside a grammar, by the library llguidance."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ...kvcache import Int32Array
from ..errors import RequestError
from ..models import MissingExtraError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from tokenizers import Tokenizer

_LOGGER = logging.getLogger(__name__)

_MAX_CHARS: Final = 1 << 20
_MIN_STACK_BYTES: Final = 16 << 20
_STACK_BYTES_PER_CHAR: Final = 1 << 10
"""Twice what the shortest chains of references need, so that no grammar overflows the stack."""


@dataclass(frozen=True)
class Guided:
    """What the text of an output must be; give one of the fields.

    Attributes:
        json: a JSON schema, as a dictionary or text; ``{"type": "object"}`` for any object.
        regex: a regular expression, which matches the whole text.
        choice: texts, of which the output is one.
        grammar: a grammar in llguidance's variant of Lark.

    Raises:
        RequestError: if not exactly one field is given, or it is of the wrong type.
    """

    json: Mapping[str, Any] | str | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("json", "regex", "choice", "grammar") if self._has(name)]
        if len(given) != 1:
            raise RequestError(
                "guided takes exactly one of json, regex, choice and grammar, got "
                f"{' and '.join(given) or 'none'}"
            )
        value, name = getattr(self, given[0]), given[0]
        if name == "json":
            is_right = isinstance(value, Mapping | str)
        elif name == "choice":
            is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
            is_right = is_list and value and all(isinstance(each, str) for each in value)
        else:
            is_right = isinstance(value, str)
        if not is_right:
            raise RequestError(f"guided {name} is of the wrong type: got {value!r}")

    def _has(self, name: str) -> bool:
        return getattr(self, name) is not None

    def compile(self) -> str:
        """Return the grammar of llguidance.

        Raises:
            RequestError: if a schema is not JSON, or a text is not Unicode.
        """
        try:
            return self._compile()
        except UnicodeEncodeError as error:
            raise RequestError(f"guided output is not Unicode text: {error}") from error

    def _compile(self) -> str:
        from llguidance import LLMatcher

        if self.json is not None:
            try:
                schema = json.loads(self.json) if isinstance(self.json, str) else dict(self.json)
                return LLMatcher.grammar_from_json_schema(json.dumps(schema))
            except (TypeError, ValueError, RecursionError) as error:
                raise RequestError(f"guided json is not a JSON schema: {error}") from error
        if self.regex is not None:
            return LLMatcher.grammar_from_regex(self.regex)
        if self.choice is not None:
            # JSON allows DEL in a string, the lexer of Lark does not.
            texts = [json.dumps(each, ensure_ascii=False) for each in self.choice]
            choices = " | ".join(each.replace("\x7f", "\\u007f") for each in texts)
            return LLMatcher.grammar_from_lark(f"start: {choices}")
        assert self.grammar is not None, "checked by the constructor"
        return LLMatcher.grammar_from_lark(self.grammar)


class TokenGuide:
    """Which token may come next in one output; see ``request.Guide``.

    Attributes:
        has_failed: whether the grammar was given up, such as one that became too large.
    """

    def __init__(self, matcher: LLMatcher, end_token_ids: Collection[int]) -> None:
        self._matcher = matcher
        self.has_failed = False
        self._end_token_ids = end_token_ids
        self._num_taken = 0
        self._has_ended = False

    def copy(self) -> TokenGuide:
        """Return a guide for another output of the same kind, at its beginning."""
        assert self._num_taken == 0, "an output has begun"
        return TokenGuide(self._matcher.deep_copy(), self._end_token_ids)

    def allow(self, output_tokens: Sequence[int], words: Int32Array) -> None:
        """Write the tokens that may follow an output; see ``Guide.allow``."""
        matcher = self._matcher
        words[:] = 0
        for token in output_tokens[self._num_taken :]:
            # The matcher takes no token after its end, of which a request may ask for more.
            if self._has_ended or not matcher.consume_token(token):
                break
            self._has_ended = token in self._end_token_ids
        self._num_taken = len(output_tokens)
        if not self._has_ended:
            if not matcher.is_error():
                mask = np.frombuffer(matcher.compute_bitmask(), np.int32)[: len(words)]
                words[: len(mask)] = mask
            if matcher.is_error() or not words.any():
                # Nothing can follow: end the output rather than leave the grammar.
                problem = matcher.get_error().split("\n")[0]
                _LOGGER.warning("a guided output ends early: %s", problem)
                self.has_failed = self._has_ended = True
        if self._has_ended:
            for token in self._end_token_ids:
                if token // 32 < len(words):
                    words.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)


class GuideMaker:
    """Makes the guides of one tokenizer, for the outputs that end with certain tokens."""

    def __init__(self, tokenizer: Tokenizer, end_token_ids: Collection[int]) -> None:
        """Read the vocabulary, which takes up to a second.

        Raises:
            MissingExtraError: if the library llguidance is not installed.
            RequestError: without tokens that end an output, as a guided one must.
        """
        # Checkpoints name some that the tokenizer does not have, such as -1.
        known = [
            each
            for each in end_token_ids
            if 0 <= each < 2**32 and tokenizer.id_to_token(each) is not None
        ]
        if not known:
            raise RequestError("guided output needs an end token, and the tokenizer has none")
        try:
            from llguidance import LLTokenizer
        except ImportError as error:
            raise MissingExtraError(Path("guided output"), "llguidance", "guided") from error
        self._end_token_ids = sorted(known)
        self._tokenizer: LLTokenizer = LLTokenizer(
            tokenizer.to_str(), eos_token=self._end_token_ids
        )

    def start(self, guided: Guided) -> Future[TokenGuide]:
        """Compile the guide of an output on a thread of its own, whose stack is large enough.

        One thread may call this at a time: the size of the next stack is that of the process.

        Raises:
            RequestError: for what is no grammar, or too long; the future has one for what
                llguidance refuses.
        """
        grammar = guided.compile()
        if len(grammar) > _MAX_CHARS:
            raise RequestError(
                f"guided output is refused: its grammar has {len(grammar)} characters, more than "
                f"{_MAX_CHARS}"
            )
        made: Future[TokenGuide] = Future()

        def make() -> None:
            try:
                made.set_result(self._make(grammar))
            except BaseException as error:
                made.set_exception(error)

        # A rule or definition that refers to the next, and so on, is a recursion of the library.
        before = threading.stack_size(_MIN_STACK_BYTES + len(grammar) * _STACK_BYTES_PER_CHAR)
        try:
            threading.Thread(target=make, name="radixkv-guide", daemon=True).start()
        finally:
            threading.stack_size(before)
        return made

    def _make(self, grammar: str) -> TokenGuide:
        from llguidance import LLMatcher

        if problem := LLMatcher.validate_grammar(grammar, self._tokenizer):
            raise RequestError(f"guided output is refused: {problem.strip()}")
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if not matcher.is_error():
            matcher.compute_bitmask()  # of the first token, at which some grammars fail
        if matcher.is_error():
            problem = matcher.get_error().split("\n<state>")[0]
            raise RequestError(f"guided output is refused: {problem.strip()}")
        return TokenGuide(matcher, self._end_token_ids)
