"""Prompts over stored documents, their storage in each form, and a dense reference without pages."""

import random
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from spanlab_kernels.attention.batch import Group, Scores, Span, SpanBatch, span_batch
from spanlab_kernels.blocks import angle_table
from spanlab_kernels.testing import RopeCase, agrees, fresh, inverse_powers, random_tensor

SCALE = 0.125
ANGLES = 4096


@dataclass(frozen=True)
class Shape:
    """Parameters of a call, except its layout."""

    page_size: int = 16
    head_dim: int = 64
    rotary_dim: int = 64
    interleaved: bool = False
    kv_heads: int = 1
    group_heads: int = 2
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        pairs = "interleaved" if self.interleaved else "halves"
        heads = f"{self.kv_heads}x{self.group_heads}"
        return f"page{self.page_size}-{heads}x{self.head_dim}r{self.rotary_dim}-{pairs}-{str(self.dtype)[6:]}"

    @property
    def options(self):
        return {"scale": SCALE, "interleaved": self.interleaved}

    def table(self, device="cpu"):
        return angle_table(inverse_powers(self.rotary_dim), ANGLES, device)


@dataclass(frozen=True)
class Use:
    """Keys [first, first + length) of a document at `index` of a prompt, rotated from `position` on."""

    document: int
    index: int
    position: int
    length: int
    first: int = 0


@dataclass(frozen=True)
class Prompt:
    """Rows by index, shifted by `shift` or, if None, by their index; and the documents that they see."""

    rows: list[int]
    uses: list[Use]
    shift: list[int] | None = None

    @property
    def shifts(self):
        return self.rows if self.shift is None else self.shift


@dataclass(frozen=True)
class Layout:
    """Lengths of the stored documents, and the prompts of one call."""

    documents: list[int]
    prompts: list[Prompt]

    @property
    def rows(self):
        return sum(len(prompt.rows) for prompt in self.prompts)


@dataclass(frozen=True)
class Content:
    """Random queries and un-rotated keys and values of a layout, on the CPU."""

    layout: Layout
    shape: Shape
    query: Tensor
    keys: list[Tensor]
    values: list[Tensor]


def fill(layout: Layout, shape: Shape, seed: int = 0) -> Content:
    heads = shape.kv_heads * shape.group_heads
    query = random_tensor(layout.rows, heads, shape.head_dim, dtype=shape.dtype, seed=seed)
    rows = random_tensor(2, sum(layout.documents), shape.kv_heads, shape.head_dim, dtype=shape.dtype, seed=seed + 1)
    keys, values = (list(tensor.split(layout.documents)) for tensor in rows)
    return Content(layout, shape, query, keys, values)


def rotate(x: Tensor, shift, shape: Shape | RopeCase, base: float = 10_000.0) -> Tensor:
    """R(shift) x in float64, by complex numbers."""
    angle = torch.as_tensor(shift, dtype=torch.float64).reshape(-1, 1, 1) * inverse_powers(shape.rotary_dim, base)
    out = x.double().clone()
    pairs = out[..., : shape.rotary_dim]
    first, second = (pairs[..., 0::2], pairs[..., 1::2]) if shape.interleaved else pairs.chunk(2, -1)
    rotated = torch.complex(first, second) * torch.exp(1j * angle)
    first.copy_(rotated.real)
    second.copy_(rotated.imag)
    return out


def dense(content: Content) -> tuple[Tensor, Tensor]:
    """out and lse in float64, one row at a time, from raw keys."""
    shape, outs, logs = content.shape, [], []
    queries = iter(content.query)
    for prompt in content.layout.prompts:
        for index, shift in zip(prompt.rows, prompt.shifts, strict=True):
            q = rotate(next(queries)[None], [shift], shape)[0].unflatten(0, (shape.kv_heads, -1))
            scores, values = [], []
            for use in prompt.uses:
                visible = max(0, min(use.length, index - use.index + 1))
                document_range = slice(use.first, use.first + visible)
                k = rotate(
                    content.keys[use.document][document_range], range(use.position, use.position + visible), shape
                )
                scores.append(SCALE * torch.einsum("hgd,khd->hgk", q, k))
                values.append(content.values[use.document][document_range].double())
            # for a row without keys, the sum is 0 and its log -inf
            score = torch.cat([q.new_empty(*q.shape[:2], 0), *scores], -1)
            value = torch.cat([q.new_empty(0, shape.kv_heads, shape.head_dim), *values])
            outs.append(torch.einsum("hgk,khd->hgd", score.softmax(-1), value).flatten(0, 1))
            logs.append(score.logsumexp(-1).flatten())
    return torch.stack(outs), torch.stack(logs)


def in_torch(content: Content) -> tuple[Tensor, Tensor]:
    """out and lse of torch in the dtype of the content: rotated once, rounded, dense with a mask."""
    shape, outs, logs = content.shape, [], []
    queries = content.query.split([len(prompt.rows) for prompt in content.layout.prompts])
    for prompt, query in zip(content.layout.prompts, queries, strict=True):
        q = rotate(query, prompt.shifts, shape).to(shape.dtype)
        k, v, key_index, position = [content.keys[0][:0]], [content.values[0][:0]], [], []
        for use in prompt.uses:
            k.append(content.keys[use.document][use.first : use.first + use.length])
            v.append(content.values[use.document][use.first : use.first + use.length])
            key_index += range(use.index, use.index + use.length)
            position += range(use.position, use.position + use.length)
        k = rotate(torch.cat(k), position, shape).to(shape.dtype).repeat_interleave(shape.group_heads, 1)
        v = torch.cat(v).repeat_interleave(shape.group_heads, 1)
        key_index = torch.tensor(key_index, dtype=torch.int64)
        visible = key_index <= torch.tensor(prompt.rows, dtype=torch.int64)[:, None]
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        scores = (q.float() @ k.float().mT * SCALE).masked_fill(~visible, -torch.inf)
        out = scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=SCALE)
        outs.append(torch.where(visible.any(1)[:, None], out, 0).transpose(0, 1))
        logs.append(scores.logsumexp(-1).T)
    return torch.cat(outs), torch.cat(logs)


def store(content: Content, form: str, device="cpu", seed: int = 0) -> tuple[Tensor, Tensor, Tensor, SpanBatch]:
    """(query, key pages, value pages, batch) for `form`; unused pages are NaN.

    KR stores each document once and raw, QR once and rotated from position 0, MAT once for each use.
    """
    shape, generator = content.shape, random.Random(seed)
    size = shape.page_size
    uses = [use for prompt in content.layout.prompts for use in prompt.uses]
    # document, its range [start, stop) and the position of the first key of the range
    stored = [(n, 0, length, 0) for n, length in enumerate(content.layout.documents)]
    if form == "MAT":
        stored = [(use.document, use.first, use.first + use.length, use.position) for use in uses]
    offsets = [generator.randrange(size) for _ in stored]
    counts = [-(-(offset + stop - start) // size) for offset, (_, start, stop, _) in zip(offsets, stored, strict=True)]
    free = generator.sample(range(sum(counts) + 3), sum(counts))  # runs of pages are rare, and some pages are unused
    if generator.random() < 0.5:
        free.sort()
    pages = [[free.pop() for _ in range(count)][::-1] for count in counts]
    pools = [fresh(sum(counts) + 3, size, shape.kv_heads, shape.head_dim, dtype=shape.dtype) for _ in "kv"]
    for i, (document, start, stop, position) in enumerate(stored):
        slots = _slots(pages[i], offsets[i], stop - start, size)
        rotation = [0] if form == "KR" else range(position, position + stop - start)
        key = rotate(content.keys[document][start:stop], rotation, shape)
        pools[0].flatten(0, 1)[slots] = key.to(shape.dtype)
        pools[1].flatten(0, 1)[slots] = content.values[document][start:stop]
    indices = iter(range(len(uses)))
    groups = []
    for prompt in content.layout.prompts:
        spans = []
        for use in prompt.uses:
            i = next(indices)
            stored_index = i if form == "MAT" else use.document
            begin = offsets[stored_index] + (0 if form == "MAT" else use.first)
            last = (begin + use.length - 1) // size
            position = use.position - (use.first if form == "QR" else 0)
            span = Span(use.index, use.length, position, pages[stored_index][begin // size : last + 1], begin % size)
            spans.append(span)
        groups.append(Group(prompt.rows, spans, prompt.shifts))
    batch = span_batch(groups, device, page_size=size)
    return content.query.to(device), pools[0].to(device), pools[1].to(device), batch


def _slots(pages, offset, length, size):
    return torch.tensor([pages[(offset + j) // size] * size + (offset + j) % size for j in range(length)])


def direct(implementation):
    """An implementation with the arguments of `attention.attend`, called without its checks."""
    return lambda *inputs, form, table, scale, interleaved=False: implementation(
        *inputs, Scores(form, table, scale, interleaved)
    )


def run(attend, content: Content, form: str, device="cpu", seed: int = 0) -> tuple[Tensor, Tensor]:
    """Results on the CPU of `attend`, a function with the contract of `attention.attend`, in one form."""
    arguments = store(content, form, device, seed)
    out, lse = attend(*arguments, form=form, table=content.shape.table(device), **content.shape.options)
    return out.cpu(), lse.cpu()


def assert_is_dense(content: Content, form: str, attend, device="cpu", seed: int = 0) -> None:
    """float32 must agree to 1e-5: at a few units in the last place, the error of torch is random."""
    results, truths = run(attend, content, form, device, seed), dense(content)
    if content.shape.dtype == torch.float32:
        for result, truth in zip(results, truths, strict=True):
            torch.testing.assert_close(result.double(), truth, atol=1e-5, rtol=0)
        return
    for result, truth, in_same_dtype in zip(results, truths, in_torch(content), strict=True):
        assert agrees(result, truth, in_same_dtype, content.shape.dtype)


def in_a_row(lengths, rows, behind=0) -> Layout:
    """Consecutive documents in one prompt; its last `rows` tokens attend, shifted by `behind` tokens."""
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    end = sum(lengths) + behind
    uses = [Use(i, start, start, length) for i, (start, length) in enumerate(zip(starts, lengths, strict=True))]
    return Layout(list(lengths), [Prompt(list(range(end - rows, end)), uses)])


LAYOUTS = {
    "whole prompt": in_a_row([75], 75),
    "one key": in_a_row([1], 1),
    "chunk behind three documents": in_a_row([63, 1, 75, 20], 20),
    "chunk within its span": in_a_row([63, 75], 30),
    "decode": in_a_row([63, 75, 1], 1),
    "same document twice": Layout(
        [63, 9], [Prompt([*range(126, 135)], [Use(0, 0, 0, 63), Use(0, 63, 63, 63), Use(1, 126, 126, 9)])]
    ),
    "one document at two positions": Layout(
        [75, 5, 1],
        [
            Prompt([*range(75, 80)], [Use(0, 0, 0, 75), Use(1, 75, 75, 5)]),
            Prompt([300], [Use(0, 225, 225, 75), Use(2, 300, 300, 1)]),
        ],
    ),
    "far away": Layout(
        [75, 5], [Prompt([*range(75, 80)], [Use(0, 0, 3000, 75), Use(1, 75, 3075, 5)], [*range(3075, 3080)])]
    ),
    "first keys replaced": Layout(
        [63, 75, 5, 4],
        [
            Prompt(
                [*range(63, 68), *range(138, 142)],
                [Use(0, 0, 0, 63), Use(2, 63, 63, 5), Use(1, 68, 68, 70, first=5), Use(3, 138, 138, 4)],
            )
        ],
    ),
    "scattered rows": Layout(
        [75, 63], [Prompt([130, 7, 70, 8, 9, 74, 75, 8, 100, 137, 0], [Use(0, 0, 0, 75), Use(1, 75, 75, 63)])]
    ),
    "rows that see nothing": Layout(
        [20, 7],
        [Prompt([0, 3, 4, 5], [Use(0, 5, 5, 20)]), Prompt([2], [Use(1, 3, 3, 7)]), Prompt([1, 2], []), Prompt([4], [])],
    ),
    "documents at one position": Layout(
        [40, 63, 3], [Prompt([103, 104, 105], [Use(0, 0, 7, 40), Use(1, 40, 7, 63), Use(2, 103, 70, 3)], [70, 71, 72])]
    ),
    "prefill and decode": Layout(
        [75, 33, 17],
        [
            Prompt([107], [Use(0, 0, 0, 75), Use(1, 75, 75, 33)]),
            Prompt([*range(17)], [Use(2, 0, 0, 17)]),
            Prompt([], [Use(0, 0, 0, 75)]),
            Prompt([49], [Use(1, 0, 0, 33), Use(2, 33, 33, 17)], [-5]),
            Prompt([90, 91], [Use(2, 0, 0, 17), Use(0, 17, 17, 75)]),
        ],
    ),
}
SHAPES = [
    Shape(),
    Shape(page_size=1, head_dim=80, rotary_dim=80, interleaved=True, kv_heads=2, group_heads=1),
    Shape(page_size=1, head_dim=96, rotary_dim=24, group_heads=7),
    Shape(page_size=64, head_dim=96, rotary_dim=96, kv_heads=2, group_heads=4),
    Shape(page_size=32, head_dim=64, rotary_dim=16, interleaved=True, kv_heads=2, group_heads=8),
    Shape(page_size=16, head_dim=128, rotary_dim=64, group_heads=4),
    Shape(page_size=1, head_dim=8, rotary_dim=8, kv_heads=2, group_heads=2),
    Shape(page_size=16, head_dim=8, rotary_dim=4, interleaved=True, kv_heads=2),
    Shape(page_size=16, head_dim=16, rotary_dim=4, kv_heads=2, group_heads=2),
]
