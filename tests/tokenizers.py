"""Small real tokenizers, of the kinds that checkpoints have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL: Final = ("<s>", "</s>", "<|user|>", "<|assistant|>")
"""Tokens 0 to 3 of each tokenizer; 0 and 1 are those of a tiny checkpoint."""

TEXTS: Final = (
    "the cache holds the keys and the values of the tokens",
    "a prefix of the prompt is in the cache, and the rest is not",
    "naïve façade, 漢字 and кириллица, 🙂🚀",
)

CHAT_TEMPLATE: Final = """\
{{ bos_token }}{% for message in messages %}
{% if message.role not in ['user', 'assistant', 'system'] %}
{{ raise_exception('unknown role ' + message.role) }}
{% endif %}
<|{{ message.role }}|>{{ message.content }}{{ eos_token }}{% endfor %}
{% if add_generation_prompt %}<|assistant|>{% if shout %}!{% endif %}{% endif %}"""


def byte_level() -> Tokenizer:
    """Like GPT-2, Llama 3 and Qwen: bytes are letters, and a token may end inside a character."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=[AddedToken(each, special=True) for each in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Like Llama 2: words begin with a mark, and unknown characters are byte tokens."""
    names = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    names += ["▁", "▁the", "▁cache", "a", "b", "c", "e", "h", "n", "s", "t", "▁▁", "é", "�"]
    merges = [("▁", "▁")]
    vocabulary = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<s>"))
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in SPECIAL])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    return tokenizer


def words() -> Tokenizer:
    """Whole words behind a mark, which the decoder removes from the first one."""
    names = [*SPECIAL, "▁the", "▁cache", "▁", "s", "▁é"]
    vocabulary = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<s>"))
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in SPECIAL])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def add_tokenizer(
    directory: Path, tokenizer: Tokenizer | None = None, **config: Any
) -> Mapping[str, Any]:
    """Write the files of a tokenizer into a checkpoint; return tokenizer_config.json."""
    (tokenizer or byte_level()).save(str(directory / "tokenizer.json"))
    entries = {
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "lstrip": False},
        "add_bos_token": True,
        "chat_template": CHAT_TEMPLATE,
        **config,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(entries), encoding="utf-8")
    return entries
