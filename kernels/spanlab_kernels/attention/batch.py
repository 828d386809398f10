"""Inputs of one call of `attend`: groups of query rows and their spans as tensors on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spanlab_kernels import AngleTable

# ------------------------------------------------------------------------------
# Groups of packed query rows and the spans of the paged pool that they see, as dataclasses and
# as arrays.
# ------------------------------------------------------------------------------

Numbers = NDArray[np.int64]


@dataclass(frozen=True)
class Span:
    """A run of keys in the pool, as one prompt sees it.

    Its key j, for j in [0, length), has index `index` + j in the prompt and is rotated to position
    `position` + j. Keys are consecutive in `pages`, from slot `offset` of the first page on. In
    form QR, where keys are stored rotated, `position` is that of a key stored at angle 0: for a
    part of a stored span, the position of the first key of the whole span. For a batch over a page
    table, `pages` is a range of indices of the table.
    """

    index: int
    length: int
    position: int
    pages: Sequence[int]
    offset: int = 0


@dataclass(frozen=True)
class Group:
    """Query rows that see the same spans; a row sees the keys whose index in the prompt is at most
    its own.

    `query_index` has the index of each row in the prompt, in any order, and `query_shift` the
    positions by which it still has to be rotated; None where rows are rotated to their positions
    already.
    """

    query_index: Sequence[int] | Numbers
    spans: Sequence[Span]
    query_shift: Sequence[int] | Numbers | None = None


class Spans(NamedTuple):
    """Spans as int64 arrays [S]: the fields of `Span`, with the index of the first page in a page
    table."""

    index: Numbers
    length: Numbers
    position: Numbers
    first_page: Numbers
    offset: Numbers

    def where(self, chosen: NDArray[np.bool_]) -> Spans:
        """The spans where the mask `chosen` [S] is true."""
        return Spans(*(values[chosen] for values in self))


class GroupArrays(NamedTuple):
    """Groups as int64 arrays: numbers of rows and spans [G], index and shift of all rows [T], and
    all spans."""

    rows: Numbers
    spans: Numbers
    query_index: Numbers
    query_shift: Numbers
    of_span: Spans


def flatten(groups: Sequence[Group]) -> GroupArrays:
    """Groups as arrays; the pages of their spans are ranges of indices of a page table."""
    spans = [
        (span.index, span.length, span.position, span.pages[0], span.offset)
        for group in groups
        for span in group.spans
    ]
    shifts = [
        [0] * len(group.query_index) if group.query_shift is None else group.query_shift
        for group in groups
    ]
    return GroupArrays(
        np.array([len(group.query_index) for group in groups], np.int64),
        np.array([len(group.spans) for group in groups], np.int64),
        concatenated([group.query_index for group in groups]),
        concatenated(shifts),
        Spans(*np.array(spans, np.int64).reshape(-1, len(Spans._fields)).T),
    )


def joined(parts: Sequence[GroupArrays]) -> GroupArrays:
    """The groups of all parts, in order."""
    if len(parts) == 1:
        return parts[0]
    *columns, of_span = zip(*parts, strict=True)
    return GroupArrays(
        *map(concatenated, columns), Spans(*map(concatenated, zip(*of_span, strict=True)))
    )


def concatenated(parts: Iterable[Sequence[int] | Numbers]) -> Numbers:
    """All parts as one int64 array."""
    return np.concatenate(
        [np.empty(0, np.int64), *(np.asarray(values, np.int64) for values in parts)]
    )


def check_group(group: Group, page_size: int) -> None:
    """Raise ValueError for a group that is invalid for a pool of this page size."""
    shift = group.query_shift
    if shift is not None and len(shift) != len(group.query_index):
        raise ValueError(
            f"query_shift must be as long as query_index, {len(group.query_index)}, not {len(shift)}."
        )
    if len(group.query_index) and min(group.query_index) < 0:
        raise ValueError(f"query_index must not be negative, as {min(group.query_index)} is.")
    for span in group.spans:
        if span.length < 1:
            raise ValueError(f"length of a span must be at least 1, not {span.length}.")
        if span.index < 0 or span.position < 0:
            raise ValueError(
                f"index and position of a span must not be negative, not {span.index} and {span.position}."
            )
        if not 0 <= span.offset < page_size:
            raise ValueError(
                f"offset of a span must lie in [0, {page_size}), its first page, not {span.offset}."
            )
        needed = -(-(span.offset + span.length) // page_size)
        if len(span.pages) != needed:
            subject = f"pages of a span of length {span.length} at offset {span.offset}"
            raise ValueError(f"{subject} must be {needed}, not {len(span.pages)}.")
        if min(span.pages) < 0:
            raise ValueError(f"pages of a span must not be negative, as {min(span.pages)} is.")


ALIGNED = 4  # int32 numbers in 16 bytes: Triton compiles one kernel more for every pointer that is not so aligned

Send = Callable[[Sequence[Numbers], torch.dtype, torch.device], list[Tensor]]


class Scores(NamedTuple):
    """Arguments of `spanlab_kernels.attention.attend` that define the scores."""

    form: str
    table: AngleTable
    scale: float
    interleaved: bool


class Starts(NamedTuple):
    """First row and first span of each group [G + 1] and first key of each span [S + 1], int64 on
    the host."""

    rows: Numbers
    spans: Numbers
    keys: Numbers


class Keys(NamedTuple):
    """Every key of every span of a batch in order, int64 [K]: slot in the pool, index in the
    prompt, position."""

    slot: Tensor
    prompt_index: Tensor
    position: Tensor


@dataclass(frozen=True, eq=False)
class SpanBatch:
    """Groups flattened to int32 tensors on one device, for G groups of T rows and S spans.

    Rows of group g are [query_starts[g], query_starts[g + 1]), its spans [span_starts[g],
    span_starts[g + 1]), and the pages of span s begin at pages[span_pages[s]]. The tensors must not
    change: plans are cached by batch.
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
    # the source of the batch; None if rows were chosen on the device
    groups_on_host: GroupArrays | None = field(repr=False)

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
        span = torch.repeat_interleave(
            torch.arange(len(length), device=self.device), length, output_size=count
        )
        within = torch.arange(len(span), device=self.device) - self.key_starts[span]
        from_page = self.span_offset[span] + within
        page = self.pages[self.span_pages[span] + from_page // self.page_size].long()
        slot = page * self.page_size + from_page % self.page_size
        return Keys(slot, self.span_index[span] + within, self.span_position[span] + within)

    def of_rows(self, rows: Tensor) -> SpanBatch:
        """The batch of some rows, int64 [K] increasing, of a batch of one group, without a device
        synchronisation.

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


def span_batch(
    groups: Sequence[Group], device: torch.device | str = "cpu", *, page_size: int
) -> SpanBatch:
    """Flatten `groups` and copy them to `device`; ValueError for invalid groups.

    `page_size` is that of the pool, a power of two. A span has as many pages as its offset and
    length need.
    """
    _check_page_size(page_size)
    for group in groups:
        check_group(group, page_size)
    spans = [span for group in groups for span in group.spans]
    table = concatenated([span.pages for span in spans])
    pages = torch.from_numpy(table.astype(np.int32)).to(device)
    count = int(table.max(initial=-1)) + 1
    firsts = starts_of(np.array([len(span.pages) for span in spans], np.int64))[:-1]
    arrays = flatten(groups)
    arrays = arrays._replace(of_span=arrays.of_span._replace(first_page=firsts))
    return pack(arrays, pages, page_size=page_size, page_count=count)


def pack(
    groups: GroupArrays, pages: Tensor, *, page_size: int, page_count: int, send: Send | None = None
) -> SpanBatch:
    """Copy groups to the device of `pages`, int32, the page table that their spans refer to, in one
    transfer.

    `send` replaces `to_device`, and may copy the numbers later, before the batch is read. Every
    page in the table is less than `page_count`. ValueError for a page size that is no power of two.
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
    # above any index, so that the minimum is within the group
    group = np.repeat(np.arange(len(spans)), spans) << 32
    least = np.zeros_like(index)
    least[: len(group)] = np.minimum.accumulate((index[: len(group)] + group)[::-1])[::-1] - group
    return least


def to_device(
    arrays: Sequence[NDArray[Any]], dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
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


# ------------------------------------------------------------------------------
# Validation of the arguments of one call of `attend`.
# ------------------------------------------------------------------------------

FORMS = ("KR", "QR", "MAT")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256


def check(
    query: Tensor, key_pages: Tensor, value_pages: Tensor, batch: SpanBatch, scores: Scores
) -> None:
    """Raise ValueError for the first invalid argument, without reading numbers from the device."""
    form, table, scale, _ = scores
    if form not in FORMS:
        raise ValueError(f"form must be one of {', '.join(FORMS)}, not {form!r}.")
    if not 0 < scale < float("inf"):
        raise ValueError(f"scale must be positive and finite, not {scale}.")
    _check_query(query, batch)
    for name, pages in (("key_pages", key_pages), ("value_pages", value_pages)):
        _check_pages(name, pages, query, batch)
    if key_pages.shape != value_pages.shape:
        raise ValueError(
            f"value_pages must be like key_pages, {tuple(key_pages.shape)}, not {tuple(value_pages.shape)}."
        )
    if table.rotary_dim > query.shape[2]:
        raise ValueError(
            f"table.rotary_dim must be at most head_dim, {query.shape[2]}, not {table.rotary_dim}."
        )
    if table.device != query.device:
        raise ValueError(
            f"table must lie on the device of query, {query.device}, not on {table.device}."
        )
    reach = batch.reach(form)
    if table.length <= reach:
        raise ValueError(
            f"table.length must exceed the largest shift of form {form}, {reach}, not {table.length}."
        )


def _check_query(query: Tensor, batch: SpanBatch) -> None:
    if query.ndim != 3 or query.dtype not in DTYPES:
        raise ValueError(
            f"query must be [rows, heads, head_dim] in float32, float16 or bfloat16, "
            f"not {tuple(query.shape)} in {query.dtype}."
        )
    if len(query) != batch.rows:
        raise ValueError(f"query must have the rows of its batch, {batch.rows}, not {len(query)}.")
    if query.device != batch.device:
        raise ValueError(
            f"query must lie on the device of its batch, {batch.device}, not on {query.device}."
        )
    if query.stride(2) != 1:
        raise ValueError(
            f"query must have its channels next to each other, not strides {query.stride()}."
        )
    if query.shape[2] % 2 or query.shape[2] > MAX_HEAD_DIM:
        raise ValueError(
            f"head_dim of query must be even and at most {MAX_HEAD_DIM}, not {query.shape[2]}."
        )


def _check_pages(name: str, pages: Tensor, query: Tensor, batch: SpanBatch) -> None:
    if (
        pages.ndim != 4
        or not pages.is_contiguous()
        or (pages.dtype, pages.device) != (query.dtype, query.device)
    ):
        raise ValueError(
            f"{name} must be contiguous [pages, page_size, kv_heads, head_dim] in {query.dtype} on {query.device}, "
            f"not {tuple(pages.shape)} in {pages.dtype} on {pages.device} with strides {pages.stride()}."
        )
    count, page_size, heads, head_dim = pages.shape
    if page_size != batch.page_size:
        raise ValueError(
            f"{name} must have pages of the batch's size, {batch.page_size}, not {page_size}."
        )
    if count < batch.page_count:
        raise ValueError(
            f"{name} must have at least {batch.page_count} pages, which the batch names, not {count}."
        )
    if head_dim != query.shape[2]:
        raise ValueError(
            f"{name} must have the head_dim of query, {query.shape[2]}, not {head_dim}."
        )
    if not heads or query.shape[1] % heads:
        raise ValueError(
            f"{name} must have a number of kv heads that divides {query.shape[1]}, not {heads}."
        )
