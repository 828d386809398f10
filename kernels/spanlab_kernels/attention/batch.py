"""Inputs of one call of `attend`: groups of query rows and their spans as tensors on one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spanlab_kernels.angles import AngleTable
from spanlab_kernels.attention.groups import Group, GroupArrays, Numbers, check_group, concatenated, flatten

ALIGNED = 4  # int32 numbers in 16 bytes: Triton compiles one kernel more for every pointer that is not so aligned

Send = Callable[[Sequence[Numbers], torch.dtype, torch.device], list[Tensor]]


class Scores(NamedTuple):
    """Arguments of `spanlab_kernels.attention.attend` that define the scores."""

    form: str
    table: AngleTable
    scale: float
    interleaved: bool


class Starts(NamedTuple):
    """First row and first span of each group [G + 1] and first key of each span [S + 1], int64 on the host."""

    rows: Numbers
    spans: Numbers
    keys: Numbers


class Keys(NamedTuple):
    """Every key of every span of a batch in order, int64 [K]: slot in the pool, index in the prompt, position."""

    slot: Tensor
    prompt_index: Tensor
    position: Tensor


@dataclass(frozen=True, eq=False)
class SpanBatch:
    """Groups flattened to int32 tensors on one device, for G groups of T rows and S spans.

    Rows of group g are [query_starts[g], query_starts[g + 1]), its spans [span_starts[g], span_starts[g + 1]), and the
    pages of span s begin at pages[span_pages[s]]. The tensors must not change: plans are cached by batch.
    """

    query_starts: Tensor  # [G + 1]
    query_index: Tensor  # [T]
    query_shift: Tensor  # [T]
    span_starts: Tensor  # [G + 1]
    span_index: Tensor  # [S]
    span_least: Tensor  # [S]: the least index of this span and of the later ones of its group
    span_length: Tensor  # [S]
    span_position: Tensor  # [S]
    span_pages: Tensor  # [S]
    span_offset: Tensor  # [S]
    pages: Tensor
    key_starts: Tensor  # [S + 1]: keys of all spans before this one, over all groups
    one_row_groups: Tensor  # groups of exactly one row, as in decoding
    page_size: int
    page_count: int  # least number of pages of the pool
    max_rows: int  # of a group
    max_keys: int  # of a group
    max_spans: int  # of a group
    key_count: int  # of all groups, or an upper bound
    min_shift: int  # of a query, 0 where none is negative
    max_shift: int  # of a query, 0 where none is positive
    max_position: int  # of a key, 0 without keys
    starts: Starts
    positions: Numbers  # of the spans, on the host [S]
    groups_on_host: GroupArrays | None = field(
        repr=False
    )  # the source of the batch; None if rows were chosen on the device

    @property
    def rows(self) -> int:
        """Number of query rows of all groups, T."""
        return len(self.query_index)

    @property
    def groups(self) -> int:
        """Number of groups, G."""
        return len(self.query_starts) - 1

    @property
    def shifted(self) -> bool:
        """Whether any query still has to be rotated by a shift of its row."""
        return self.min_shift < 0 or self.max_shift > 0

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.pages.device

    def reach(self, form: str) -> int:
        """The largest shift, by magnitude, that `form` looks up in the angle table."""
        queries = max(self.max_shift, -self.min_shift)
        if form == "MAT":
            return queries
        return max(queries, self.max_position - (self.min_shift if form == "QR" else 0))

    def keys(self) -> Keys:
        """All keys one by one, for code that does not iterate over spans."""
        length, count = self.span_length.long(), int(self.starts.keys[-1])
        span = torch.repeat_interleave(torch.arange(len(length), device=self.device), length, output_size=count)
        within = torch.arange(len(span), device=self.device) - self.key_starts[span]
        from_page = self.span_offset[span] + within
        page = self.pages[self.span_pages[span] + from_page // self.page_size].long()
        slot = page * self.page_size + from_page % self.page_size
        return Keys(slot, self.span_index[span] + within, self.span_position[span] + within)

    def of_rows(self, rows: Tensor) -> SpanBatch:
        """The batch of some rows, int64 [K] increasing, of a batch of one group, without a device synchronisation.

        `min_shift` and `max_shift` remain those of all rows.
        """
        assert self.groups == 1, "rows are chosen in a batch of one group"
        count, like = len(rows), {"dtype": torch.int32, "device": self.device}
        return replace(
            self,
            query_starts=torch.arange(2, **like) * count,
            query_index=self.query_index[rows],
            query_shift=self.query_shift[rows],
            one_row_groups=torch.zeros(int(count == 1), **like),
            max_rows=count,
            starts=self.starts._replace(rows=np.array([0, count])),
            groups_on_host=None,
        )


def span_batch(groups: Sequence[Group], device: torch.device | str = "cpu", *, page_size: int) -> SpanBatch:
    """Flatten `groups` and copy them to `device`; ValueError for invalid groups.

    `page_size` is that of the pool, a power of two. A span has as many pages as its offset and length need.
    """
    _check_page_size(page_size)
    for group in groups:
        check_group(group, page_size)
    spans = [span for group in groups for span in group.spans]
    table = concatenated([span.pages for span in spans])
    pages, count = torch.from_numpy(table.astype(np.int32)).to(device), int(table.max(initial=-1)) + 1
    firsts = starts_of(np.array([len(span.pages) for span in spans], np.int64))[:-1]
    arrays = flatten(groups)
    arrays = arrays._replace(of_span=arrays.of_span._replace(first_page=firsts))
    return pack(arrays, pages, page_size=page_size, page_count=count)


def pack(groups: GroupArrays, pages: Tensor, *, page_size: int, page_count: int, send: Send | None = None) -> SpanBatch:
    """Copy groups to the device of `pages`, int32, the page table that their spans refer to, in one transfer.

    `send` replaces `to_device`, and may copy the numbers later, before the batch is read. Every page in the table is
    less than `page_count`. ValueError for a page size that is no power of two.
    """
    _check_page_size(page_size)
    rows, spans, shift = groups.rows, groups.of_span, groups.query_shift
    starts = Starts(starts_of(rows), starts_of(groups.spans), starts_of(spans.length))
    arrays = {
        "query_starts": starts.rows,
        "query_index": groups.query_index,
        "query_shift": shift,
        "span_starts": starts.spans,
        "span_index": spans.index,
        "span_least": _least(spans.index, groups.spans),
        "span_length": spans.length,
        "span_position": spans.position,
        "span_pages": spans.first_page,
        "span_offset": spans.offset,
        "key_starts": starts.keys,
        "one_row_groups": np.flatnonzero(rows == 1),
    }
    tensors = (send or to_device)(list(arrays.values()), torch.int32, pages.device)
    return SpanBatch(
        **dict(zip(arrays, tensors, strict=True)),
        pages=pages,
        page_size=page_size,
        page_count=page_count,
        max_rows=int(rows.max(initial=0)),
        max_keys=int(np.diff(starts.keys[starts.spans]).max(initial=0)),
        max_spans=int(groups.spans.max(initial=0)),
        key_count=int(starts.keys[-1]),
        min_shift=int(shift.min(initial=0)),
        max_shift=int(shift.max(initial=0)),
        max_position=int((spans.position + spans.length).max(initial=1)) - 1,
        starts=starts,
        positions=spans.position,
        groups_on_host=groups,
    )


def _least(index: Numbers, spans: Numbers) -> Numbers:
    """The least index from each span to the last of its group, [S]; 0 for spans without a group."""
    group = np.repeat(np.arange(len(spans)), spans) << 32  # above any index, so that the minimum is within the group
    least = np.zeros_like(index)
    least[: len(group)] = np.minimum.accumulate((index[: len(group)] + group)[::-1])[::-1] - group
    return least


def to_device(arrays: Sequence[NDArray[Any]], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Copy arrays to aligned tensors on `device` in one transfer."""
    padded = [len(values) + -len(values) % ALIGNED for values in arrays]
    packed = torch.zeros(sum(padded), dtype=dtype, pin_memory=device.type == "cuda")
    numbers, start = packed.numpy(), 0
    for values, size in zip(arrays, padded, strict=True):
        numbers[start : start + len(values)] = values
        start += size
    tensors = packed.to(device, non_blocking=True).split(padded)
    return [tensor[: len(values)] for values, tensor in zip(arrays, tensors, strict=True)]


def _check_page_size(page_size: int) -> None:
    if page_size < 1 or page_size & (page_size - 1):
        raise ValueError(f"page_size must be a power of two, not {page_size}.")


def starts_of(lengths: Numbers) -> Numbers:
    """The start of each of consecutive ranges, and the end of the last one, int64 [lengths + 1]."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
