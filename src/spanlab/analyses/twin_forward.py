"""Results of `vllm bench forward` as a source of a twin: durations of single forwards of exact
batches.

It times the layers of a model on the device, as a captured graph. Logits, sampling and the host are
outside, so these times tell what computing and moving bytes take; what the host takes is known from
a log of requests alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spanlab.core.step import StepFeatures
from spanlab.model_spec import HardwareSpec, ModelSpec
from spanlab.registry import positive
from spanlab.report.table import Field, Table, count, seconds, signed_percent, tabulate, word
from spanlab.typed_json import from_json, reading
from spanlab_sim.timings import Deployment, FittedTiming, Rates

_KIND = "the JSON that vllm bench forward --output-json writes"
_TIMERS = "graph_events", "graph_events_rank_max"
_DRAFTS = "with drafts or their model"
_PIPELINE = "of pipeline stages"
_PADDED = "whose forward computed other tokens than those of its requests"
_BALANCED = "with experts chosen by --routing balanced"
_INFINITE = "whose forward gave numbers that are not finite"


@dataclass
class _Request:
    query_len: int
    kv_len: int
    num_draft_tokens: int = 0
    chunked: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.query_len <= self.kv_len:
            raise ValueError(f"query_len={self.query_len}: expected 1 to kv_len={self.kv_len}")


@dataclass
class _Latency:
    timer: str
    median: float
    sample_spread_pct: float

    def __post_init__(self) -> None:
        positive("median", self.median)


@dataclass
class _Rank:
    num_tokens: int
    num_local_tokens: int
    num_tokens_after_padding: int
    routing: str
    timing_scope: str
    finite: bool
    latency_us: _Latency


@dataclass
class _Case:
    case: str
    requests: list[_Request]
    ranks: list[_Rank]

    def __post_init__(self) -> None:
        for name, values in (("requests", self.requests), ("ranks", self.ranks)):
            if not values:
                raise ValueError(f"{name}=[]: expected one or more")


@dataclass(frozen=True, eq=False)
class Forwards:
    """Forwards of exact batches that were timed on the device.

    `names`    of the cases
    `work`     what each computes; all ranks compute the same
    `seconds`  float64, the median of each
    `spreads`  float64, how far apart medians of repeats are, relative to it
    `notes`    what was left out, and what the files do not tell
    """

    names: tuple[str, ...]
    work: tuple[StepFeatures, ...]
    seconds: NDArray[np.float64]
    spreads: NDArray[np.float64]
    notes: tuple[str, ...] = field(default=())

    def modelled(
        self, model: ModelSpec, hardware: HardwareSpec, deployment: Deployment, rates: Rates
    ) -> NDArray[np.float64]:
        """Return the seconds of each forward at some rates; its tokens are not padded to captured
        graphs."""
        timing = FittedTiming(model, hardware, replace(deployment, cuda_graphs=False), rates)
        return np.array([timing.forward(features) for features in self.work]) * 1e-9


def read_forwards(
    paths: Sequence[str], model: ModelSpec, deployment: Deployment
) -> Forwards | None:
    """Return the forwards of all files, None without a file; ValueError where none can be fitted.

    `deployment`  the server's, whose devices the files must have
    """
    if not paths:
        return None
    cases: list[_Case] = []
    for path in paths:
        with reading(f"twin.forward={path}", _KIND):
            of_file = from_json(Path(path).expanduser().read_bytes(), list[_Case], unknown="ignore")
        for case in of_file:
            if len(case.ranks) != deployment.devices:
                raise ValueError(
                    f"twin.forward={path}: {case.case} ran on {len(case.ranks)} devices; expected the "
                    f"{deployment.devices} of twin.tensor_parallel · twin.data_parallel"
                )
        cases += of_file
    left_out = [(case, _reason(case, model)) for case in cases]
    counts = Counter(reason for _, reason in left_out if reason is not None)
    fitted = [case for case, reason in left_out if reason is None]
    left = [f"{number:,} forwards {reason} are left out" for reason, number in counts.items()]
    if not fitted:
        problem = "; ".join(left) or "the files are empty"
        raise ValueError(
            f"twin.forward={list(paths)}: expected a forward that can be fitted: {problem}"
        )
    unknown = (
        f"vllm bench forward does not name its model and device: {len(fitted):,} forwards count as those of "
        f"{model.name} on the study's hardware"
    )
    return Forwards(
        tuple(case.case for case in fitted),
        tuple(_features(case) for case in fitted),
        np.array([case.ranks[0].latency_us.median for case in fitted]) * 1e-6,
        np.array([case.ranks[0].latency_us.sample_spread_pct for case in fitted]) / 100,
        (unknown, *left),
    )


def _reason(case: _Case, model: ModelSpec) -> str | None:
    """Return why a case is left out of the fit."""
    rank = case.ranks[0]  # all ranks get the same batch
    tokens = sum(request.query_len for request in case.requests)
    reasons = {
        _PIPELINE: rank.latency_us.timer not in _TIMERS,
        _DRAFTS: rank.timing_scope != "target_only"
        or any(request.num_draft_tokens for request in case.requests),
        _PADDED: not tokens
        == rank.num_tokens
        == rank.num_local_tokens
        == rank.num_tokens_after_padding,
        _BALANCED: model.expert_layers > 0 and rank.routing == "balanced",
        _INFINITE: not rank.finite,
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def _features(case: _Case) -> StepFeatures:
    """Count the work of a batch; a request of one token after a prefix decodes, as in vLLM."""
    decodes = [
        request.kv_len for request in case.requests if request.query_len == 1 and request.kv_len > 1
    ]
    prefills = [
        (request.query_len, request.kv_len - request.query_len)
        for request in case.requests
        if request.query_len > 1 or request.kv_len == 1
    ]
    return StepFeatures(
        prefill_tokens=sum(query for query, _ in prefills),
        prefill_pairs=sum(query * prefix + query * (query + 1) // 2 for query, prefix in prefills),
        num_prefills=len(prefills),
        num_decodes=len(decodes),
        decode_context=sum(decodes),
        prefill_context=sum(prefix for _, prefix in prefills),
        num_forwards=1,
    )


# ------------------------------------------------------------------------------
# The table of forwards.
# ------------------------------------------------------------------------------

_FIELDS = (
    Field("case", "forward", word, left=True),
    Field("prompt", "prompt\ntokens", count),
    Field("decodes", "decodes", count),
    Field("context", "KV read", count),
    Field("measured_s", "measured", seconds),
    Field("modelled_s", "fitted", seconds),
    Field("error", "error", signed_percent),
)


def rows_of(forwards: Forwards, modelled: NDArray[np.float64]) -> list[dict[str, Any]]:
    """Return a row for each forward: its work, its time, and that at the fitted rates."""
    return [
        {
            "case": name,
            "prompt": work.prefill_tokens,
            "decodes": work.num_decodes,
            "context": work.prefill_context + work.decode_context,
            "measured_s": float(measured),
            "modelled_s": float(fitted),
            "error": float(fitted / measured - 1),
        }
        for name, work, measured, fitted in zip(
            forwards.names, forwards.work, forwards.seconds, modelled, strict=True
        )
    ]


def table_of(rows: Sequence[dict[str, Any]]) -> Table:
    """Return the table of forwards."""
    note = "layers on the device alone: logits, sampling and the host's part of a step are outside of these times"
    return tabulate("forwards", "Forwards of exact batches", _FIELDS, rows, (note,))
