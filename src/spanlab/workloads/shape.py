"""Shape: a workload without text, as lengths and shared prefixes of its spans, which is all that
policies need."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import orjson
from numpy.typing import NDArray

from spanlab.core.request import Span
from spanlab.core.token_string import Tokens
from spanlab.workloads.files import write_atomically
from spanlab.workloads.workload import Corpus, Joints, Row, Workload, shared_length

SHAPES = Path(__file__).parent / "shapes"
EXPECTED = "a file that make_shape wrote, or its folder; workload.source=local reads text"
FORMAT_VERSION = 1
INDEPENDENT, REUSABLE = 1, 2


@dataclass(frozen=True, slots=True, eq=False)
class Shape:
    """Distinct spans in lexicographic order of their token ids, and requests as lists of span
    numbers.

    `lengths`, `lcps`  int64, shape (spans,); `lcps[i]` tokens are shared by spans i and i - 1, and
                       `lcps[0]` is 0.
    `flags`            uint8, shape (spans,): bit 0 independent, bit 1 reusable.
    `request_spans`    int64, all requests' span numbers end to end; `span_counts[r]` of them belong
                       to request r.
    `groups`, `output_lens`  int64, shape (requests,); output length 0 means unknown.
    `arrivals_s`       int64, shape (requests,): seconds since the first request; None if not
                       recorded.
    `meta`             JSON: format, name, kind, detail, inputs, tokenizer, joints and extra
                       metadata of the maker.
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
        """Return the span numbers of each request."""
        flat = self.request_spans.tolist()
        ends = np.cumsum(self.span_counts).tolist()
        return [tuple(flat[start:stop]) for start, stop in zip([0, *ends], ends, strict=False)]

    def corpus(self) -> Corpus:
        """Return the spans and requests without times; token ids are made only for selected
        requests."""
        rows = tuple(map(Row, self.groups.tolist(), self.requests(), self.output_lens.tolist()))
        independent, reusable = (self.flags & INDEPENDENT) > 0, (self.flags & REUSABLE) > 0
        meta, expand_shape = self.meta, partial(expand, self)
        corpus = Corpus(
            meta["name"],
            meta["kind"],
            meta["detail"],
            self.lengths,
            independent,
            reusable,
            rows,
            expand_shape,
        )
        return replace(corpus, joints=self._joints) if JOINTS in meta else corpus

    def _joints(self) -> Joints:
        """Return the joints of a prompt; the separator's ids follow all other ids."""
        counts, used_ids = dict(self.meta[JOINTS]), int((self.lengths - self.lcps).sum())
        separator = np.arange(used_ids, used_ids + counts.pop("separator"), dtype=np.int32)
        return Joints(separator, **counts)


ARRAYS = ("lengths", "lcps", "flags", "request_spans", "span_counts", "groups", "output_lens")
TIMES = "arrivals_s"
JOINTS = "joints"
LARGEST = np.iinfo(np.int32).max
LARGEST_JOINT = 1 << 20
#: Errors of files that are truncated, empty, or of another format.
_UNREADABLE = (
    BadZipFile,
    zlib.error,
    EOFError,
    OSError,
    KeyError,
    TypeError,
    ValueError,
    NotImplementedError,
)


def measure(workload: Workload, **meta: Any) -> Shape:
    """Measure the shape of real token ids; raise ValueError if the shape shares other prefixes than
    they do.

    `meta` overrides or extends the metadata; its values are JSON.
    """
    by_identity = {_identity(span): span for request in workload.requests for span in request.spans}
    order = sorted(by_identity)
    spans = [by_identity[key] for key in order]
    numbers = {key: number for number, key in enumerate(order)}
    requests = [
        [numbers[_identity(span)] for span in request.spans] for request in workload.requests
    ]
    provenance = workload.provenance
    defaults = {
        "format": FORMAT_VERSION,
        "name": workload.name,
        "kind": provenance.kind,
        "detail": provenance.detail,
    }
    shape = Shape(
        lengths=np.array([len(span.ids) for span in spans], dtype=np.int64),
        lcps=np.array(
            [0, *(shared_length(a.tokens, b.tokens) for a, b in pairwise(spans))], dtype=np.int64
        ),
        flags=np.array(
            [INDEPENDENT * s.independent + REUSABLE * s.reusable for s in spans], dtype=np.uint8
        ),
        request_spans=np.array([span for request in requests for span in request], dtype=np.int64),
        span_counts=np.array([len(request) for request in requests], dtype=np.int64),
        groups=np.array([request.group_id for request in workload.requests], dtype=np.int64),
        output_lens=np.array([request.output_len for request in workload.requests], dtype=np.int64),
        meta=defaults | meta,
    )
    _verify(shape, [request.tokens for request in workload.requests])
    return shape


def expand(shape: Shape, requested: Mapping[int, int]) -> dict[int, Tokens]:
    """Make the first `requested[span]` token ids of each span, int32.

    Span i equals span i - 1 up to their shared length, then has ids from a counter. An id stands
    for one position in the tree of spans, so it does not depend on the other requested spans.
    """
    # how many leading tokens of each span to make: those requested of it or copied by later spans
    needed = [0] * len(shape.lengths)
    carried = 0
    lcps = [*shape.lcps.tolist(), 0]
    for span in range(len(needed) - 1, -1, -1):
        carried = max(requested.get(span, 0), min(carried, lcps[span + 1]))
        needed[span] = carried
    fresh = shape.lengths - shape.lcps
    starts = (np.cumsum(fresh) - fresh - shape.lcps).tolist()
    lcps = shape.lcps.tolist()
    current = np.zeros(max(needed, default=0), dtype=np.int32)
    tokens = {}
    for span, (length, lcp, start) in enumerate(zip(needed, lcps, starts, strict=True)):
        if length > lcp:
            current[lcp:length] = np.arange(start + lcp, start + length, dtype=np.int32)
        if span in requested:
            tokens[span] = current[: requested[span]].copy()
    return tokens


def save(shape: Shape, path: Path) -> Path:
    """Write a compressed npz; the same shape gives the same bytes."""
    arrays = {name: _smallest(getattr(shape, name)) for name in ARRAYS}
    if shape.arrivals_s is not None:
        arrays[TIMES] = _smallest(shape.arrivals_s)
    arrays["meta"] = np.frombuffer(
        orjson.dumps(shape.meta, option=orjson.OPT_SORT_KEYS), dtype=np.uint8
    )
    # numpy's stub reads arrays by name as options
    return write_atomically(path, lambda file: np.savez_compressed(file, **arrays))  # type: ignore[arg-type]


def load(path: Path) -> Shape:
    """Read a shape; raise ValueError if its format is not the one this code writes."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            meta = orjson.loads(archive["meta"].tobytes())
            arrays: dict[str, Any] = {name: _integers(archive[name]) for name in ARRAYS}
            times = _integers(archive[TIMES]) if TIMES in archive else None
        arrays["flags"] = arrays["flags"].astype(np.uint8)
    except _UNREADABLE as error:
        raise ValueError(
            f"shape {path} cannot be read; expected a file that make_shape has written"
        ) from error
    if not isinstance(meta, dict) or meta.get("format") != FORMAT_VERSION:
        version = meta.get("format") if isinstance(meta, dict) else None
        raise ValueError(f"shape {path} has format {version}; expected {FORMAT_VERSION}")
    shape = Shape(**arrays, meta=meta, arrivals_s=times)
    if problem := next(_invalid(shape), None):
        name, expected = problem
        value = str(meta.get(name) if name in meta else getattr(shape, name, None))
        raise ValueError(
            f"shape {path} has {name}={' '.join(value.split())[:40]}; expected {expected}"
        )
    return shape


def _integers(array: NDArray[Any]) -> NDArray[np.int64]:
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(
            f"an array of shape {array.shape} and type {array.dtype}, not a list of integers"
        )
    return array.astype(np.int64)


def _invalid(shape: Shape) -> Iterator[tuple[str, str]]:
    """Yield the names of arrays and metadata that contradict the description of a shape, and what
    was expected."""
    spans, requests, used = len(shape.lengths), len(shape.groups), len(shape.request_spans)
    previous = np.concatenate([[0], shape.lengths])[:spans]
    for name, count in (
        ("lcps", spans),
        ("flags", spans),
        ("span_counts", requests),
        ("output_lens", requests),
    ):
        if len(getattr(shape, name)) != count:
            yield name, f"{count} numbers, not {len(getattr(shape, name))}"
            return
    limits = {
        "lengths": (shape.lengths, 0, LARGEST),
        "lcps": (shape.lcps, 0, np.minimum(shape.lengths, previous)),
        "request_spans": (shape.request_spans, 0, spans - 1),
        "span_counts": (shape.span_counts, 1, used),
        "output_lens": (shape.output_lens, 0, LARGEST),
    }
    for name, (array, least, most) in limits.items():
        if (array < least).any() or (array > most).any():
            limit = "the lengths of their span and the one before it" if name == "lcps" else most
            yield name, f"numbers from {least} to {limit}"
    if shape.span_counts.sum() != used:
        yield "span_counts", f"a sum of {used}, the number of request_spans"
    if (shape.lengths - shape.lcps).sum() > LARGEST:
        yield "lengths", f"at most {LARGEST} different tokens"
    times = shape.arrivals_s
    if times is not None and (
        len(times) != requests or (times < 0).any() or (times > LARGEST).any()
    ):
        yield TIMES, f"{requests} numbers from 0 to {LARGEST}"
    for name in ("name", "kind", "detail"):
        if not isinstance(shape.meta.get(name), str):
            yield name, "a text"
    joints = shape.meta.get(JOINTS, Joints().counts())
    if not isinstance(joints, dict) or joints.keys() != Joints().counts().keys():
        yield JOINTS, f"numbers for {', '.join(Joints().counts())}"
    elif not all(type(count) is int and 0 <= count <= LARGEST_JOINT for count in joints.values()):
        yield JOINTS, f"numbers from 0 to {LARGEST_JOINT}"


def _sort_key(tokens: Tokens) -> bytes:
    """Return bytes that sort in the order of the token ids."""
    return tokens.astype(">i4").tobytes()


def _identity(span: Span) -> tuple[bytes, bool, bool]:
    return _sort_key(span.tokens), span.independent, span.reusable


def _verify(shape: Shape, prompts: Sequence[Tokens]) -> None:
    """Raise ValueError if prompts of the shape share other prefix lengths than the real prompts.

    Comparing neighbours in sorted order suffices. A made id stands for one real token, so made
    prompts never share more than real ones. Two prompts share the minimum over the neighbours
    between them, so they do not share less either.
    """
    spans = expand(shape, dict(enumerate(shape.lengths.tolist())))
    prompts_of_shape = [
        np.concatenate([spans[span] for span in request]) for request in shape.requests()
    ]
    order = sorted(range(len(prompts)), key=lambda request: _sort_key(prompts[request]))
    for first, second in pairwise(order):
        real = shared_length(prompts[first], prompts[second])
        made_length = shared_length(prompts_of_shape[first], prompts_of_shape[second])
        if real != made_length:
            raise ValueError(
                f"the shape of {shape.meta['name']} keeps {made_length} of the {real} tokens that prompts {first} and "
                f"{second} share; expected spans of which none continues the text of another"
            )


def _smallest(array: NDArray[Any]) -> NDArray[Any]:
    return array.astype(np.min_scalar_type(int(array.max(initial=0))))


def committed(name: str, path: Path | None) -> Shape:
    """Load the shape `name` from a file or folder that make_shape wrote; None loads the committed
    shape."""
    folder = SHAPES if path is None else path
    file = folder if folder.suffix == ".npz" else folder / f"{name}.npz"
    if not file.is_file():
        raise ValueError(f"workload.path={path} has no {file.name}; expected {EXPECTED}")
    return load(file)


def committed_names() -> set[str]:
    """Return the names of the committed shapes; one workload may use the shape of another."""
    return {path.stem for path in SHAPES.glob("*.npz")}
