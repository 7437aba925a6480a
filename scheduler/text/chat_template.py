"""Chat templates: the text of a conversation, as the model was trained on it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import RequestError
from ..models.errors import CheckpointFileError, MissingExtraError
from ..models.json_fields import read_object
from .errors import ChatTemplateError

if TYPE_CHECKING:
    from jinja2 import Template
    from jinja2.nodes import Node
    from jinja2.parser import Parser

_TEMPLATE_FILE = "chat_template.jinja"
_CONFIG_FILE = "tokenizer_config.json"


class ChatTemplate:
    """The chat template of a checkpoint, with the special tokens that it may use.

    Templates are programs from the checkpoint. They run in Jinja's sandbox, which keeps them from
    Python's internals and from changing what they are given.
    """

    def __init__(self, directory: Path) -> None:
        """Read ``chat_template.jinja``, or ``chat_template`` in tokenizer_config.json.

        A checkpoint may have neither; then only `render` fails.

        Raises:
            CheckpointFileError: if a file cannot be read.
        """
        config_path, self._path = directory / _CONFIG_FILE, directory / _TEMPLATE_FILE
        config = read_object(config_path) if config_path.exists() else {}
        if self._path.exists():
            self._source: str | None = _read(self._path)
        else:
            self._path = config_path
            self._source = _default_template(config.get("chat_template"))
        self._special_tokens = _special_tokens(config)

    @cached_property
    def _template(self) -> Template:
        if self._source is None:
            raise ChatTemplateError(self._path, f"no chat template, here or in {_TEMPLATE_FILE}")
        return _compile(self._source, self._path)

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: object) -> str:
        """Return the text of a conversation, up to where the model's answer begins.

        Args:
            messages: each with a role and its content, as the template knows them.
            **variables: more variables of the template, such as ``enable_thinking``.

        Raises:
            RequestError: if messages are not dictionaries, or there is none.
            ChatTemplateError: if there is no template, or it refuses them.
            MissingExtraError: if the library ``jinja2`` is not installed.
        """
        template = self._template
        is_list = isinstance(messages, Sequence) and not isinstance(messages, str)
        if not (is_list and messages and all(isinstance(each, Mapping) for each in messages)):
            raise RequestError(f"messages must be dictionaries with role and content: {messages!r}")
        # As in transformers, where a template may ask whether they are none.
        absent = {"tools": None, "documents": None}
        names = {"add_generation_prompt": True, **absent, **self._special_tokens, **variables}
        try:
            return template.render(messages=messages, **names)
        except Exception as error:  # whatever the template does with messages of another form
            raise ChatTemplateError(
                self._path, f"the chat template failed: {type(error).__name__}: {error}"
            ) from error


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointFileError(path, f"cannot be read: {error}") from error


def _default_template(entry: object) -> str | None:
    """Return the only template, or the one named "default" of several."""
    if isinstance(entry, list):
        named = [each for each in entry if isinstance(each, dict) and each.get("name") == "default"]
        entry = named[-1].get("template") if named else None
    return entry if isinstance(entry, str) else None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens by their names; a token may be an object with its content."""
    tokens = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            tokens[name] = content
    return tokens


def _compile(source: str, path: Path) -> Template:
    try:
        from jinja2 import TemplateError
        from jinja2.ext import Extension
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise MissingExtraError(path, "jinja2", "text") from None

    class Generation(Extension):
        """``{% generation %}`` around what the model wrote, a mark for training without text."""

        tags = {"generation"}  # noqa: RUF012  its type in the base

        def parse(self, parser: Parser) -> list[Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    # The environment, tag, filter and functions that transformers gives to templates.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: object, **options: Any) -> str:
        return json.dumps(value, **{"ensure_ascii": False, **options})

    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise ChatTemplateError(path, f"not a chat template: {error}") from error
