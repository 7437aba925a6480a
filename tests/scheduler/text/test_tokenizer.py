"""Tokenizers and chat templates of checkpoints, and names of models."""

from __future__ import annotations

import builtins
import json
import re
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from tokenizers.processors import TemplateProcessing

from radixkv.scheduler import ConfigError, RequestError
from radixkv.scheduler.models import CheckpointFileError, MissingExtraError
from radixkv.scheduler.text import (
    ChatTemplateError,
    Guided,
    ModelNotFoundError,
    TextTokenizer,
    locate_model,
)
from radixkv.scheduler.text import tokenizer as tokenizer_module

from ...tokenizers import CHAT_TEMPLATE, add_tokenizer, byte_level

MESSAGES = [
    {"role": "system", "content": "the cache"},
    {"role": "user", "content": 'naïve "façade"'},
]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    add_tokenizer(tmp_path)
    return tmp_path


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make a library impossible to import."""
    original = builtins.__import__

    def hide(library: str) -> None:
        def find(name: str, *args: Any, **kwargs: Any) -> Any:
            if name.split(".")[0] == library:
                raise ImportError(name)
            return original(name, *args, **kwargs)

        monkeypatch.setattr(builtins, "__import__", find)

    return hide


def test_text_and_tokens(directory):
    tokenizer = TextTokenizer(directory)
    tokens = tokenizer.encode("the cache, naïve 🙂")
    assert tokenizer.decode([0, *tokens, 1]) == "the cache, naïve 🙂"
    detokenizer = tokenizer.detokenizer()
    detokenizer.push(tokens)
    assert detokenizer.text == "the cache, naïve 🙂"


def test_no_prompt_is_truncated_or_padded(tmp_path):
    tokenizer = byte_level()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    add_tokenizer(tmp_path, tokenizer)
    tokens = TextTokenizer(tmp_path).encode("the cache holds the keys")
    assert tokens == byte_level().encode("the cache holds the keys").ids
    assert 4 < len(tokens) < 64


@pytest.mark.parametrize("is_special", [False, True])
def test_the_longest_token_may_be_an_added_one(tmp_path, is_special):
    tokenizer, longest = byte_level(), "<" + "long" * 20 + ">"
    add = tokenizer.add_special_tokens if is_special else tokenizer.add_tokens
    add([longest])
    add_tokenizer(tmp_path, tokenizer)
    found = TextTokenizer(tmp_path)
    assert found.max_token_chars == len(longest)
    assert len(found.encode(10 * longest)) == 10


def test_a_chat_is_what_the_template_says(directory):
    tokenizer = TextTokenizer(directory)
    expected = '<s><|system|>the cache</s><|user|>naïve "façade"</s><|assistant|>'
    encode = byte_level().encode
    assert tokenizer.encode_chat(MESSAGES) == encode(expected, add_special_tokens=False).ids
    assert tokenizer.encode_chat(MESSAGES, shout=True) == encode(f"{expected}!").ids
    assert tokenizer.encode_chat(MESSAGES, add_generation_prompt=False) == (
        encode(expected.removesuffix("<|assistant|>")).ids
    )


def test_only_a_text_gets_the_special_tokens_of_the_tokenizer(tmp_path):
    """Those of a chat are in its template."""
    tokenizer = byte_level()
    begin = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    add_tokenizer(tmp_path, tokenizer, chat_template="{{ messages[0].content }}")
    found = TextTokenizer(tmp_path)
    tokens = byte_level().encode("the cache").ids
    assert found.encode("the cache") == [begin, *tokens]
    assert found.encode_chat([{"role": "user", "content": "the cache"}]) == tokens


def rendered(directory: Path, template: object, **config: Any) -> str:
    add_tokenizer(directory, chat_template=template, **config)
    tokenizer = TextTokenizer(directory)
    return tokenizer._template.render([{"role": "user", "content": "é"}])


@pytest.mark.parametrize("ascii", [None, False, True])
@pytest.mark.parametrize(
    "more", [{}, {"indent": 1}, {"separators": [",", ":"]}, {"sort_keys": True}]
)
def test_tojson_has_the_options_of_transformers(tmp_path, ascii, more):
    options = more if ascii is None else {"ensure_ascii": ascii, **more}
    given = ", ".join(f"{name}={value}" for name, value in options.items())
    expected = json.dumps([{"role": "user", "content": "é"}], **{"ensure_ascii": False, **options})
    assert rendered(tmp_path, f"{{{{ messages | tojson({given}) }}}}") == expected


@pytest.mark.parametrize(
    "name", ["tools", "documents", "add_generation_prompt", "eos_token", "enable_thinking"]
)
def test_a_variable_of_the_caller_is_that_of_the_template(tmp_path, name):
    add_tokenizer(tmp_path, chat_template=f"{{{{ {name} }}}}")
    template = TextTokenizer(tmp_path)._template
    assert template.render([{"role": "user", "content": "é"}], **{name: "mine"}) == "mine"


def test_templates_have_what_those_of_transformers_have(tmp_path):
    loop = "{% for m in 'abc' %}{% if m == 'b' %}{% break %}{% endif %}{{ m }}{% endfor %}"
    assert rendered(tmp_path, loop) == "a"
    assert re.fullmatch(r"20\d\d", rendered(tmp_path, "{{ strftime_now('%Y') }}"))
    assert rendered(tmp_path, "{{ eos_token }}{{ pad_token }}") == "</s>"
    marked = (
        "{% for m in messages %}{% generation %}{{ m.content }}!{% endgeneration %}{% endfor %}"
    )
    assert rendered(tmp_path, marked) == "é!"
    for absent in ("tools", "documents"):
        template = f"{{{{ {absent} is defined }}}}{{% if {absent} is not none %}}!{{% endif %}}"
        assert rendered(tmp_path, template) == "True"
    several: list[Any] = [
        {"name": "tool_use", "template": "no"},
        {"name": "default", "template": "yes"},
    ]
    several += ["no", {"name": ["default"], "template": "no"}, {"template": "no"}]
    assert rendered(tmp_path, several) == "yes"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% if true %}\nyes\n{% endif %}\nend", "yes\nend"),  # a line of its own is no line
        ("  {% if true %}\n  yes\n\t{% endif %}\n  end\n", "  yes\n  end"),
        ("  {# a comment #}\nend", "end"),
        ("a {% if true %} b {% endif %} c", "a  b  c"),  # in the middle of a line, all stays
        ("  {{ 1 }}\n  {{ 2 }}", "  1\n  2"),
        ("  {%- if true %}  yes  {%- endif %}  end", "  yes  end"),
    ],
)
def test_white_space_around_blocks_is_what_transformers_leaves(tmp_path, template, text):
    """Checkpoints indent their templates, and one space more makes other tokens."""
    assert rendered(tmp_path, template) == text


def test_variables_of_a_request_go_before_special_tokens(tmp_path):
    add_tokenizer(tmp_path, chat_template="{{ bos_token }}{{ eos_token }}")
    template = TextTokenizer(tmp_path)._template
    messages = [{"role": "user", "content": "a"}]
    assert template.render(messages) == "<s></s>"
    assert template.render(messages, eos_token="!") == "<s>!"


def test_the_last_default_of_several_templates_is_taken(tmp_path):
    """As in transformers, which makes a dictionary of them."""
    names = ("default", "tool_use", "default", "rag")
    templates = [{"name": name, "template": str(place)} for place, name in enumerate(names)]
    add_tokenizer(tmp_path, chat_template=templates)
    assert TextTokenizer(tmp_path).render_chat(MESSAGES) == "2"


def test_a_template_of_its_own_file_goes_first(directory):
    (directory / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    assert TextTokenizer(directory)._template.render(MESSAGES) == "<s>the cache"


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (None, "no chat template, here or in chat_template.jinja"),
        ([{"name": "tool_use", "template": "x"}], "no chat template, here or in"),
        ("{% for %}", "not a chat template: "),
        ("{{ raise_exception('no user') }}", "the chat template failed: TemplateError: no user"),
        ("{{ messages.nothing.more }}", "the chat template failed: UndefinedError: "),
        ("{{ messages.append(1) }}", "the chat template failed: SecurityError: "),
        ("{{ ''.__class__.__mro__ }}", "the chat template failed: SecurityError: "),
        ("{{ 1 / 0 }}", "the chat template failed: ZeroDivisionError: division by zero"),
    ],
)
def test_templates_that_fail(tmp_path, template, problem):
    add_tokenizer(tmp_path, chat_template=template)
    tokenizer = TextTokenizer(tmp_path)
    path = re.escape(str(tmp_path / "tokenizer_config.json"))
    with pytest.raises(ChatTemplateError, match=f"^{path}: {re.escape(problem)}"):
        tokenizer.encode_chat(MESSAGES)


def test_the_files_are_read_once(directory):
    tokenizer = TextTokenizer(directory)
    for path in directory.iterdir():
        path.unlink()
    assert tokenizer.encode_chat(MESSAGES)


def test_a_role_that_the_template_does_not_know(directory):
    with pytest.raises(ChatTemplateError, match=r"unknown role tool$"):
        TextTokenizer(directory).encode_chat([{"role": "tool", "content": "x"}])


@pytest.mark.parametrize("messages", [[], "text", ["text"], {"role": "user"}, None])
def test_messages_that_are_none(directory, messages):
    text = f"^messages must be dictionaries with role and content: {re.escape(repr(messages))}$"
    with pytest.raises(RequestError, match=text):
        TextTokenizer(directory).encode_chat(messages)


def test_the_vocabulary_is_read_once_for_the_same_end_tokens(directory, monkeypatch):
    made: list[Any] = []

    class Maker:
        def __init__(self, tokenizer: Any, ends: Any) -> None:
            made.append(ends)
            self.ends = ends

        def start(self, guided: Guided) -> Any:
            guide: Any = Future()
            guide.set_result((self.ends, guided))
            return guide

    monkeypatch.setattr(tokenizer_module, "GuideMaker", Maker)
    tokenizer = TextTokenizer(directory)
    for regex, ends in (("a", [1, 2]), ("b", {3}), ("c", (2, 1)), ("d", [3])):
        guided = Guided(regex=regex)
        guide: Any = tokenizer.guide(guided, ends)
        assert guide == (frozenset(ends), guided)
    assert made == [{1, 2}, {3}]


def test_prompts_that_are_no_text(directory):
    tokenizer = TextTokenizer(directory)
    with pytest.raises(RequestError, match=r"^a prompt must be text or token ids, got 1\.5$"):
        tokenizer.encode(1.5)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"^the prompt is not text: 'utf-8' codec can't encode"):
        tokenizer.encode("\ud83d")


def test_files_that_are_missing_or_broken(tmp_path):
    place = re.escape(str(tmp_path))
    with pytest.raises(CheckpointFileError, match=f"^{place}: no tokenizer.json$"):
        TextTokenizer(tmp_path)
    byte_level().save(str(tmp_path / "tokenizer.json"))
    tokenizer = TextTokenizer(tmp_path)
    assert tokenizer.encode("the")
    with pytest.raises(ChatTemplateError, match=r"tokenizer_config\.json: no chat template"):
        tokenizer.encode_chat(MESSAGES)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointFileError, match=r"chat_template\.jinja: cannot be read: 'utf-8'"):
        TextTokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointFileError, match=r"tokenizer_config\.json: "):
        TextTokenizer(tmp_path)


def test_libraries_that_are_not_installed(directory, without):
    tokenizer = TextTokenizer(directory)
    without("jinja2")
    with pytest.raises(MissingExtraError, match=r"'jinja2': pip install 'radixkv\[text\]'$"):
        tokenizer.encode_chat(MESSAGES)
    without("huggingface_hub")
    text = r"^some/model: reading it needs the library 'huggingface_hub': pip install"
    with pytest.raises(MissingExtraError, match=text):
        locate_model("some/model")


# Names


def test_a_directory_goes_before_a_name_on_the_hub(tmp_path, monkeypatch):
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert locate_model("owner/name") == Path("owner/name")
    assert locate_model(tmp_path / "owner" / "name") == tmp_path / "owner" / "name"
    with pytest.raises(ConfigError, match=r"^revision 'main' is for the hub, but owner/name is a"):
        locate_model("owner/name", "main")


@pytest.mark.parametrize(
    "model", ["/no/such/model", "./model", "a/b/c", "~/model", "", Path("a/b")]
)
def test_what_is_no_name(model):
    text = f"^{re.escape(str(model))}: no such directory, and not the name of a hub repository$"
    with pytest.raises(ModelNotFoundError, match=text):
        locate_model(model)


def test_a_name_is_downloaded(tmp_path, monkeypatch):
    calls = []

    def download(name: str, **options: Any) -> str:
        calls.append((name, options.pop("revision"), options.pop("allow_patterns")))
        assert options == {}
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert locate_model("owner/name", "v1") == tmp_path
    [(name, revision, patterns)] = calls
    assert (name, revision) == ("owner/name", "v1")
    configs = {"config.json", "generation_config.json", "tokenizer_config.json"}
    texts = {"tokenizer.json", "chat_template.jinja"}
    weights = {"model*.safetensors", "model.safetensors.index.json"}
    assert set(patterns) == configs | texts | weights


@pytest.mark.parametrize("offline", ["0", "1"])
def test_a_name_without_a_network(tmp_path, offline):
    program = (
        "from radixkv.scheduler.text import locate_model, ModelNotFoundError\n"
        "try:\n    locate_model('owner/name')\n"
        "except ModelNotFoundError as error:\n    print(error)\n"
    )
    environment = {
        "HF_ENDPOINT": "http://127.0.0.1:9",  # the discard port: nobody listens
        "HF_HUB_OFFLINE": offline,
        "HF_HOME": str(tmp_path),
        "PATH": "",
    }
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("owner/name: no such directory, and not found on the hub: ")
    assert len(done.stdout.splitlines()) == 1


def test_the_template_of_these_tests_is_the_one_in_the_file(directory):
    entries = json.loads((directory / "tokenizer_config.json").read_text())
    assert entries["chat_template"] == CHAT_TEMPLATE
