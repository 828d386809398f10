"""Synthetic prompts: groups of requests that share a prefix of chosen length."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spanlab.checks import not_negative, one_of, positive, share
from spanlab.core.request import Tokens
from spanlab.workloads.corpus import Corpus, EncodedText, Row
from spanlab.workloads.fresh_ids import FreshIds
from spanlab.workloads.parquet import LARGEST_TOKEN
from spanlab.workloads.source import workload

Draw = Callable[["Synthetic", np.random.Generator, int], NDArray[np.float64]]

DISTRIBUTIONS: dict[str, Draw] = {
    "fixed": lambda options, draw, count: np.full(count, float(options.value)),
    "uniform": lambda options, draw, count: draw.uniform(options.low, options.high, count),
    "normal": lambda options, draw, count: draw.normal(options.mean, options.sd, count),
}


@dataclass
class Synthetic:
    """Groups of prompts with a shared prefix, the overlap; draws are clipped to the length of a prompt.

    `groups`              groups of requests
    `requests_per_group`  requests of each group
    `prompt_tokens`       length of every prompt
    `kind`                distribution of the overlap: uniform, normal or fixed
    `unit`                unit of the overlap: fraction of the prompt, or tokens
    `value`               the overlap; fixed only
    `low`                 smallest overlap; uniform only
    `high`                largest overlap; uniform only
    `mean`                mean overlap; normal only
    `sd`                  standard deviation of the overlap; normal only
    `seed`                seed of the draws
    """

    groups: int = 48
    requests_per_group: int = 16
    prompt_tokens: int = 4096
    kind: str = "uniform"
    unit: str = "fraction"
    value: float = 0.8
    low: float = 0.5
    high: float = 0.95
    mean: float = 0.8
    sd: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        for key in ("groups", "requests_per_group", "prompt_tokens"):
            positive(f"workload.synthetic.{key}", getattr(self, key))
        one_of("workload.synthetic.kind", self.kind, DISTRIBUTIONS)
        one_of("workload.synthetic.unit", self.unit, ("fraction", "tokens"))
        for key in ("value", "low", "high", "mean"):
            if self.unit == "fraction":
                share(f"workload.synthetic.{key}", getattr(self, key))
        if self.low > self.high:
            raise ValueError(f"workload.synthetic.low={self.low}; expected at most workload.synthetic.high={self.high}")
        not_negative("workload.synthetic.seed", self.seed)
        not_negative("workload.synthetic.sd", self.sd)


@workload("synthetic", "modelled")
def modelled(synthetic: Synthetic) -> Corpus:
    """Make the prompts: the first `overlap` tokens of the group's base, then ids that occur nowhere else."""
    options = synthetic
    overlaps = _overlaps(options)
    total = options.groups * options.prompt_tokens + int((options.prompt_tokens - overlaps).sum())
    if total > LARGEST_TOKEN:
        raise ValueError(
            f"workload.synthetic.prompt_tokens={options.prompt_tokens} needs {total} ids; expected fewer than 2^31"
        )
    spans, rows = _prompts(options, overlaps)
    reusable = np.array([is_base for _, is_base in spans], dtype=bool)
    text = EncodedText(tuple(tokens for tokens, _ in spans), np.zeros_like(reusable), reusable, rows)
    detail = (
        f"{{documents}} groups, {{requests}} prompts of {options.prompt_tokens} tokens, {options.kind} overlap "
        f"of {overlaps.min()} to {overlaps.max()} tokens, seed {options.seed}"
    )
    return text.corpus("synthetic", "modelled", detail)


def _overlaps(options: Synthetic) -> NDArray[np.int64]:
    """Draw the shared tokens of each request, shape (groups, requests_per_group)."""
    draw = np.random.default_rng(options.seed)
    drawn = DISTRIBUTIONS[options.kind](options, draw, options.groups * options.requests_per_group)
    scale = options.prompt_tokens if options.unit == "fraction" else 1
    tokens = np.clip(np.rint(drawn * scale), 0, options.prompt_tokens).astype(np.int64)
    return tokens.reshape(options.groups, options.requests_per_group)


def _prompts(options: Synthetic, overlaps: NDArray[np.int64]) -> tuple[list[tuple[Tokens, bool]], tuple[Row, ...]]:
    """Return spans with their reusable flag, and rows."""
    length, ids = options.prompt_tokens, FreshIds()
    spans: list[tuple[Tokens, bool]] = []
    rows = []
    for group, shared in enumerate(overlaps):
        base = ids.take(length)
        for overlap in shared.tolist():
            parts = _request_spans(base[:overlap], ids.take(length - overlap), options.kind == "fixed")
            rows.append(Row(group, tuple(range(len(spans), len(spans) + len(parts)))))
            spans += parts
    return spans, tuple(rows)


def _request_spans(shared: Tokens, fresh: Tokens, boundary: bool) -> list[tuple[Tokens, bool]]:
    """Return two spans if all requests share the same length, a known boundary; else one span."""
    if not boundary:
        return [(np.concatenate([shared, fresh]), False)]
    return [(tokens, reusable) for tokens, reusable in ((shared, True), (fresh, False)) if len(tokens)]
