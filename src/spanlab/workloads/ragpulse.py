"""The RAGPulse trace: retrieval-augmented requests as content ids, component by component.

RAGPulse (arXiv 2511.12979, MIT licence) recorded two weeks of a deployed assistant, without any text: each request
lists the ids of its components, and a table per kind of component gives an id's length in tokens. Equal ids are equal
content, so both what a prefix cache could reuse and what reuse at any position could are known exactly. Token ids are
made here from the content's number; their sum is what a request costs, as the trace's own `input_length` adds only 6 to
12 tokens of template that nobody recorded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from spanlab.checks import one_of
from spanlab.core.request import Tokens
from spanlab.workloads import ragpulse_trace
from spanlab.workloads.corpus import Corpus, Expand
from spanlab.workloads.selection import Selection, refuse_cut
from spanlab.workloads.shape import Shape, committed
from spanlab.workloads.source import workload

MASK = np.uint64(2**31 - 1)
ODD = (np.uint64(0x1E3779B1), np.uint64(0x2545F491))


@dataclass
class RagPulse:
    """The RAGPulse trace: its first `requests`, at the recorded gaps, or stretched to `rate_rps`, or `speedup` faster.

    `requests`     the first requests of the trace; null: all
    `rate_rps`     mean rate to stretch the recorded gaps to; null: as recorded
    `speedup`      factor by which the gaps shrink; not with `rate_rps`
    `independent`  which components are independent spans: passages (with history and web pages), or all
    """

    requests: int | None = None
    rate_rps: float | None = None
    speedup: float = 1.0
    independent: str = "passages"

    def __post_init__(self) -> None:
        if self.requests is not None and self.requests < 1:
            raise ValueError(f"workload.ragpulse.requests={self.requests}; expected a whole number from 1 up, or null")
        for key in ("rate_rps", "speedup"):
            value = getattr(self, key)
            if value is not None and not 0 < value < np.inf:
                raise ValueError(f"workload.ragpulse.{key}={value}; expected a number above zero")
        if self.rate_rps is not None and self.speedup != 1.0:
            raise ValueError(
                f"workload.ragpulse.speedup={self.speedup} with workload.ragpulse.rate_rps={self.rate_rps}; "
                f"expected one of them"
            )
        one_of("workload.ragpulse.independent", self.independent, ("passages", "all"))


@workload("ragpulse", "shape")
def measured(ragpulse: RagPulse, selection: Selection, path: Path | None = None) -> Corpus:
    """The committed trace, or what make_shape left of one at `path`."""
    return _uncut(committed("ragpulse", path), selection, ragpulse)


@workload("ragpulse", "local")
def local(path: Path, ragpulse: RagPulse, selection: Selection) -> Corpus:
    """The original files of the trace."""
    return _uncut(ragpulse_trace.read(path, "local trace"), selection, ragpulse)


def _uncut(trace: Shape, selection: Selection, options: RagPulse) -> Corpus:
    refuse_cut("ragpulse", selection, "no limit on recorded prompts")
    return served_trace(trace, options)


def served_trace(trace: Shape, options: RagPulse) -> Corpus:
    """The first requests of a trace, at the asked pace, with scattered token ids; groups are sessions."""
    assert trace.arrivals_s is not None, "a trace has times"
    whole = trace.corpus()
    count = len(whole.rows) if options.requests is None else options.requests
    if count > len(whole.rows):
        raise ValueError(
            f"workload.ragpulse.requests={count}; expected at most {len(whole.rows)}, the requests of the trace"
        )
    return replace(
        whole,
        detail=f"{whole.detail}, {_pace(options)}, {_promise(options)}",
        independent=np.ones_like(whole.independent) if options.independent == "all" else whole.independent,
        rows=whole.rows[:count],
        expand=_scattered(whole.expand),
        arrived_at=paced(trace.arrivals_s[:count], options),
    )


def paced(seconds: NDArray[np.int64], options: RagPulse) -> list[int]:
    """Arrival times in integer nanoseconds: the gaps of `seconds`, all multiplied by the same factor."""
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
    """Send each number from 0 to 2^31 - 1 to another one, no two to the same.

    Counted ids of two contents would still run in parallel once a model's vocabulary folds them; scattered ones do not.
    Each step can be undone: multiplying by an odd number modulo 2^31, and adding one's own upper half to the lower.
    """
    mixed = ids.astype(np.uint64)
    for odd in ODD:
        mixed = mixed * odd & MASK
        mixed ^= mixed >> np.uint64(16)
    return mixed.astype(np.int32)


def _scattered(expand: Expand) -> Expand:
    def scattered(wanted: Mapping[int, int]) -> dict[int, Tokens]:
        return {span: scatter(tokens) for span, tokens in expand(wanted).items()}

    return scattered


def _pace(options: RagPulse) -> str:
    if options.rate_rps is not None:
        return f"gaps stretched to {options.rate_rps:g} requests a second"
    return "gaps as recorded" if options.speedup == 1.0 else f"gaps {options.speedup:g} times shorter"


def _promise(options: RagPulse) -> str:
    promised = "every component" if options.independent == "all" else "passages, history and web pages"
    return f"{promised} independent"
