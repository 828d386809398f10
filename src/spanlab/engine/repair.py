"""Repairs of reused spans: which rows a method computes again, and what was measured of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spanlab.core.repair import Repair
from spanlab.core.step import ScheduledChunk, ScheduledSequence
from spanlab.engine.hook import Attend, Keep, Project, Projected
from spanlab.engine.model import AttentionContext
from spanlab.engine.pages import TransferBatch
from spanlab.engine.request_state import RequestState
from spanlab.engine.rows import (
    Packer,
    QueryRows,
    attention_of,
    chunk_rows,
    probe_rows,
    reading_before,
    rows_of_query,
)
from spanlab_kernels.attention.batch import to_device

# ------------------------------------------------------------------------------
# Selection of the rows that a measured repair computes in each layer.
# ------------------------------------------------------------------------------

HOST = torch.device("cpu")


class RowChooser:
    """Selects rows during a forward by their scores; rows that are not `free` are always computed.

    Single selection: the `count` free rows with the highest scores at the layer that `Repair`
    names. Gradual selection: from 1.5 to 0.5 of `count` rows, `count` on average, scored in every
    layer among the remaining rows.

    `rows`  indices, increasing, of the rows that are still computed
    """

    def __init__(
        self,
        rule: Repair,
        count: int,
        layers: int,
        free: NDArray[np.bool_],
        device: torch.device = HOST,
    ) -> None:
        self._layers = layers
        (self._free,) = to_device([free], torch.bool, device)
        # the first layer that computes fewer rows in full
        self._first = min(rule.shallow_layers, layers)
        self._gradual = rule.kind == "deviation_gradual"
        self._filters_queries = rule.filters_queries
        self._count, self._total = count, int(np.count_nonzero(free))
        self.rows = torch.arange(len(free), device=device)
        self._scores = torch.zeros(len(free), dtype=torch.float32, device=device)

    def projects(self, layer: int) -> bool:
        """Whether this layer's projections select the rows for the rest of the same layer."""
        return self._filters_queries and layer == self._first

    def measures(self, layer: int) -> bool:
        """Whether this layer's keys and values select the rows of the next layer."""
        return (
            not self._filters_queries
            and layer + 1 >= self._first
            and (self._gradual or layer + 1 == self._first)
        )

    def rank(self, scores: Tensor) -> None:
        """Set the scores, float32 [T], of the remaining rows."""
        self._scores = torch.where(self._free[self.rows], scores, torch.inf)

    def keep(self, layer: int) -> Tensor | None:
        """Select among the rows that enter `layer`; return their indices, or None to compute all of
        them."""
        if layer < self._first or not (self.projects(layer) or self.measures(layer - 1)):
            return None
        if not self._gradual or self._layers - self._first < 2:
            count = self._count
        else:
            spread = min(0.5, (self._total - self._count) / max(self._count, 1))
            passed = (layer - self._first) / (self._layers - self._first - 1)
            count = round(self._count * (1 + spread * (1 - 2 * passed)))
        target = count + len(self._free) - self._total
        if target >= len(self.rows):
            return None
        chosen = self._scores.topk(target).indices.sort().values
        self.rows = self.rows[chosen]
        return chosen


# ------------------------------------------------------------------------------
# Forwards of repairs that select among their rows; KV writes and attention follow the remaining
# rows.
# ------------------------------------------------------------------------------

_SCORED = {"keys": (0,), "values": (1,), "both": (0, 1)}


class NoRowsLeft(Exception):  # noqa: N818 - control flow, no error
    """Stops a forward without remaining rows, because transformers' layers accept no empty
    batch."""


class Blend(ABC):
    """The attention of one repair, and the selection of `count` of its free rows during the
    forward."""

    def __init__(
        self, rule: Repair, count: int, rows: QueryRows, context: AttentionContext
    ) -> None:
        self._rule, self._pool, device = rule, context.pool, context.model.device
        (self._slots,) = to_device([rows.slots], torch.int64, device)
        self._chooser = RowChooser(rule, count, context.model.layers, rows.free, device)
        self._full_attention = self._attention = attention_of(context, rows)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """One layer's attention, see `hook.Attend`."""
        self._write(layer, key, value)
        return self._attention.attend(layer, query)

    def project(self, layer: int) -> Projected | None:
        """The callback for projections of a layer that filters its queries, see `hook.Project`."""
        return self._projected if self._chooser.projects(layer) else None

    def keep(self, layer: int) -> Tensor | None:
        """Select the rows of a layer, see `hook.Keep`; NoRowsLeft if none remain."""
        chosen = self._chooser.keep(layer)
        if chosen is not None and len(chosen) == 0:
            raise NoRowsLeft
        if chosen is not None:
            self._attention = self._full_attention.of_rows(self._chooser.rows)
        return chosen

    def _write(self, layer: int, key: Tensor, value: Tensor) -> None:
        self._pool.write(layer, self._slots[self._chooser.rows], key, value)

    @abstractmethod
    def _projected(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Rank the rows that reach a layer by its projections, and write keys and values if the
        rule requires it."""


class DeviationBlend(Blend):
    """CacheBlend: ranks tokens by the deviation of their new keys and values from the stored
    ones."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """One layer's attention; its keys and values rank the rows if rows are dropped between
        layers."""
        if self._chooser.measures(layer):
            self._measure(layer, key, value)
        return super().attend(layer, query, key, value)

    def _projected(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> None:
        self._measure(layer, key, value)
        if self._rule.writes == "all":
            self._write(layer, key, value)

    def _measure(self, layer: int, key: Tensor, value: Tensor) -> None:
        slots = self._slots[self._chooser.rows]
        stored = (
            self._pool.keys(layer).flatten(0, 1)[slots],
            self._pool.values(layer).flatten(0, 1)[slots],
        )
        self._chooser.rank(deviations(self._rule.score, (key, value), stored))


def deviations(score: str, new: tuple[Tensor, Tensor], stored: tuple[Tensor, Tensor]) -> Tensor:
    """Sum of squared differences [T] of new keys or values [T, Hkv, D], or both, from the stored
    ones; see `Repair`."""
    squares = [
        (new[index].float() - stored[index].float()).square().sum((1, 2))
        for index in _SCORED[score]
    ]
    return sum(squares[1:], squares[0])


class NeighbourBlend(Blend):
    """The neighbour-aware repair: ranks tokens by their attention to everything before their span.

    score(i) = Σ_h Σ_{j < start of i's span} a_h(i, j), with a the softmax over all of the prompt up
    to i at the check layer: Σ_h exp(lse over keys before the span - lse over all). Earlier layers
    compute all tokens with the full prompt visible, as in CacheBlend.

    `before`  the same rows by cache span, in order, each reading only the tokens before that span
    """

    def __init__(
        self,
        rule: Repair,
        count: int,
        rows: QueryRows,
        context: AttentionContext,
        before: list[QueryRows],
    ) -> None:
        super().__init__(rule, count, rows, context)
        self._before = attention_of(context, *before)

    def _projected(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> None:
        self._write(layer, key, value)
        before, total = (
            attention.attend_with_sums(layer, query)[1]
            for attention in (self._before, self._attention)
        )
        self._chooser.rank((before - total).exp().sum(-1))


# ------------------------------------------------------------------------------
# The query-aware repair: a separate forward selects the span tokens that the query attends to
# most.
# ------------------------------------------------------------------------------


class Probe:
    """The attention of a forward up to the last profiled layer, and the scores of span tokens.

    score(j) = Σ_l Σ_h Σ_i a_lh(i, j) over profiled layers l, heads h and tokens i of the query,
    with a the softmax over all of the prompt up to i, with spans as stored.

    `rows`        missing text between the spans, and the query at the end
    `query_rows`  the query's rows, restricted to the spans that tokens are selected from
    `layers`      profiled layers, increasing
    """

    def __init__(
        self,
        rows: QueryRows,
        query_rows: QueryRows,
        layers: Sequence[int],
        context: AttentionContext,
    ) -> None:
        self._pool, self._layers, device = context.pool, layers, context.model.device
        (self._slots,) = to_device([rows.slots], torch.int64, device)
        self._attention = attention_of(context, rows)
        self._query_attention = attention_of(context, query_rows)
        self._count = len(query_rows.indices)
        self._positions = np.concatenate(
            [np.arange(span.index, span.index + span.length) for span, _ in query_rows.spans]
        )
        self._scores = torch.zeros(len(self._positions), dtype=torch.float32, device=device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """One layer's attention, see `hook.Attend`; NoRowsLeft after the last profiled layer."""
        self._pool.write(layer, self._slots, key, value)
        out, sums = self._attention.attend_with_sums(layer, query)
        if layer in self._layers:
            self._scores += self._query_attention.mass(
                layer, query[-self._count :], sums[-self._count :]
            )
        if layer == self._layers[-1]:
            raise NoRowsLeft
        return out

    def chosen(self, count: int) -> np.ndarray:
        """Prompt positions of the `count` tokens with the highest scores, increasing."""
        return np.sort(self._positions[self._scores.topk(count).indices.cpu().numpy()])


# ------------------------------------------------------------------------------
# Forwards of measured repairs, which select the tokens to recompute from model outputs.
# ------------------------------------------------------------------------------


class MeasuredRepair:
    """A repair rule on one model: a blend recomputes tokens while it selects them, a probe only
    selects."""

    def __init__(self, rule: Repair, context: AttentionContext, packer: Packer) -> None:
        self._rule, self._context, self._packer = rule, context, packer

    def blend(self, request_state: RequestState, chunk: ScheduledChunk) -> None:
        """Recompute tokens selected among the rows of this forward; the selection changes from
        layer to layer."""
        rule, spans = self._rule, request_state.allocation.plan.spans
        everything = np.concatenate([np.arange(span.start, span.stop) for span in spans])
        rows, count = chunk_rows(request_state, chunk, everything), rule.count(spans)
        blend: Blend
        if rule.compares:
            blend = DeviationBlend(rule, count, rows, self._context)
        else:
            blend = NeighbourBlend(
                rule, count, rows, self._context, reading_before(request_state, rows)
            )
        self._run(chunk.sequence, rows, blend.attend, blend.keep, blend.project)

    def probe(self, request_state: RequestState, chunk: ScheduledChunk) -> np.ndarray:
        """Prompt positions with the highest attention from the query, increasing."""
        assert self._rule.layers is not None, (
            "the layers of a profile are named once the model is known"
        )
        rows = probe_rows(request_state, chunk.start)
        probe = Probe(rows, rows_of_query(request_state, rows), self._rule.layers, self._context)
        self._run(chunk.sequence, rows, probe.attend)
        return probe.chosen(self._rule.count(request_state.allocation.plan.spans))

    def _run(
        self,
        sequence: ScheduledSequence,
        rows: QueryRows,
        attend: Attend,
        keep: Keep | None = None,
        project: Project | None = None,
    ) -> None:
        """Run rows of one sequence through the layers, without logits, as long as any remain."""
        transfer = TransferBatch(self._context.model.device)
        packed = self._packer.pack([sequence], [rows], [0], None, transfer)
        transfer.send()
        with suppress(NoRowsLeft):
            self._context.model.forward(
                packed.ids, packed.rotations, attend, packed.logits_rows, keep, project=project
            )
