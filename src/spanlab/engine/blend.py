"""The forward of a repair that selects among its rows; KV writes and attention follow the remaining rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import Tensor

from spanlab.engine.attention_metadata import AttentionMetadata
from spanlab.engine.deviation import DeviationChooser
from spanlab.engine.hook import Projected
from spanlab.engine.pool import PagePool
from spanlab.engine.query_rows import QueryRows
from spanlab.engine.row_chooser import RowChooser

BuildAttention = Callable[..., AttentionMetadata]
"""build_attention(*rows) -> the attention of these `QueryRows`, packed in order."""


class NoRowsLeft(Exception):  # noqa: N818 - control flow, no error
    """Stops a forward without remaining rows, because transformers' layers accept no empty batch."""


class Blend(ABC):
    """The attention of one repair, and the selection of its `rows` in each layer, on the device.

    `slots`            slots from which stored keys and values of the rows are read and to which new ones are written
    `build_attention`  builds the attention of all rows
    """

    def __init__(
        self, chooser: RowChooser, rows: QueryRows, slots: Tensor, pool: PagePool, build_attention: BuildAttention
    ) -> None:
        self._chooser, self._slots, self._pool = chooser, slots, pool
        self._full_attention = self._attention = build_attention(rows)

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
    """CacheBlend: compares new keys and values with stored ones; `writes` as in `core.repair.Repair`."""

    def __init__(
        self,
        chooser: DeviationChooser,
        rows: QueryRows,
        slots: Tensor,
        pool: PagePool,
        build_attention: BuildAttention,
        writes: str,
    ) -> None:
        super().__init__(chooser, rows, slots, pool, build_attention)
        self._deviations, self._writes = chooser, writes

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """One layer's attention; its keys and values rank the rows if rows are dropped between layers."""
        if self._chooser.measures(layer):
            self._measure(layer, key, value)
        return super().attend(layer, query, key, value)

    def _projected(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> None:
        self._measure(layer, key, value)
        if self._writes == "all":
            self._write(layer, key, value)

    def _measure(self, layer: int, key: Tensor, value: Tensor) -> None:
        slots = self._slots[self._chooser.rows]
        stored = self._pool.keys(layer).flatten(0, 1)[slots], self._pool.values(layer).flatten(0, 1)[slots]
        self._deviations.measure((key, value), stored)
