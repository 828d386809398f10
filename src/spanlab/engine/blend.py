"""Forwards of repairs that select among their rows; KV writes and attention follow the remaining rows."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from spanlab.core.repair import Repair
from spanlab.engine.attention_context import AttentionContext
from spanlab.engine.attention_metadata import attention_of
from spanlab.engine.hook import Projected
from spanlab.engine.query_rows import QueryRows
from spanlab.engine.row_chooser import RowChooser
from spanlab_kernels.attention import to_device

_SCORED = {"keys": (0,), "values": (1,), "both": (0, 1)}


class NoRowsLeft(Exception):  # noqa: N818 - control flow, no error
    """Stops a forward without remaining rows, because transformers' layers accept no empty batch."""


class Blend(ABC):
    """The attention of one repair, and the selection of `count` of its free rows during the forward."""

    def __init__(self, rule: Repair, count: int, rows: QueryRows, context: AttentionContext) -> None:
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
        """Rank the rows that reach a layer by its projections, and write keys and values if the rule requires it."""


class DeviationBlend(Blend):
    """CacheBlend: ranks tokens by the deviation of their new keys and values from the stored ones."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """One layer's attention; its keys and values rank the rows if rows are dropped between layers."""
        if self._chooser.measures(layer):
            self._measure(layer, key, value)
        return super().attend(layer, query, key, value)

    def _projected(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> None:
        self._measure(layer, key, value)
        if self._rule.writes == "all":
            self._write(layer, key, value)

    def _measure(self, layer: int, key: Tensor, value: Tensor) -> None:
        slots = self._slots[self._chooser.rows]
        stored = self._pool.keys(layer).flatten(0, 1)[slots], self._pool.values(layer).flatten(0, 1)[slots]
        self._chooser.rank(deviations(self._rule.score, (key, value), stored))


def deviations(score: str, new: tuple[Tensor, Tensor], stored: tuple[Tensor, Tensor]) -> Tensor:
    """Sum of squared differences [T] of new keys or values [T, Hkv, D], or both, from the stored ones; see `Repair`."""
    squares = [(new[index].float() - stored[index].float()).square().sum((1, 2)) for index in _SCORED[score]]
    return sum(squares[1:], squares[0])


class NeighbourBlend(Blend):
    """The neighbour-aware repair: ranks tokens by their attention to everything before their span.

    score(i) = Σ_h Σ_{j < start of i's span} a_h(i, j), with a the softmax over all of the prompt up to i at the check
    layer: Σ_h exp(lse over keys before the span - lse over all). Earlier layers compute all tokens with the full prompt
    visible, as in CacheBlend.

    `before`  the same rows by cache span, in order, each reading only the tokens before that span
    """

    def __init__(
        self, rule: Repair, count: int, rows: QueryRows, context: AttentionContext, before: list[QueryRows]
    ) -> None:
        super().__init__(rule, count, rows, context)
        self._before = attention_of(context, *before)

    def _projected(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> None:
        self._write(layer, key, value)
        before, total = (attention.attend_with_sums(layer, query)[1] for attention in (self._before, self._attention))
        self._chooser.rank((before - total).exp().sum(-1))
