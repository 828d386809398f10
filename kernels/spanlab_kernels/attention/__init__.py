"""Attention of packed queries over spans of a paged pool, in three forms of the same mathematics.

A stored span s begins at a different position in every prompt that reads it. Since R(a) R(b) = R(a
+ b) and rotations are orthogonal, ⟨R(p) q, R(o + j) k⟩ = ⟨R(p - o) q, R(j) k⟩, and the rotation can
be done in three ways:

KR   keys are stored un-rotated and rotated when they are read (deferred RoPE);
QR   keys are stored rotated by their position within the span, and the query is rotated once per
     span;
MAT  keys are stored rotated to their final position, and only queries are rotated, by their own
     shift.
"""

from __future__ import annotations

from torch import Tensor

from spanlab_kernels import AngleTable, uses_triton
from spanlab_kernels.attention import cpu, reference
from spanlab_kernels.attention.batch import (
    FORMS,
    Group,
    GroupArrays,
    Scores,
    Send,
    Span,
    SpanBatch,
    Spans,
    check,
    flatten,
    joined,
    pack,
    span_batch,
    to_device,
)
from spanlab_kernels.attention.reference import key_mass

__all__ = [
    "FORMS",
    "Group",
    "GroupArrays",
    "Scores",
    "Send",
    "Span",
    "SpanBatch",
    "Spans",
    "attend",
    "flatten",
    "joined",
    "key_mass",
    "pack",
    "span_batch",
    "to_device",
]


def attend(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    batch: SpanBatch,
    *,
    form: str,
    table: AngleTable,
    scale: float,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """Softmax attention of `query` [T, Hq, D] over the spans of `batch` in pages [P, page_size,
    Hkv, D].

    Key j of span s has index span_index[s] + j in its prompt, and row i sees it iff that is at most
    query_index[i]. The score is scale · ⟨R(a) q, R(b) k⟩, with a = query_shift[i] -
    (span_position[s] in form QR) and b = span_position[s] + j in form KR, 0 else. R rotates the
    first `table.rotary_dim` channels: pairs (i, i + rotary_dim / 2), or (2i, 2i + 1) when
    `interleaved`. Query head h reads kv head h // (Hq / Hkv). Rotation and softmax are float32.

    Returns out [T, Hq, D] in the dtype of `query` and the log-sum-exp of the scores, natural,
    float32 [T, Hq]; 0 and -inf for a row that sees no key. Every key of a span must have been
    written, also those that no row sees. A page may occur in several spans and groups, at different
    positions. ValueError for arguments that do not match.
    """
    scores = Scores(form, table, scale, interleaved)
    check(query, key_pages, value_pages, batch, scores)
    if uses_triton(query):
        from spanlab_kernels.attention import triton

        implementation = triton.attend
    else:
        implementation = reference.attend if query.is_cuda else cpu.attend
    return implementation(query, key_pages, value_pages, batch, scores)
