"""What is timed: one registry of cases, and how each becomes calls with an answer to check them by.

A case names its sizes; `build` makes its inputs on a device and returns its arms, which compute the same thing in
different ways. Every arm is judged by one truth, computed in float64 from inputs that were never rounded to the dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import ceil

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from spanlab_kernels import AngleTable
from spanlab_kernels.attention import attend
from spanlab_kernels.attention.batch import Group, Span, SpanBatch, span_batch
from spanlab_kernels.blocks import angle_table, copy, gather, rotate, rotate_reference
from spanlab_kernels.testing import Verdict, agrees, fresh, inverse_powers

PAGE = 16
SEED = 0
BASE = 500_000.0
SCORES = 1 << 26  # of the truth, held at once
TAIL = 64  # fresh keys behind the spans where there are fewer rows: question and answer so far
ONE_SPAN = "one span"
SDPA = "SDPA"


@dataclass(frozen=True)
class Arm:
    """One way to compute a case: the call that is timed, and what it must give, as `agrees` takes it.

    `read` finds the result of a call that returns none.
    """

    call: Callable[[], Tensor | None]
    truth: Tensor
    same_dtype: Tensor
    read: Callable[[], Tensor] | None = None

    def verdict(self, dtype: torch.dtype) -> Verdict:
        """Call once and judge."""
        result = self.call()
        result = self.read() if self.read else result
        assert result is not None, "a call without result needs to be read"
        return agrees(result, self.truth, self.same_dtype, dtype)


@dataclass(frozen=True)
class Work:
    """A case on a device: its arms, the bytes that each must move at least, and its floating-point operations."""

    arms: dict[str, Arm]
    moved_bytes: int
    operations: int


@dataclass(frozen=True)
class AttentionCase:
    """`requests` prompts of `keys` keys each, whose last `rows` tokens attend; the keys before lie in `spans` spans."""

    phase: str
    requests: int
    rows: int
    keys: int
    spans: int
    query_heads: int
    kv_heads: int
    head_dim: int = 128

    def __str__(self) -> str:
        return (
            f"{self.phase}, {self.requests} × {self.rows} rows, {self.keys} keys, {self.spans} spans, "
            f"GQA {self.query_heads // self.kv_heads}"
        )

    def build(self, dtype: torch.dtype, device: str) -> Work:
        """KR, QR and MAT over the spans, MAT over one span, and SDPA over keys that lie rotated in a row."""
        random = partial(_random, torch.Generator(device).manual_seed(SEED))
        query = random(self.requests * self.rows, self.query_heads, self.head_dim)
        key, value = (random(self.requests * self.keys, self.kv_heads, self.head_dim) for _ in "kv")
        table = angle_table(inverse_powers(self.head_dim, BASE), self.keys, device)
        many, one = self._batch(self.spans, device), self._batch(1, device)
        place = torch.arange(self.keys, dtype=torch.int32, device=device).repeat(self.requests)
        truth = self._truth(_rotate_exactly(query, one.query_index), _rotate_exactly(key, place), value)
        query = _rotate(query, one.query_index, table).to(dtype)
        final = _rotate(key, place, table)
        stored = {"KR": key, "QR": _rotate(key, _within(many), table), "MAT": final}
        value = value.to(dtype)

        calls = {SDPA: self._sdpa(query, final.to(dtype), value)}
        same_dtype = calls[SDPA]()
        for name, form, batch in (*((form, form, many) for form in stored), (ONE_SPAN, "MAT", one)):
            pools = (_pool(rows.to(dtype), batch) for rows in (stored[form], value))
            calls[name] = partial(_attend, query, *pools, batch, form=form, table=table, scale=self.head_dim**-0.5)
        arms = {name: Arm(call, truth, same_dtype) for name, call in calls.items()}
        return Work(arms, self._moved_bytes(dtype), self._operations())

    def _batch(self, spans: int, device: str) -> SpanBatch:
        """Ragged spans in pages that lie anywhere, each prompt's own."""
        generator = torch.Generator().manual_seed(spans)
        tail = max(self.rows, TAIL) if self.rows < self.keys else 0
        drawn = torch.randperm(self.keys - tail - 1, generator=generator)[: spans - 1]
        cuts = sorted({0, *(1 + drawn).tolist(), self.keys - tail, self.keys}) if spans > 1 else [0, self.keys]
        counts = [ceil((stop - start) / PAGE) for start, stop in pairwise(cuts)]
        free = iter(torch.randperm(self.requests * sum(counts), generator=generator).tolist())
        rows = range(self.keys - self.rows, self.keys)
        groups = []
        for _ in range(self.requests):
            pages = [[next(free) for _ in range(count)] for count in counts]
            placed = zip(pairwise(cuts), pages, strict=True)
            groups.append(Group(rows, [Span(start, stop - start, start, own) for (start, stop), own in placed]))
        return span_batch(groups, device, page_size=PAGE)

    def _truth(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Dense attention in float64, as many rows at a time as `SCORES` allows."""
        step = max(1, SCORES // (self.keys * self.query_heads))
        parts = []
        for q, k, v in zip(*(x.double().split(len(x) // self.requests) for x in (query, key, value)), strict=True):
            place = torch.arange(self.keys, device=query.device)
            for rows in torch.arange(self.rows, device=query.device).split(step):
                folded = q[rows].unflatten(1, (self.kv_heads, -1))
                scores = torch.einsum("rhgd,khd->rhgk", folded, k) * self.head_dim**-0.5
                unseen = place > (self.keys - self.rows + rows)[:, None]
                weights = scores.masked_fill_(unseen[:, None, None], -torch.inf).softmax(-1)
                parts.append(torch.einsum("rhgk,khd->rhgd", weights, v).flatten(1, 2))
        return torch.cat(parts)

    def _sdpa(self, query: Tensor, key: Tensor, value: Tensor) -> Callable[[], Tensor]:
        q, k, v = (x.unflatten(0, (self.requests, -1)).transpose(1, 2).contiguous() for x in (query, key, value))
        options = {"scale": self.head_dim**-0.5, "enable_gqa": True}
        if self.rows == self.keys:
            options["is_causal"] = True
        elif self.rows > 1:
            mask = causal_lower_right(self.rows, self.keys)
            # only CUDA's kernels know this mask by its kind; it is made outside of what is timed
            options["attn_mask"] = mask if query.is_cuda else mask._materialize(query.device)
        return lambda: scaled_dot_product_attention(q, k, v, **options).transpose(1, 2).flatten(0, 1)

    def _moved_bytes(self, dtype: torch.dtype) -> int:
        rows = 2 * self.keys * self.kv_heads + 2 * self.rows * self.query_heads  # keys and values; query and result
        return self.requests * rows * self.head_dim * dtype.itemsize

    def _operations(self) -> int:
        seen = self.rows * self.keys - self.rows * (self.rows - 1) // 2
        return 4 * self.requests * self.query_heads * self.head_dim * seen


@dataclass(frozen=True)
class RopeCase:
    """Keys that move, to other memory."""

    tokens: int
    heads: int
    head_dim: int = 128

    def __str__(self) -> str:
        return f"re-rotation, {self.tokens} tokens × {self.heads} heads"

    def build(self, dtype: torch.dtype, device: str) -> Work:
        """All by one shift, and each by its own."""
        x = _random(torch.Generator(device).manual_seed(SEED), self.tokens, self.heads, self.head_dim).to(dtype)
        out = fresh(*x.shape, dtype=dtype, device=device)
        table = angle_table(inverse_powers(self.head_dim, BASE), self.tokens + 1, device)
        each = torch.arange(self.tokens, dtype=torch.int32, device=device)
        arms = {}
        for name, shift in (("one shift", self.tokens), ("shift of each token", each)):
            truth = _rotate_exactly(x, torch.as_tensor(shift, device=device).expand(self.tokens))
            arms[name] = Arm(partial(rotate, x, shift, table, out=out), truth, truth.to(dtype))
        return Work(arms, 2 * x.numel() * dtype.itemsize, 3 * x.numel())


@dataclass(frozen=True)
class BlockCase:
    """Rows that move between pages lying anywhere."""

    slots: int
    heads: int
    head_dim: int = 128

    def __str__(self) -> str:
        return f"pages, {self.slots} rows × {self.heads} heads"

    def build(self, dtype: torch.dtype, device: str) -> Work:
        """Whole pages in random order: gathered into memory in order, and copied to other pages."""
        count = self.slots // PAGE
        order = torch.randperm(2 * count, generator=torch.Generator().manual_seed(SEED))
        slots = (order[:, None] * PAGE + torch.arange(PAGE)).flatten().to(device)
        source, target = slots.chunk(2)
        generator = torch.Generator(device).manual_seed(SEED)
        pages = _random(generator, 2 * count, PAGE, self.heads, self.head_dim).to(dtype)
        truth = pages.flatten(0, 1)[source]
        out = fresh(self.slots, self.heads, self.head_dim, dtype=dtype, device=device)

        copied = pages.flatten(0, 1)
        arms = {
            "gather": Arm(partial(gather, pages, source, out=out), truth, truth),
            "copy": Arm(partial(copy, pages, source, target), truth, truth, lambda: copied[target]),
        }
        return Work(arms, 2 * truth.numel() * dtype.itemsize, 0)


def _random(generator: torch.Generator, *shape: int) -> Tensor:
    """Standard normal numbers, made on the device that uses them: the largest cases have half a billion."""
    return torch.randn(shape, generator=generator, device=generator.device)


def _rotate(x: Tensor, shift: int | Tensor, table: AngleTable) -> Tensor:
    return rotate_reference(x, shift, table, interleaved=False, out=torch.empty_like(x))


def _rotate_exactly(x: Tensor, shift: Tensor) -> Tensor:
    """R(shift) x in float64, of pairs (i, i + D / 2)."""
    angles = torch.outer(shift.double(), inverse_powers(x.shape[-1], BASE).to(x.device))[:, None]
    rotated = torch.complex(*x.double().chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((rotated.real, rotated.imag), -1)


def _within(batch: SpanBatch) -> Tensor:
    """The place of every key within its span."""
    starts = torch.repeat_interleave(batch.span_position, batch.span_length.long())
    return (batch.keys().position - starts).to(torch.int32)


def _pool(rows: Tensor, batch: SpanBatch) -> Tensor:
    """Pages that hold the keys of `batch`, and NaN where no key lies."""
    pool = fresh(batch.page_count, PAGE, *rows.shape[1:], dtype=rows.dtype, device=rows.device)
    pool.flatten(0, 1)[batch.keys().slot] = rows
    return pool


def _attend(*inputs: Tensor | SpanBatch, **options: object) -> Tensor:
    return attend(*inputs, **options)[0]  # type: ignore[arg-type]


def _attention_cases(
    heads: int, lengths: tuple[int, ...], spans_of: tuple[int, ...], suffix: int, requests: int
) -> list[AttentionCase]:
    cases = []
    for keys in lengths:
        for kv_heads in (heads // 4, heads // 8):
            for spans in spans_of:
                cases += [
                    AttentionCase("prefill of a tail", 1, suffix, keys, spans, heads, kv_heads),
                    AttentionCase("prefill of all", 1, keys, keys, spans, heads, kv_heads),
                    AttentionCase("decode", requests, 1, keys, spans, heads, kv_heads),
                ]
    return cases


# Where there is no GPU the sizes are small, and float32 is what the engine computes in.
CASES: dict[str, list[AttentionCase | RopeCase | BlockCase]] = {
    "cuda": [
        *_attention_cases(32, (8192, 16_384, 32_768), (8, 64), 1024, 16),
        RopeCase(65_536, 8),
        BlockCase(65_536, 8),
    ],
    "cpu": [*_attention_cases(8, (1024,), (8,), 64, 4), RopeCase(8192, 2), BlockCase(8192, 2)],
}
DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}
