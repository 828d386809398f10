"""Factories of workloads from settings, and what two of them have in common."""

import json
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from spanlab import workloads
from spanlab.core.request import Request
from spanlab.workloads import WORKLOADS, Workload
from spanlab.workloads.shape import ARRAYS, SHAPES, load
from spanlab.workloads.workload import shared_length


def load_workload(kind: str, source: str | None = None, *, cache_dir: Path | None = None, **keys: Any) -> Workload:
    """Load a workload with the default options of its kind."""
    text = {key: str(value) if isinstance(value, Path) else value for key, value in keys.items()}
    return workloads.load_workload(WORKLOADS.of("workload", {"kind": kind, "source": source, **text}), cache_dir)


def token_lists(workload: Workload) -> list[list[int]]:
    """The token ids of each prompt."""
    return [request.tokens.tolist() for request in workload.requests]


def decoded(request: Request, tokenizer: Path) -> list[str]:
    """The text of each span, with its turn marks."""
    from tokenizers import Tokenizer

    parsed = Tokenizer.from_file(str(tokenizer))
    return [parsed.decode(span.tokens.tolist(), skip_special_tokens=False) for span in request.spans]


def words_of(tokens: np.ndarray, tokenizer: Path) -> str:
    """Tokens of a word-level tokenizer as words."""
    content = json.loads(tokenizer.read_text(encoding="utf-8"))
    words = {number: word for word, number in content["model"]["vocab"].items()}
    words |= {token["id"]: token["content"] for token in content["added_tokens"]}
    return " ".join(words[number] for number in tokens.tolist())


def check_equals_committed(fresh: Path, kind: str, *arrays: str) -> None:
    """Compare contents, not bytes: another zlib version may compress the same arrays differently."""
    made, committed = load(fresh), load(SHAPES / f"{kind}.npz")
    assert made.meta == committed.meta
    for name in (*ARRAYS, *arrays):
        assert np.array_equal(getattr(made, name), getattr(committed, name)), name


def check_equal_prefixes(first: Sequence[Request], second: Sequence[Request]) -> None:
    """Any two prompts share as many leading tokens in one list of requests as in the other."""
    for i, j in combinations(range(len(first)), 2):
        expected = shared_length(first[i].tokens, first[j].tokens)
        assert shared_length(second[i].tokens, second[j].tokens) == expected
