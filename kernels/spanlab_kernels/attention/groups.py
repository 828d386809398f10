"""Groups of packed query rows and the spans of the paged pool that they see, as dataclasses and as arrays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Span:
    """A run of keys in the pool, as one prompt sees it.

    Its key j, for j in [0, length), has index `index` + j in the prompt and is rotated to position `position` + j. Keys
    are consecutive in `pages`, from slot `offset` of the first page on. In form QR, where keys are stored rotated,
    `position` is that of a key stored at angle 0: for a part of a stored span, the position of the first key of the
    whole span. For a batch over a page table, `pages` is a range of indices of the table.
    """

    index: int
    length: int
    position: int
    pages: Sequence[int]
    offset: int = 0


@dataclass(frozen=True)
class Group:
    """Query rows that see the same spans; a row sees the keys whose index in the prompt is at most its own.

    `query_index` has the index of each row in the prompt, in any order, and `query_shift` the positions by which it
    still has to be rotated; None where rows are rotated to their positions already.
    """

    query_index: Sequence[int] | Numbers
    spans: Sequence[Span]
    query_shift: Sequence[int] | Numbers | None = None


class Spans(NamedTuple):
    """Spans as int64 arrays [S]: the fields of `Span`, with the index of the first page in a page table."""

    index: Numbers
    length: Numbers
    position: Numbers
    first_page: Numbers
    offset: Numbers

    def where(self, chosen: NDArray[np.bool_]) -> Spans:
        """The spans where the mask `chosen` [S] is true."""
        return Spans(*(values[chosen] for values in self))


class GroupArrays(NamedTuple):
    """Groups as int64 arrays: numbers of rows and spans [G], index and shift of all rows [T], and all spans."""

    rows: Numbers
    spans: Numbers
    query_index: Numbers
    query_shift: Numbers
    of_span: Spans


def flatten(groups: Sequence[Group]) -> GroupArrays:
    """Groups as arrays; the pages of their spans are ranges of indices of a page table."""
    spans = [
        (span.index, span.length, span.position, span.pages[0], span.offset) for group in groups for span in group.spans
    ]
    return GroupArrays(
        np.array([len(group.query_index) for group in groups], np.int64),
        np.array([len(group.spans) for group in groups], np.int64),
        concatenated([group.query_index for group in groups]),
        concatenated([_shifts(group) for group in groups]),
        Spans(*np.array(spans, np.int64).reshape(-1, len(Spans._fields)).T),
    )


def joined(parts: Sequence[GroupArrays]) -> GroupArrays:
    """The groups of all parts, in order."""
    if len(parts) == 1:
        return parts[0]
    *columns, of_span = zip(*parts, strict=True)
    return GroupArrays(*map(concatenated, columns), Spans(*map(concatenated, zip(*of_span, strict=True))))


def concatenated(parts: Iterable[Sequence[int] | Numbers]) -> Numbers:
    """All parts as one int64 array."""
    return np.concatenate([np.empty(0, np.int64), *(np.asarray(values, np.int64) for values in parts)])


def check_group(group: Group, page_size: int) -> None:
    """Raise ValueError for a group that is invalid for a pool of this page size."""
    shift = group.query_shift
    if shift is not None and len(shift) != len(group.query_index):
        raise ValueError(f"query_shift must be as long as query_index, {len(group.query_index)}, not {len(shift)}.")
    if len(group.query_index) and min(group.query_index) < 0:
        raise ValueError(f"query_index must not be negative, as {min(group.query_index)} is.")
    for span in group.spans:
        _check_span(span, page_size)


def _check_span(span: Span, page_size: int) -> None:
    if span.length < 1:
        raise ValueError(f"length of a span must be at least 1, not {span.length}.")
    if span.index < 0 or span.position < 0:
        raise ValueError(f"index and position of a span must not be negative, not {span.index} and {span.position}.")
    if not 0 <= span.offset < page_size:
        raise ValueError(f"offset of a span must lie in [0, {page_size}), its first page, not {span.offset}.")
    needed = -(-(span.offset + span.length) // page_size)
    if len(span.pages) != needed:
        raise ValueError(
            f"pages of a span of length {span.length} at offset {span.offset} must be {needed}, not {len(span.pages)}."
        )
    if min(span.pages) < 0:
        raise ValueError(f"pages of a span must not be negative, as {min(span.pages)} is.")


def _shifts(group: Group) -> Sequence[int] | Numbers:
    return [0] * len(group.query_index) if group.query_shift is None else group.query_shift
