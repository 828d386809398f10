"""Validation of the arguments of one call of `attend`."""

from __future__ import annotations

import torch
from torch import Tensor

from spanlab_kernels.angles import AngleTable
from spanlab_kernels.attention.batch import Scores, SpanBatch

FORMS = ("KR", "QR", "MAT")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 256


def check(query: Tensor, key_pages: Tensor, value_pages: Tensor, batch: SpanBatch, scores: Scores) -> None:
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
    _check_table(table, query, batch, form)


def _check_query(query: Tensor, batch: SpanBatch) -> None:
    if query.ndim != 3 or query.dtype not in DTYPES:
        raise ValueError(
            f"query must be [rows, heads, head_dim] in float32, float16 or bfloat16, "
            f"not {tuple(query.shape)} in {query.dtype}."
        )
    if len(query) != batch.rows:
        raise ValueError(f"query must have the rows of its batch, {batch.rows}, not {len(query)}.")
    if query.device != batch.device:
        raise ValueError(f"query must lie on the device of its batch, {batch.device}, not on {query.device}.")
    if query.stride(2) != 1:
        raise ValueError(f"query must have its channels next to each other, not strides {query.stride()}.")
    if query.shape[2] % 2 or query.shape[2] > MAX_HEAD_DIM:
        raise ValueError(f"head_dim of query must be even and at most {MAX_HEAD_DIM}, not {query.shape[2]}.")


def _check_pages(name: str, pages: Tensor, query: Tensor, batch: SpanBatch) -> None:
    if pages.ndim != 4 or not pages.is_contiguous() or (pages.dtype, pages.device) != (query.dtype, query.device):
        raise ValueError(
            f"{name} must be contiguous [pages, page_size, kv_heads, head_dim] in {query.dtype} on {query.device}, "
            f"not {tuple(pages.shape)} in {pages.dtype} on {pages.device} with strides {pages.stride()}."
        )
    count, page_size, heads, head_dim = pages.shape
    if page_size != batch.page_size:
        raise ValueError(f"{name} must have pages of the batch's size, {batch.page_size}, not {page_size}.")
    if count < batch.page_count:
        raise ValueError(f"{name} must have at least {batch.page_count} pages, which the batch names, not {count}.")
    if head_dim != query.shape[2]:
        raise ValueError(f"{name} must have the head_dim of query, {query.shape[2]}, not {head_dim}.")
    if not heads or query.shape[1] % heads:
        raise ValueError(f"{name} must have a number of kv heads that divides {query.shape[1]}, not {heads}.")


def _check_table(table: AngleTable, query: Tensor, batch: SpanBatch, form: str) -> None:
    if table.rotary_dim > query.shape[2]:
        raise ValueError(f"table.rotary_dim must be at most head_dim, {query.shape[2]}, not {table.rotary_dim}.")
    if table.device != query.device:
        raise ValueError(f"table must lie on the device of query, {query.device}, not on {table.device}.")
    reach = batch.reach(form)
    if table.length <= reach:
        raise ValueError(f"table.length must exceed the largest shift of form {form}, {reach}, not {table.length}.")
