"""The RAGPulse trace: retrieval-augmented requests as content ids, component by component.

RAGPulse (arXiv 2511.12979, MIT licence) recorded two weeks of a deployed assistant, without any text: each request
lists the ids of its components, and a table per kind of component gives an id's length in tokens. Equal ids are equal
content, so the reuse of a prefix cache and the reuse at any position are both known exactly. Token ids are derived from
the content's number. A prompt is as long as its components; the trace's `input_length` adds only 6 to 12 tokens of a
template that was not recorded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from spanlab.checks import one_of, positive
from spanlab.core.request import Tokens
from spanlab.workloads import ragpulse_trace
from spanlab.workloads.corpus import Corpus, Expand
from spanlab.workloads.selection import Selection, refuse_length_limit
from spanlab.workloads.shape import Shape, committed
from spanlab.workloads.source import workload

MASK = np.uint64(2**31 - 1)
ODD = (np.uint64(0x1E3779B1), np.uint64(0x2545F491))


@dataclass
class RagPulse:
    """The first `requests` of the RAGPulse trace, with recorded gaps, or gaps scaled to `rate_rps` or by `speedup`.

    `requests`     the first requests of the trace; null: all
    `rate_rps`     mean rate after scaling the recorded gaps; null: as recorded
    `speedup`      factor by which the gaps shrink; not with `rate_rps`
    `independent`  which components are independent spans: passages (with history and web pages), or all
    """

    requests: int | None = None
    rate_rps: float | None = None
    speedup: float = 1.0
    independent: str = "passages"

    def __post_init__(self) -> None:
        for key in ("requests", "rate_rps", "speedup"):
            positive(f"workload.ragpulse.{key}", getattr(self, key))
        if self.rate_rps is not None and self.speedup != 1.0:
            raise ValueError(
                f"workload.ragpulse.speedup={self.speedup} with workload.ragpulse.rate_rps={self.rate_rps}; "
                f"expected one of them"
            )
        one_of("workload.ragpulse.independent", self.independent, ("passages", "all"))


@workload("ragpulse", "shape")
def measured(ragpulse: RagPulse, selection: Selection, path: Path | None = None) -> Corpus:
    """Return the committed trace, or the shape that make_shape wrote to `path`."""
    trace = committed("ragpulse", path)
    if trace.arrivals_s is None:
        raise ValueError(f"workload.path={path} has no array arrivals_s; expected a shape of the RAGPulse trace")
    return _without_limit(trace, selection, ragpulse)


@workload("ragpulse", "local")
def local(path: Path, ragpulse: RagPulse, selection: Selection) -> Corpus:
    """Read the original files of the trace."""
    return _without_limit(ragpulse_trace.read_trace(path, "local trace"), selection, ragpulse)


def _without_limit(trace: Shape, selection: Selection, options: RagPulse) -> Corpus:
    refuse_length_limit("ragpulse", selection, "no limit on recorded prompts")
    return trace_corpus(trace, options)


def trace_corpus(trace: Shape, options: RagPulse) -> Corpus:
    """Return the first requests of a trace with scaled gaps and scattered token ids; groups are sessions."""
    assert trace.arrivals_s is not None, "a trace has arrival times"
    source = trace.corpus()
    count = len(source.rows) if options.requests is None else options.requests
    if count > len(source.rows):
        raise ValueError(
            f"workload.ragpulse.requests={count}; expected at most {len(source.rows)}, the requests of the trace"
        )
    return replace(
        source,
        detail=f"{source.detail}, {_gaps(options)}, {_independent_components(options)}",
        independent=np.ones_like(source.independent) if options.independent == "all" else source.independent,
        rows=source.rows[:count],
        expand=_scattered(source.expand),
        arrived_at=scaled_arrivals(trace.arrivals_s[:count], options),
    )


def scaled_arrivals(seconds: NDArray[np.int64], options: RagPulse) -> list[int]:
    """Return arrival times in integer nanoseconds, with all gaps of `seconds` scaled by the same factor."""
    factor = 1 / options.speedup
    if options.rate_rps is not None and len(seconds) > 1:
        if seconds[-1] == seconds[0]:
            raise ValueError(
                f"workload.ragpulse.rate_rps={options.rate_rps} with {len(seconds)} requests at the same second; "
                f"expected more requests"
            )
        factor = (len(seconds) - 1) / (options.rate_rps * float(seconds[-1] - seconds[0]))
    times: list[int] = np.rint(seconds * (factor * 1e9)).astype(np.int64).tolist()
    return times


def scatter(ids: Tokens) -> Tokens:
    """Permute the numbers from 0 to 2^31 - 1.

    Consecutive ids of two contents would still run in parallel after a modulo by the vocabulary size; permuted ids do
    not. Each step is invertible: a multiplication by an odd number modulo 2^31, and an xor of the number with its
    upper half.
    """
    mixed = ids.astype(np.uint64)
    for odd in ODD:
        mixed = mixed * odd & MASK
        mixed ^= mixed >> np.uint64(16)
    return mixed.astype(np.int32)


def _scattered(expand: Expand) -> Expand:
    def scattered(lengths: Mapping[int, int]) -> dict[int, Tokens]:
        return {span: scatter(tokens) for span, tokens in expand(lengths).items()}

    return scattered


def _gaps(options: RagPulse) -> str:
    if options.rate_rps is not None:
        return f"gaps stretched to {options.rate_rps:g} requests a second"
    return "gaps as recorded" if options.speedup == 1.0 else f"gaps {options.speedup:g} times shorter"


def _independent_components(options: RagPulse) -> str:
    components = "every component" if options.independent == "all" else "passages, history and web pages"
    return f"{components} independent"
