"""Outputs of one run on the engine, read back: tokens by request, and logits where they were kept."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Outputs:
    """`tokens` by request; `logits` float32 by request, shape (kept tokens, vocabulary), first token first."""

    tokens: dict[int, NDArray[np.int32]]
    logits: dict[int, NDArray[np.float32]]


def read_outputs(path: Path) -> Outputs:
    """The outputs that a run has written to `path`."""
    with np.load(path, allow_pickle=False) as found:
        arrays = {name: found[name] for name in found.files}
    pieces = np.split(arrays["tokens"], arrays["ends"][1:-1]) if len(arrays["requests"]) else []
    tokens = dict(zip(arrays["requests"].tolist(), pieces, strict=True))
    requests, order = arrays["keys"][:, 0], np.lexsort(arrays["keys"].T[::-1])
    logits = {one: arrays["logits"][order[requests[order] == one]] for one in np.unique(requests).tolist()}
    return Outputs(tokens, logits)


def read_options(path: Path) -> dict[int, list[float]]:
    """Losses per token of the wrong options, by request, of a run that kept scores."""
    with np.load(path, allow_pickle=False) as found:
        requests, losses = found["options"][:, 0], found["option_nll"]
    return {request: losses[requests == request].tolist() for request in np.unique(requests).tolist()}


def read_scores(path: Path) -> dict[int, dict[str, float]]:
    """Means over the tokens of each given answer, by request and name of the score, of a run that kept scores."""
    with np.load(path, allow_pickle=False) as found:
        requests, scores = found["scored"][:, 0], {name: found[name] for name in ("nll", "kl", "top1")}
    means: dict[int, dict[str, float]] = {}
    for request in np.unique(requests).tolist():
        means[request] = {name: float(values[requests == request].mean()) for name, values in scores.items()}
    return means
