"""Turn the places where a bug was seen into links to their issues and pull requests."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

PROJECTS: Final = {
    "aibrix": "vllm-project/aibrix",
    "atlas": "Avarok-Cybersecurity/atlas",
    "Dynamo": "ai-dynamo/dynamo",
    "FastDeploy": "PaddlePaddle/FastDeploy",
    "kvcached": "ovg-project/kvcached",
    "llm-d": "llm-d/llm-d",
    "llm-d-kv-cache": "llm-d/llm-d-kv-cache",
    "LMCache": "LMCache/LMCache",
    "mini-sglang": "sgl-project/mini-sglang",
    "Mooncake": "kvcache-ai/Mooncake",
    "nano-vllm": "GeeeekExplorer/nano-vllm",
    "pymllm": "UbiquitousLearning/mllm",
    "sglang-jax": "sgl-project/sglang-jax",
    "SGLang": "sgl-project/sglang",
    "TensorRT-LLM": "NVIDIA/TensorRT-LLM",
    "tpu-inference": "vllm-project/tpu-inference",
    "UCM": "ModelEngine-Group/unified-cache-management",
    "vllm-ascend": "vllm-project/vllm-ascend",
    "vllm-omni": "vllm-project/vllm-omni",
    "vLLM": "vllm-project/vllm",
}
"""The repository of each project on GitHub, by the name that the tables of bugs use."""

_NUMBER: Final = re.compile(
    rf"\b({'|'.join(map(re.escape, PROJECTS))}) (?:(PR) |issue )?#?(\d+)\b", re.IGNORECASE
)
_ADVISORY: Final = re.compile(r"\b(?:advisory )?(GHSA(?:-\w{4}){3})\b")
_BY_LOWER: Final = {name.lower(): (name, repository) for name, repository in PROJECTS.items()}


def linked(seen_in: str) -> str:
    """Return a text in which each issue, pull request and advisory is a Markdown link.

    Example:
        >>> linked("FastDeploy PR 7885 review")
        '[FastDeploy 7885](https://github.com/PaddlePaddle/FastDeploy/pull/7885) review'
        >>> linked("own, at first")
        'own, at first'
    """
    text = _NUMBER.sub(_link, seen_in)
    return _ADVISORY.sub(r"[\1](https://github.com/advisories/\1)", text)


def _link(match: re.Match[str]) -> str:
    name, repository = _BY_LOWER[match[1].lower()]
    kind = "pull" if match[2] or name == "FastDeploy" else "issues"  # GitHub forwards either
    return f"[{name} {match[3]}](https://github.com/{repository}/{kind}/{match[3]})"


def others(seen_in: Iterable[str]) -> list[str]:
    """Return each place outside this project once, linked, in order."""
    theirs = (text for text in seen_in if text and not text.startswith(("own", "ours")))
    places = (place.strip() for text in theirs for place in _with_projects(text).split(","))
    return list(dict.fromkeys(map(linked, places)))


def _with_projects(seen_in: str) -> str:
    """Repeat the project before each number: of "FastDeploy PR 1, PR 2" both are FastDeploy's."""
    places = seen_in.split(", ")
    for i, place in enumerate(places):
        if i and place.startswith("PR "):
            places[i] = f"{places[i - 1].split()[0]} {place}"
    return ", ".join(places)


def num_links(texts: Iterable[str]) -> int:
    """Return the number of distinct issues, pull requests and advisories in some texts."""
    return len({url for text in texts for url in re.findall(r"\]\((https://[^)]+)\)", text)})
