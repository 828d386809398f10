"""The forward of a repair that chooses among its rows: what it writes and reads changes with those that are left."""

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

Reader = Callable[..., AttentionMetadata]
"""reader(*rows) -> the attention of those `QueryRows`, packed in that order."""


class NothingLeft(Exception):  # noqa: N818 - no error
    """Ends a forward of which no row goes on: transformers' layers take no empty batch."""


class Blend(ABC):
    """The attention of one repair, and which of its `rows` go on from each layer; these are chosen on the device.

    `slots`   where the rows' keys and values are stored and written, int64 [T]
    `reader`  builds the attention of all rows
    """

    def __init__(self, chooser: RowChooser, rows: QueryRows, slots: Tensor, pool: PagePool, reader: Reader) -> None:
        self._chooser, self._slots, self._pool = chooser, slots, pool
        self._whole = self._attention = reader(rows)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """One layer's attention, see `hook.Attend`."""
        self._write(layer, key, value)
        return self._attention.attend(layer, query)

    def project(self, layer: int) -> Projected | None:
        """What takes the projections of a layer that filters its own queries, see `hook.Project`."""
        return self._projected if self._chooser.projects(layer) else None

    def keep(self, layer: int) -> Tensor | None:
        """Rows that go on, see `hook.Keep`; NothingLeft where there are none."""
        chosen = self._chooser.keep(layer)
        if chosen is not None and len(chosen) == 0:
            raise NothingLeft
        if chosen is not None:
            self._attention = self._whole.of_rows(self._chooser.kept)
        return chosen

    def _write(self, layer: int, key: Tensor, value: Tensor) -> None:
        self._pool.write(layer, self._slots[self._chooser.kept], key, value)

    @abstractmethod
    def _projected(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Rank the rows that reach a layer by its projections, and write what it keeps of all of them."""


class DeviationBlend(Blend):
    """CacheBlend: keys and values are compared with those that are stored; `writes` as `core.repair.Repair` has it."""

    def __init__(
        self,
        chooser: DeviationChooser,
        rows: QueryRows,
        slots: Tensor,
        pool: PagePool,
        reader: Reader,
        writes: str,
    ) -> None:
        super().__init__(chooser, rows, slots, pool, reader)
        self._deviations, self._writes = chooser, writes

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """One layer's attention; where rows leave between layers, its keys and values decide."""
        if self._chooser.measures(layer):
            self._measure(layer, key, value)
        return super().attend(layer, query, key, value)

    def _projected(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> None:
        self._measure(layer, key, value)
        if self._writes == "all":
            self._write(layer, key, value)

    def _measure(self, layer: int, key: Tensor, value: Tensor) -> None:
        at = self._slots[self._chooser.kept]
        stored = self._pool.keys(layer).flatten(0, 1)[at], self._pool.values(layer).flatten(0, 1)[at]
        self._deviations.measure((key, value), stored)
