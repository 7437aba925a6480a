"""`radixkv generate` on a tiny checkpoint."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from radixkv.kvcache import CacheManager
from radixkv.scheduler import MixedScheduler, Request, request
from radixkv.scheduler.cli import generate
from radixkv.scheduler.cli.options import generate as generate_options
from radixkv.scheduler.cli.shared.completions import Completions
from radixkv.scheduler.errors import NodesMissingError
from radixkv.scheduler.models import load_config, make_tiny_checkpoint
from radixkv.scheduler.text import TextTokenizer

from ...tokenizers import add_tokenizer
from .generating import without_compiling

PROMPTS = [[1, 2, 3, 4, 5], [7] * 20, [1, 2, 3, 4, 5, 6]]

SMALL = ("--max-new-tokens", 4, "--token-budget", 3, "--device-blocks", 24)
"""A small budget has few shapes to compile, and bounds what runs at once: so also with several
samples of each prompt the programs are the same, and each is compiled once."""


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return _write(tmp_path, PROMPTS)


def _write(directory: Path, prompts: Sequence[object]) -> Path:
    path = directory / "prompts.json"
    path.write_text(json.dumps(prompts))
    return path


def test_json_has_the_outputs_in_order(radixkv: Any, model_dir: Path, prompts: Path) -> None:
    arguments = ["generate", model_dir, "--prompts", prompts]
    outcome = radixkv(*arguments, *SMALL, "--ignore-eos", "--json", "-")
    assert (outcome.status, without_compiling(outcome.stderr)) == (0, "")
    results = json.loads(outcome.stdout)
    assert set(results) == {"outputs", "stats"}
    assert [len(output) for output in results["outputs"]] == [4, 4, 4]
    stats = results["stats"]
    assert (stats["dtype"], stats["attention_backend"]) == ("float32", "xla")
    assert stats["attention_reason"].startswith("mosaic needs an NVIDIA GPU")
    assert stats["num_devices"] == 1


@pytest.mark.slow
def test_tensor_parallelism(radixkv: Any, model_dir: Path, prompts: Path) -> None:
    """Several devices are in the tests of the engine; here is what the option does."""
    arguments = ["generate", model_dir, "--prompts", prompts, *SMALL, "--json", "-"]
    one = json.loads(radixkv(*arguments).stdout)["outputs"]
    assert json.loads(radixkv(*arguments, "--tp", 1).stdout)["outputs"] == one


def test_more_devices_than_there_are(radixkv: Any, model_dir: Path, prompts: Path) -> None:
    outcome = radixkv("generate", model_dir, "--prompts", prompts, *SMALL, "--tp", 2)
    message = "a mesh of 2 devices needs as many in this process, got devices 1"
    assert (outcome.status, outcome.stderr) == (2, f"radixkv: {message}\n")


@pytest.mark.slow
def test_sizes_do_not_change_the_outputs(radixkv: Any, model_dir: Path, prompts: Path) -> None:
    arguments = ["generate", model_dir, "--prompts", prompts, "--max-new-tokens", 6, "--json", "-"]
    outputs = json.loads(radixkv(*arguments).stdout)["outputs"]
    tight = ["--block-size", 4, "--device-blocks", 7, "--token-budget", 5, "--no-prefix-cache"]
    assert json.loads(radixkv(*arguments, *tight).stdout)["outputs"] == outputs


def test_text_has_one_line_per_prompt(radixkv: Any, model_dir: Path, prompts: Path) -> None:
    outcome = radixkv("generate", model_dir, "--prompts", prompts, *SMALL)
    assert outcome.status == 0
    lines = outcome.stdout.splitlines()
    assert all(1 <= len(json.loads(line)) <= 4 for line in lines[:3])
    assert lines[3] == ""
    for name in ("dtype ", "attention_backend ", "attention_reason ", "cache.hit_blocks "):
        assert any(line.startswith(name) for line in lines[4:])


def test_eos_stops_unless_ignored(
    radixkv: Any, model_dir: Path, prompts: Path, tmp_path: Path
) -> None:
    arguments = ["--prompts", prompts, *SMALL, "--json", "-"]

    def outputs(directory: Path, *options: str) -> list[list[int]]:
        return json.loads(radixkv("generate", directory, *arguments, *options).stdout)["outputs"]

    expected = outputs(model_dir, "--ignore-eos")
    whole = expected[0]
    # The same weights with the second token of the output declared the end.
    end = whole[1]
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in model_dir.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))

    assert outputs(copy)[0] == whole[: whole.index(end) + 1]
    assert outputs(copy, "--ignore-eos") == expected


def test_an_id_outside_the_vocabulary_is_refused(
    radixkv: Any, model_dir: Path, tmp_path: Path
) -> None:
    vocab_size = load_config(model_dir).vocab_size
    path = _write(tmp_path, [[1], [2, vocab_size]])
    outcome = radixkv("generate", model_dir, "--prompts", path, "--max-new-tokens", 1)
    assert outcome.status == 2
    assert outcome.stderr == (
        f"radixkv: {path}: prompt 1: token 1 must be in the vocabulary, 0 to {vocab_size - 1}, "
        f"got {vocab_size}\n"
    )


def test_a_string_without_a_tokenizer_is_refused(
    radixkv: Any, model_dir: Path, tmp_path: Path
) -> None:
    path = _write(tmp_path, ["hello"])
    outcome = radixkv("generate", model_dir, "--prompts", path, "--max-new-tokens", 1)
    assert outcome.status == 2
    assert outcome.stderr == (
        "radixkv: expected prompts as lists of token ids, got a string, but "
        f"{model_dir} has no tokenizer.json\n"
    )


def test_a_string_is_encoded_by_the_checkpoints_tokenizer(
    radixkv: Any, model_dir: Path, tmp_path: Path
) -> None:
    vocab = {"one": 1, "two": 2, "[UNK]": 0}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in model_dir.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    tokenizer.save(str(copy / "tokenizer.json"))

    path = _write(tmp_path, ["two one two", [2, 1, 2], PROMPTS[1]])
    outcome = radixkv("generate", copy, "--prompts", path, *SMALL, "--json", "-")
    text, ids, _ = json.loads(outcome.stdout)["outputs"]
    assert text == ids


def test_a_prompt_that_cannot_fit_is_refused(radixkv: Any, model_dir: Path, prompts: Path) -> None:
    outcome = radixkv(
        *("generate", model_dir, "--prompts", prompts, "--max-new-tokens", 6),
        *("--block-size", 4, "--device-blocks", 6),
    )
    assert outcome.status == 2
    assert outcome.stderr == (
        "radixkv: prompt 1: 20 prompt tokens and 6 new tokens need 7 blocks of 4 tokens, but the "
        "cache has 6\n"
    )


def test_more_tokens_than_positions_are_refused(
    radixkv: Any, model_dir: Path, prompts: Path
) -> None:
    positions = load_config(model_dir).max_positions
    outcome = radixkv("generate", model_dir, "--prompts", prompts, "--max-new-tokens", positions)
    assert outcome.status == 2
    assert outcome.stderr == (
        f"radixkv: prompt 0: 5 prompt tokens and {positions} new tokens exceed the {positions} "
        "positions of the model\n"
    )


def test_a_directory_without_a_model_is_refused(
    radixkv: Any, tmp_path: Path, prompts: Path
) -> None:
    outcome = radixkv("generate", tmp_path, "--prompts", prompts, "--max-new-tokens", 1)
    assert outcome.status == 2
    assert outcome.stderr == f"radixkv: {tmp_path / 'config.json'}: no such file\n"


def test_a_name_on_the_hub(
    radixkv: Any, model_dir: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    located: list[tuple[str, str | None]] = []

    def locate(model: str, revision: str | None) -> Path:
        located.append((model, revision))
        return model_dir

    rest = ["--prompts", prompts, *SMALL, "--json", "-"]
    by_directory = json.loads(radixkv("generate", model_dir, *rest).stdout)
    monkeypatch.setattr(generate, "locate_model", locate)
    by_name = json.loads(radixkv("generate", "owner/name", "--revision", "v1", *rest).stdout)
    assert by_name["outputs"] == by_directory["outputs"]
    assert located == [("owner/name", "v1")]


def test_a_missing_directory_is_refused(radixkv: Any, prompts: Path) -> None:
    outcome = radixkv("generate", "./none", "--prompts", prompts, *SMALL)
    text = "radixkv: ./none: no such directory, and not the name of a hub repository\n"
    assert (outcome.status, outcome.stderr) == (2, text)


def test_a_missing_prompts_file_is_refused(radixkv: Any, model_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "none.json"
    outcome = radixkv("generate", model_dir, "--prompts", path, "--max-new-tokens", 1)
    assert outcome.status == 2
    assert outcome.stderr == f"radixkv: {path}: No such file or directory\n"


def test_sampling_options_are_those_of_the_engine(
    radixkv: Any, model_dir: Path, prompts: Path
) -> None:
    arguments = ["generate", model_dir, "--prompts", prompts, *SMALL, "--json", "-"]
    drawn = ["--temperature", 1.5, "--top-k", 50, "--top-p", 0.9, "--min-p", 0.01, "--seed", 3]
    penalised = ["--repetition-penalty", 0.01, "--presence-penalty", -1, "--frequency-penalty", 0]
    runs = [[], drawn, [*drawn, "--seed", 4], [*penalised, "--min-tokens", 4]]
    outputs = [json.loads(radixkv(*arguments, *run).stdout)["outputs"] for run in runs]
    assert len({str(each) for each in outputs}) == 4
    assert [len(output) for output in outputs[3]] == [4, 4, 4]
    outcome = radixkv(*arguments, "--min-p", 2)
    assert outcome.status == 2
    assert outcome.stderr.endswith("min_p must be at least 0 and at most 1, got 2.0\n")


def test_samples_have_the_seeds_that_follow(radixkv: Any, model_dir: Path, prompts: Path) -> None:
    arguments = ["generate", model_dir, "--prompts", prompts, *SMALL, "--json", "-"]
    arguments += ["--temperature", 1.5, "--ignore-eos"]
    outcome = radixkv(*arguments, "--n", 3, "--seed", 5)
    samples = json.loads(outcome.stdout)["outputs"]
    for index in range(3):
        alone = json.loads(radixkv(*arguments, "--seed", 5 + index).stdout)["outputs"]
        assert [each[index] for each in samples] == alone


def test_log_probabilities_are_those_of_the_engine(
    radixkv: Any, model_dir: Path, prompts: Path
) -> None:
    arguments = ["generate", model_dir, "--prompts", prompts, *SMALL, "--ignore-eos", "--json", "-"]
    outcome = radixkv(*arguments, "--n", 2, "--logprobs", 2, "--prompt-logprobs", 0)
    results = json.loads(outcome.stdout)
    for samples, records in zip(results["outputs"], results["logprobs"], strict=True):
        for tokens, each in zip(samples, records, strict=True):
            assert [record["token_id"] for record in each] == tokens
            assert all(record["rank"] == 1 and len(record["top"]) == 2 for record in each)
    given = json.loads(prompts.read_text())
    for prompt, found in zip(given, results["prompt_logprobs"], strict=True):
        assert found[0] is None
        assert [record["token_id"] for record in found[1:]] == prompt[1:]
    plain = json.loads(radixkv(*arguments).stdout)
    assert plain.keys() == {"outputs", "stats"}
    assert [samples[0] for samples in results["outputs"]] == plain["outputs"]


def test_a_stop_token_ends_a_completion(radixkv: Any, model_dir: Path, prompts: Path) -> None:
    arguments = ["generate", model_dir, "--prompts", prompts, *SMALL, "--ignore-eos", "--json", "-"]
    outputs = json.loads(radixkv(*arguments).stdout)["outputs"]
    stop = [outputs[0][1], outputs[1][0]]
    stopped = json.loads(radixkv(*arguments, "--stop-token-ids", *stop).stdout)["outputs"]
    for tokens, short in zip(outputs, stopped, strict=True):
        places = [place for place, token in enumerate(tokens) if token in stop]
        assert short == tokens[: min(places, default=len(tokens)) + 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--n", 0], "argument --n: expected an integer from 1 to 2147483647, got '0'"),
        (
            ["--logprobs", 21],
            "argument --logprobs: expected an integer from 0 to 20, got '21'",
        ),
        (
            ["--prompt-logprobs", -1],
            "argument --prompt-logprobs: expected an integer from 0 to 20, got '-1'",
        ),
        (
            ["--stop-token-ids", 3, -1],
            "argument --stop-token-ids: expected an integer from 0 to 2147483647, got '-1'",
        ),
        (["--logprobs", 1], "--logprobs needs --json"),
        (
            ["--json", "-", "--disaggregate", "--prompt-logprobs", 1],
            "--prompt-logprobs cannot be combined with --disaggregate: nodes send none of prompts",
        ),
        (
            ["--disaggregate", "--regex", "a"],
            "--regex cannot be combined with --disaggregate: nodes do not guide outputs",
        ),
        (["--choice", "a", "--grammar", "b"], "--grammar cannot be combined with --choice"),
        (["--json-schema", "{}", "--regex", ""], "--regex cannot be combined with --json-schema"),
        (["--stop", "a", ""], "stop must be strings that are not empty, got ['a', '']"),
        (["--min-tokens", 2], "min_tokens must be at most max_tokens 1, got 2"),
    ],
)
def test_bad_values_are_refused_by_name_and_number(
    radixkv: Any, model_dir: Path, prompts: Path, options: list[object], message: str
) -> None:
    outcome = radixkv("generate", model_dir, "--prompts", prompts, "--max-new-tokens=1", *options)
    assert outcome.status == 2
    see = " (see `radixkv generate --help`)" if message.startswith("argument") else ""
    assert outcome.stderr == f"radixkv: {message}{see}\n"


@pytest.fixture(scope="session")
def text_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a tokenizer, which no test changes."""
    directory = tmp_path_factory.mktemp("text_model")
    make_tiny_checkpoint(directory, "qwen3", overrides={"vocab_size": 350})  # 340 have text
    add_tokenizer(directory)
    return directory


TEXTS = ["the cache holds", "a prefix", "the values of the tokens"]


@pytest.fixture
def of_texts(text_model_dir: Path, tmp_path: Path) -> list[object]:
    """The arguments that complete texts."""
    path, sizes = _write(tmp_path, TEXTS), ["--token-budget", 3, "--device-blocks", 24]
    arguments = ["generate", text_model_dir, "--prompts", path, "--max-new-tokens", 24]
    return [*arguments, *sizes, "--block-size", 4]


@pytest.mark.parametrize(
    "apart",
    [
        pytest.param([], id="one engine"),
        pytest.param(["--disaggregate", "--transport", "inprocess"], id="in process"),
        pytest.param(["--disaggregate"], id="processes", marks=pytest.mark.slow),
    ],
)
def test_texts_end_before_a_stop_string(
    radixkv: Any, of_texts: list[object], text_model_dir: Path, apart: list[str]
) -> None:
    """With one engine as on nodes: those of whole texts, cut, and the tokens that have them."""
    drawn = ["--temperature", 1.5, "--seed", 3, "--n", 2, "--ignore-eos", "--logprobs", 1]
    tokenizer = TextTokenizer(text_model_dir)
    whole = json.loads(radixkv(*of_texts, *drawn, "--json", "-").stdout)
    assert "texts" not in whole
    outputs = [tokens for samples in whole["outputs"] for tokens in samples]
    texts = [tokenizer.decode(tokens) for tokens in outputs]
    stop = [texts[0][3:5], texts[4][-2:], "no text has this"]
    outcome = radixkv(*of_texts, *drawn, *apart, "--stop", *stop, "--json", "-")
    assert outcome.status == 0, outcome.stderr
    results = json.loads(outcome.stdout)
    cut = [text for samples in results["texts"] for text in samples]
    short = [tokens for samples in results["outputs"] for tokens in samples]
    ends = [min([text.find(each) for each in stop if each in text], default=None) for text in texts]
    assert cut == [text[:end] for text, end in zip(texts, ends, strict=True)]
    assert sum(end is not None for end in ends) >= 2
    for tokens, kept, end in zip(outputs, short, ends, strict=True):
        assert kept == tokens[: len(kept)]
        if end is None:
            assert kept == tokens
        else:  # the last token has the end of the string
            found = [any(each in tokenizer.decode(kept[:n]) for each in stop) for n in (-1, None)]
            assert found == [False, True]
    for whole_records, records, tokens in zip(
        *([each for samples in part["logprobs"] for each in samples] for part in (whole, results)),
        short,
        strict=True,
    ):
        assert [record["token_id"] for record in records] == tokens
        for record, expected in zip(records, whole_records, strict=False):
            assert record["logprob"] == pytest.approx(expected["logprob"], abs=1e-3)
            assert len(record["top"]) == 1


class Scripted:
    """An engine whose outputs are given, and whose nodes are gone after a number of steps."""

    def __init__(self, outputs: Sequence[Sequence[int]], num_steps: int) -> None:
        self.scheduler = MixedScheduler(CacheManager(64, 4), token_budget=256, max_running=8)
        self.advanced: Sequence[Request] = ()
        self.abort = self.scheduler.abort
        self._outputs = outputs
        self._num_steps = num_steps

    def step(self) -> list[Request]:
        if self._num_steps == 0:
            raise NodesMissingError("all are gone")
        self._num_steps -= 1
        plan = self.scheduler.schedule()
        self.advanced = [chunk.request for chunk in plan.chunks]
        tokens = [
            self._outputs[int(each.request_id)][len(each.output_tokens)] for each in self.advanced
        ]
        return self.scheduler.update(plan, tokens)


def test_what_has_ended_at_a_stop_string_is_written_when_nodes_fail(
    radixkv: Any, of_texts: list[object], text_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After any number of steps, and the same as without the failure."""
    encode = TextTokenizer(text_model_dir).encode
    scripts = [encode(text * 24)[:24] for text in ("the ! cache ", "a prefix of values! ", "a ")]
    num_steps = 99

    def complete(
        arguments: object, requests: Completions, sizes: object, *, group: object
    ) -> dict[str, Any]:
        engine = Scripted(scripts, num_steps)
        for each in requests:
            engine.scheduler.add(each)
        while engine.scheduler.has_work:
            requests.step(engine)
        return {}

    monkeypatch.setattr(generate, "complete_with_engine", complete)
    line = [*of_texts, "--stop", "!", "--ignore-eos", "--json", "-"]
    whole = json.loads(radixkv(*line).stdout)
    lengths = [len(tokens) for tokens in whole["outputs"]]
    assert 1 < lengths[0] < lengths[1] < lengths[2] == 24
    for num_steps in sorted({0, *lengths, *(length - 1 for length in lengths)}):
        failed = [str(place) for place, length in enumerate(lengths) if length > num_steps]
        outcome = radixkv(*line)
        reasons = "".join(f"radixkv: prompt {name}: all are gone\n" for name in failed)
        if not failed:
            assert (outcome.status, outcome.stderr) == (0, "")
            continue
        if len(failed) == len(lengths):
            assert outcome == (1, "", "radixkv: all are gone\n")
            continue
        assert (outcome.status, outcome.stderr) == (1, f"{reasons}radixkv: all are gone\n")
        results = json.loads(outcome.stdout)
        assert results["failures"] == dict.fromkeys(failed, "all are gone")
        for kind in ("outputs", "texts"):
            expected = [
                None if str(place) in failed else each for place, each in enumerate(whole[kind])
            ]
            assert results[kind] == expected


def test_outputs_are_guided_and_printed_as_lines(radixkv: Any, of_texts: list[object]) -> None:
    schema = '{"enum": ["x", 12], "x-guidance": {"whitespace_flexible": false}}'
    for options, expression in (
        (["--choice", "the keys", 'a "word"'], 'the keys|a "word"'),
        (["--regex", r"(the|a) cache( holds){1,3}!"], r"(the|a) cache( holds){1,3}!"),
        (["--json-schema", schema], r'"x"|12'),
        (["--grammar", 'start: "<" inner ">"\ninner: /[ab]{2,4}/'], "<[ab]{2,4}>"),
    ):
        outcome = radixkv(*of_texts, *options)
        assert outcome.status == 0, outcome.stderr
        lines = [json.loads(line) for line in outcome.stdout.splitlines()[: len(TEXTS)]]
        assert all(re.fullmatch(expression, text) for text in lines), lines


@pytest.mark.parametrize(
    ("option", "value"), [("--stop", "a"), ("--json-schema", "{}"), ("--choice", "a")]
)
def test_texts_without_a_tokenizer_are_refused(
    radixkv: Any, model_dir: Path, prompts: Path, option: str, value: str
) -> None:
    outcome = radixkv("generate", model_dir, "--prompts", prompts, *SMALL, option, value)
    text = f"radixkv: {option} needs a tokenizer, but {model_dir} has no tokenizer.json\n"
    assert (outcome.status, outcome.stderr) == (2, text)


def test_a_schema_that_is_none_is_refused(radixkv: Any, of_texts: list[object]) -> None:
    outcome = radixkv(*of_texts, "--json-schema", "{")
    assert outcome.status == 2
    assert outcome.stderr.startswith("radixkv: guided json is not a JSON schema: ")


def test_the_limit_of_log_probabilities_is_that_of_requests() -> None:
    assert generate_options.MAX_LOGPROBS == request.MAX_LOGPROBS
