"""Readers of one engine run's outputs: tokens by request, and logits or scores where they were recorded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Outputs:
    """`tokens` by request; `logits` by request, float32, shape (recorded tokens, vocabulary), in order of tokens."""

    tokens: dict[int, NDArray[np.int32]]
    logits: dict[int, NDArray[np.float32]]


def read_outputs(path: Path) -> Outputs:
    """Return the outputs in the file `path` of a run."""
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    pieces = np.split(arrays["tokens"], arrays["ends"][1:-1]) if len(arrays["requests"]) else []
    tokens = dict(zip(arrays["requests"].tolist(), pieces, strict=True))
    requests, order = arrays["keys"][:, 0], np.lexsort(arrays["keys"].T[::-1])
    logits = {request: arrays["logits"][order[requests[order] == request]] for request in np.unique(requests).tolist()}
    return Outputs(tokens, logits)


def read_options(path: Path) -> dict[int, list[float]]:
    """Return losses per token of the wrong options by request, from a run that recorded scores."""
    with np.load(path, allow_pickle=False) as file:
        requests, losses = file["options"][:, 0], file["option_nll"]
    return {request: losses[requests == request].tolist() for request in np.unique(requests).tolist()}


def read_scores(path: Path) -> dict[int, dict[str, float]]:
    """Return means over the tokens of each gold answer by request and score, from a run that recorded scores."""
    with np.load(path, allow_pickle=False) as file:
        requests, scores = file["scored"][:, 0], {name: file[name] for name in ("nll", "kl", "top1")}
    means: dict[int, dict[str, float]] = {}
    for request in np.unique(requests).tolist():
        means[request] = {name: float(values[requests == request].mean()) for name, values in scores.items()}
    return means
