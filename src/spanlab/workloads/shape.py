"""The text-free form of a workload: lengths and shared beginnings of its spans, which is all that decisions see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import orjson
from numpy.typing import NDArray

from spanlab.core.request import Span, Tokens
from spanlab.workloads.corpus import Corpus, Row
from spanlab.workloads.files import write_atomically
from spanlab.workloads.joints import Joints
from spanlab.workloads.workload import Workload

SHAPES = Path(__file__).parent / "shapes"
EXPECTED = "a file that make_shape wrote, or its folder; workload.source=local reads text"
FORMAT_VERSION = 1
INDEPENDENT, REUSABLE = 1, 2


@dataclass(frozen=True, slots=True, eq=False)
class Shape:
    """Distinct spans in lexicographic order of their token ids, and requests as lists of span numbers.

    `lengths`, `lcps`  int64, shape (spans,); `lcps[i]` tokens are shared by spans i and i - 1, and `lcps[0]` is 0.
    `flags`            uint8, shape (spans,): bit 0 independent, bit 1 reusable.
    `request_spans`    int64, all requests' span numbers end to end; `span_counts[r]` of them belong to request r.
    `groups`, `output_lens`  int64, shape (requests,); output length 0 means unknown.
    `arrivals_s`       int64, shape (requests,): seconds since the first request; None where nobody recorded them.
    `meta`             JSON: format, name, kind, detail, inputs, tokenizer, joints and what the maker adds.
    """

    lengths: NDArray[np.int64]
    lcps: NDArray[np.int64]
    flags: NDArray[np.uint8]
    request_spans: NDArray[np.int64]
    span_counts: NDArray[np.int64]
    groups: NDArray[np.int64]
    output_lens: NDArray[np.int64]
    meta: dict[str, Any]
    arrivals_s: NDArray[np.int64] | None = None

    def requests(self) -> list[tuple[int, ...]]:
        """Span numbers of each request."""
        flat = self.request_spans.tolist()
        ends = np.cumsum(self.span_counts).tolist()
        return [tuple(flat[start:stop]) for start, stop in zip([0, *ends], ends, strict=False)]

    def corpus(self) -> Corpus:
        """The shape's spans and requests without times; token ids are made only for what is selected."""
        rows = tuple(map(Row, self.groups.tolist(), self.requests(), self.output_lens.tolist()))
        independent, reusable = (self.flags & INDEPENDENT) > 0, (self.flags & REUSABLE) > 0
        meta, made = self.meta, partial(expand, self)
        corpus = Corpus(meta["name"], meta["kind"], meta["detail"], self.lengths, independent, reusable, rows, made)
        return replace(corpus, joints=self._joints) if JOINTS in meta else corpus

    def _joints(self) -> Joints:
        """What joins the parts of a prompt; the separator's ids are those behind all others."""
        counts, taken = dict(self.meta[JOINTS]), int((self.lengths - self.lcps).sum())
        separator = np.arange(taken, taken + counts.pop("separator"), dtype=np.int32)
        return Joints(separator, **counts)


ARRAYS = ("lengths", "lcps", "flags", "request_spans", "span_counts", "groups", "output_lens")
TIMES = "arrivals_s"
JOINTS = "joints"


def measure(workload: Workload, **meta: Any) -> Shape:
    """Measure the shape of real token ids; raise ValueError if the shape would share more or less than they do.

    `meta` overrides or extends the metadata; its values are JSON.
    """
    spans, numbers = _distinct(workload)
    requests = [[numbers[_identity(span)] for span in request.spans] for request in workload.requests]
    provenance = workload.provenance
    about = {"format": FORMAT_VERSION, "name": workload.name, "kind": provenance.kind, "detail": provenance.detail}
    shape = Shape(
        lengths=np.array([len(span.tokens) for span in spans], dtype=np.int64),
        lcps=np.array([0, *map(_shared_spans, spans, spans[1:])], dtype=np.int64),
        flags=np.array([INDEPENDENT * s.independent + REUSABLE * s.reusable for s in spans], dtype=np.uint8),
        request_spans=np.array([span for request in requests for span in request], dtype=np.int64),
        span_counts=np.array([len(request) for request in requests], dtype=np.int64),
        groups=np.array([request.group_id for request in workload.requests], dtype=np.int64),
        output_lens=np.array([request.output_len for request in workload.requests], dtype=np.int64),
        meta=about | meta,
    )
    _verify(shape, [request.tokens for request in workload.requests])
    return shape


def expand(shape: Shape, wanted: Mapping[int, int]) -> dict[int, Tokens]:
    """Make the first `wanted[span]` token ids of each span: span i is span i - 1 up to their shared length, then ids
    from a counter.

    An id stands for one place in the tree of spans, so it does not depend on what else is wanted; int32.
    """
    need = _needed(shape, wanted)
    fresh = shape.lengths - shape.lcps
    starts = (np.cumsum(fresh) - fresh - shape.lcps).tolist()
    lcps = shape.lcps.tolist()
    current = np.zeros(max(need, default=0), dtype=np.int32)
    made = {}
    for span, (length, lcp, start) in enumerate(zip(need, lcps, starts, strict=True)):
        if length > lcp:
            current[lcp:length] = np.arange(start + lcp, start + length, dtype=np.int32)
        if span in wanted:
            made[span] = current[: wanted[span]].copy()
    return made


def save(shape: Shape, path: Path) -> Path:
    """Write a compressed npz; the same shape gives the same bytes."""
    arrays = {name: _smallest(getattr(shape, name)) for name in ARRAYS}
    if shape.arrivals_s is not None:
        arrays[TIMES] = _smallest(shape.arrivals_s)
    arrays["meta"] = np.frombuffer(orjson.dumps(shape.meta, option=orjson.OPT_SORT_KEYS), dtype=np.uint8)
    # numpy's stub reads arrays by name as options
    return write_atomically(path, lambda file: np.savez_compressed(file, **arrays))  # type: ignore[arg-type]


def load(path: Path) -> Shape:
    """Read a shape; raise ValueError if its format is not the one this code writes."""
    try:
        with np.load(path, allow_pickle=False) as held:
            meta = orjson.loads(held["meta"].tobytes())
            arrays = {name: held[name].astype(np.uint8 if name == "flags" else np.int64) for name in ARRAYS}
            times = held[TIMES].astype(np.int64) if TIMES in held else None
    except (BadZipFile, EOFError, KeyError, ValueError) as error:  # truncated, empty, or something else
        raise ValueError(f"shape {path} cannot be read; expected a file that make_shape has written") from error
    if meta["format"] != FORMAT_VERSION:
        raise ValueError(f"shape {path} has format {meta['format']}; expected {FORMAT_VERSION}")
    return Shape(**arrays, meta=meta, arrivals_s=times)


def shared_length(one: Tokens, other: Tokens) -> int:
    """Length of the longest common prefix, in tokens."""
    length = min(len(one), len(other))
    differing = one[:length] != other[:length]
    first = int(differing.argmax()) if length else 0
    return first if length and differing[first] else length


def _shared_spans(one: Span, other: Span) -> int:
    return shared_length(one.tokens, other.tokens)


def _sort_key(tokens: Tokens) -> bytes:
    """Bytes that sort as the token ids do."""
    return tokens.astype(">i4").tobytes()


def _identity(span: Span) -> tuple[bytes, bool, bool]:
    return _sort_key(span.tokens), span.independent, span.reusable


def _distinct(workload: Workload) -> tuple[list[Span], dict[tuple[bytes, bool, bool], int]]:
    by_identity = {_identity(span): span for request in workload.requests for span in request.spans}
    order = sorted(by_identity)
    return [by_identity[key] for key in order], {key: number for number, key in enumerate(order)}


def _verify(shape: Shape, prompts: Sequence[Tokens]) -> None:
    """Compare neighbours in sorted order, which is enough.

    A made id stands for one real token, so made prompts never share more than real ones do; and as any two prompts
    share the least of what the neighbours between them share, equal neighbours leave no room for sharing less.
    """
    spans = expand(shape, dict(enumerate(shape.lengths.tolist())))
    made = [np.concatenate([spans[span] for span in request]) for request in shape.requests()]
    order = sorted(range(len(prompts)), key=lambda request: _sort_key(prompts[request]))
    for one, other in pairwise(order):
        real, kept = shared_length(prompts[one], prompts[other]), shared_length(made[one], made[other])
        if real != kept:
            raise ValueError(
                f"the shape of {shape.meta['name']} keeps {kept} of the {real} tokens that prompts {one} and {other} "
                f"share; expected spans of which none continues another one's text"
            )


def _needed(shape: Shape, wanted: Mapping[int, int]) -> list[int]:
    """Leading tokens to make of each span: what is wanted of it, and what later spans take over from it."""
    need = [0] * len(shape.lengths)
    carried = 0
    lcps = [*shape.lcps.tolist(), 0]
    for span in range(len(need) - 1, -1, -1):
        carried = max(wanted.get(span, 0), min(carried, lcps[span + 1]))
        need[span] = carried
    return need


def _smallest(array: NDArray[Any]) -> NDArray[Any]:
    return array.astype(np.min_scalar_type(int(array.max(initial=0))))


def committed(name: str, path: Path | None) -> Shape:
    """The shape in a file or folder that `make_shape` has written; the committed one where none is given."""
    folder = SHAPES if path is None else path
    file = folder if folder.suffix == ".npz" else folder / f"{name}.npz"
    if not file.is_file():
        raise ValueError(f"workload.path={path} has no {file.name}; expected {EXPECTED}")
    return load(file)


def committed_names() -> set[str]:
    """Names of the committed shapes; a workload may be made of another one's."""
    return {path.stem for path in SHAPES.glob("*.npz")}
