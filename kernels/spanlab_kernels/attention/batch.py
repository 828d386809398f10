"""What one call of `attend` reads: groups of packed query rows, and for each the spans of the paged pool it sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

ALIGNED = 4  # int32 numbers in 16 bytes: Triton compiles one kernel more for every pointer that is not so aligned


@dataclass(frozen=True)
class Span:
    """A run of keys in the pool, as one prompt sees it.

    Its key j, for j in [0, length), takes place `index` + j in the prompt and is rotated as for `position` + j. Keys
    lie in `pages` one after the other, beginning at slot `offset` of the first of them. In form QR, where keys are
    stored rotated already, `position` is where a key of angle 0 would stand: for a part of what was stored together,
    the position of the whole's first key.
    """

    index: int
    length: int
    position: int
    pages: Sequence[int]
    offset: int = 0


@dataclass(frozen=True)
class Group:
    """Query rows that see the same spans, each the keys whose place is at most its own.

    `query_index` has the place of each row in the prompt, in any order, and `query_shift` the positions by which it
    still has to be rotated; none where it comes rotated to its position.
    """

    query_index: Sequence[int]
    spans: Sequence[Span]
    query_shift: Sequence[int] | None = None


class Keys(NamedTuple):
    """Every key of every span of a batch in order, int64 [K]: slot in the pool, place and position in its prompt."""

    slot: Tensor
    place: Tensor
    position: Tensor


@dataclass(frozen=True, eq=False)
class SpanBatch:
    """Groups flattened to int32 tensors on one device, for G groups of T rows and S spans; made by `span_batch`.

    Rows of group g are [query_starts[g], query_starts[g + 1]), its spans [span_starts[g], span_starts[g + 1]), and the
    pages of span s pages[span_pages[s]:span_pages[s + 1]]. The tensors are not to be changed: plans are kept by batch.
    """

    query_starts: Tensor  # [G + 1]
    query_index: Tensor  # [T]
    query_shift: Tensor  # [T]
    span_starts: Tensor  # [G + 1]
    span_index: Tensor  # [S]
    span_length: Tensor  # [S]
    span_position: Tensor  # [S]
    span_pages: Tensor  # [S + 1]
    span_offset: Tensor  # [S]
    pages: Tensor
    key_starts: Tensor  # [S + 1]: keys of all spans before this one, over all groups
    one_row_groups: Tensor  # groups of exactly one row, as in decoding
    page_size: int
    page_count: int  # pages that the pool must have at least
    max_rows: int  # of a group
    max_keys: int  # of a group
    min_shift: int  # of a query, 0 where none is negative
    max_shift: int  # of a query, 0 where none is positive
    max_position: int  # of a key, 0 without keys

    @property
    def rows(self) -> int:
        """Query rows of all groups, T."""
        return len(self.query_index)

    @property
    def groups(self) -> int:
        """Groups, G."""
        return len(self.query_starts) - 1

    @property
    def shifted(self) -> bool:
        """Whether any query still has to be rotated on its own."""
        return self.min_shift < 0 or self.max_shift > 0

    @property
    def device(self) -> torch.device:
        """Where the tensors lie."""
        return self.pages.device

    def reach(self, form: str) -> int:
        """The largest shift, by magnitude, that `form` asks of the angle table."""
        queries = max(self.max_shift, -self.min_shift)
        if form == "MAT":
            return queries
        return max(queries, self.max_position - (self.min_shift if form == "QR" else 0))

    def keys(self) -> Keys:
        """All keys one by one, for what does not walk the spans itself."""
        length = self.span_length.long()
        span = torch.repeat_interleave(torch.arange(len(length), device=self.device), length)
        within = torch.arange(len(span), device=self.device) - self.key_starts[span]
        from_page = self.span_offset[span] + within
        page = self.pages[self.span_pages[span] + from_page // self.page_size].long()
        slot = page * self.page_size + from_page % self.page_size
        return Keys(slot, self.span_index[span] + within, self.span_position[span] + within)


def span_batch(groups: Sequence[Group], device: torch.device | str = "cpu", *, page_size: int) -> SpanBatch:
    """Flatten `groups` and bring them to `device` in one transfer; ValueError for what cannot be.

    `page_size` is that of the pool, a power of two. The pages of a span are as many as its offset and length need.
    """
    if page_size < 1 or page_size & (page_size - 1):
        raise ValueError(f"page_size must be a power of two, not {page_size}.")
    for group in groups:
        _check_group(group, page_size)
    spans = [span for group in groups for span in group.spans]
    rows = [len(group.query_index) for group in groups]
    index = [int(place) for group in groups for place in group.query_index]
    shift = [int(by) for group in groups for by in _shifts(group)]
    pages = [int(page) for span in spans for page in span.pages]
    tensors = _to_device(
        {
            "query_starts": _starts(rows),
            "query_index": index,
            "query_shift": shift,
            "span_starts": _starts([len(group.spans) for group in groups]),
            "span_index": [span.index for span in spans],
            "span_length": [span.length for span in spans],
            "span_position": [span.position for span in spans],
            "span_pages": _starts([len(span.pages) for span in spans]),
            "span_offset": [span.offset for span in spans],
            "pages": pages,
            "key_starts": _starts([span.length for span in spans]),
            "one_row_groups": [group for group, count in enumerate(rows) if count == 1],
        },
        device,
    )
    return SpanBatch(
        **tensors,
        page_size=page_size,
        page_count=max(pages, default=-1) + 1,
        max_rows=max(rows, default=0),
        max_keys=max((sum(span.length for span in group.spans) for group in groups), default=0),
        min_shift=min(0, min(shift, default=0)),
        max_shift=max(0, max(shift, default=0)),
        max_position=max((span.position + span.length - 1 for span in spans), default=0),
    )


def _shifts(group: Group) -> Sequence[int]:
    return [0] * len(group.query_index) if group.query_shift is None else group.query_shift


def _check_group(group: Group, page_size: int) -> None:
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


def _starts(lengths: Sequence[int]) -> list[int]:
    return [0, *accumulate(lengths)]


def _to_device(numbers: dict[str, list[int]], device: torch.device | str) -> dict[str, Tensor]:
    padded = [len(values) + -len(values) % ALIGNED for values in numbers.values()]
    packed = torch.zeros(sum(padded), dtype=torch.int32)
    for values, part in zip(numbers.values(), packed.split(padded), strict=True):
        part[: len(values)] = torch.tensor(values, dtype=torch.int32)
    parts = packed.to(device).split(padded)
    return {name: part[: len(values)] for (name, values), part in zip(numbers.items(), parts, strict=True)}
