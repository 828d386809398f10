"""Reference of attention over spans: every score in float32, a block of rows at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from spanlab_kernels.angles import AngleTable
from spanlab_kernels.attention.batch import Scores, SpanBatch
from spanlab_kernels.rope import reference as rope

SCORES = 1 << 24  # in memory at once: 64 MiB of float32


def attend(
    query: Tensor, key_pages: Tensor, value_pages: Tensor, batch: SpanBatch, scores: Scores
) -> tuple[Tensor, Tensor]:
    """The contract of `spanlab_kernels.attention.attend`, whose checks come first; runs on any device."""
    out, lse = torch.empty_like(query), query.new_empty(query.shape[:2], dtype=torch.float32)
    values, (slot, *_) = value_pages.flatten(0, 1), batch.keys()
    for rows, keys, products in score_blocks(query, key_pages, batch, scores):
        scaled = products * scores.scale
        lse[rows] = scaled.logsumexp(-1)
        out[rows] = _weighted(scaled, lse[rows], values[slot[keys]].float()).to(out.dtype)
    return out, lse


def score_blocks(
    query: Tensor, key_pages: Tensor, batch: SpanBatch, scores: Scores
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Rows, the batch's keys that their group reads, and their unscaled scores, -inf for keys that a row cannot see."""
    form, table, _, interleaved = scores
    slot, prompt_index, position = batch.keys()
    starts, spans, keys = (numbers.tolist() for numbers in batch.starts)
    lengths, first_position = batch.starts.keys[1:] - batch.starts.keys[:-1], batch.positions.tolist()
    for group in range(batch.groups):
        first, last = spans[group], spans[group + 1]
        here = slice(keys[first], keys[last])
        key = key_pages.flatten(0, 1)[slot[here]].float()
        if form == "KR":
            key = _rotate(key, position[here], table, interleaved)
        # keys of each span, and the shift that rotates them to their positions
        span_keys = list(zip(key.split(lengths[first:last].tolist()), first_position[first:last], strict=True))
        for rows in _blocks(starts[group], starts[group + 1], query.shape[1] * len(key)):
            shift = batch.query_shift[rows]
            products = [query.new_empty((len(shift), query.shape[1], 0), dtype=torch.float32)]
            for span_key, key_shift in span_keys:
                rotation = shift - key_shift if form == "QR" else shift
                products.append(_products(_rotate(query[rows].float(), rotation, table, interleaved), span_key))
            unseen = prompt_index[here] > batch.query_index[rows, None]
            yield rows, here, torch.cat(products, -1).masked_fill(unseen[:, None], -torch.inf)


def _blocks(first: int, last: int, scores_per_row: int) -> Iterator[slice]:
    step = max(1, SCORES // max(1, scores_per_row))
    for start in range(first, last, step):
        yield slice(start, min(start + step, last))


def _rotate(x: Tensor, shift: Tensor, table: AngleTable, interleaved: bool) -> Tensor:
    return rope.rotate(x, shift, table, interleaved=interleaved, out=torch.empty_like(x))


def _products(query: Tensor, key: Tensor) -> Tensor:
    """Dot products [rows, heads, keys] of queries [rows, heads, D] with keys [keys, kv_heads, D]."""
    folded = query.unflatten(1, (key.shape[1], -1))
    return torch.einsum("rhgd,khd->rhgk", folded, key).flatten(1, 2)


def _weighted(scores: Tensor, lse: Tensor, value: Tensor) -> Tensor:
    """Values weighted by softmax of the scores; 0 for a row whose lse is -inf, since it sees no key."""
    weights = (scores - torch.where(lse == -torch.inf, 0.0, lse)[..., None]).exp()
    folded = weights.unflatten(1, (value.shape[1], -1))
    return torch.einsum("rhgk,khd->rhgd", folded, value).flatten(1, 2)
