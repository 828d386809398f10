"""The forward of a measured repair: what it writes and reads changes with the rows that are left."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from spanlab.engine.attention_metadata import AttentionMetadata
from spanlab.engine.deviation import DeviationChooser
from spanlab.engine.hook import Projected
from spanlab.engine.pool import PagePool
from spanlab.engine.query_rows import QueryRows


class NothingLeft(Exception):  # noqa: N818 - no error
    """Ends a forward of which no row goes on: transformers' layers take no empty batch."""


class Blend:
    """The attention of one measured repair, and which of its `rows` go on from each layer.

    `slots`   where the rows' keys and values are stored and written, int64 [T]
    `reader`  builds the attention of the rows that are left
    `writes`  as `core.repair.Repair` has it
    """

    def __init__(
        self,
        chooser: DeviationChooser,
        rows: QueryRows,
        slots: Tensor,
        pool: PagePool,
        reader: Callable[[QueryRows], AttentionMetadata],
        writes: str,
    ) -> None:
        self._chooser, self._rows, self._slots = chooser, rows, slots
        self._pool, self._reader, self._writes = pool, reader, writes
        self._attention = reader(rows)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """One layer's attention, see `hook.Attend`."""
        if self._chooser.measures(layer):
            self._measure(layer, key, value)
        self._pool.write(layer, self._slots[self._chooser.kept], key, value)
        return self._attention.attend(layer, query)

    def project(self, layer: int) -> Projected | None:
        """What takes the keys and values of a layer that filters its own queries, see `hook.Project`."""
        return self._projected if self._chooser.projects(layer) else None

    def keep(self, layer: int) -> Tensor | None:
        """Rows that go on, see `hook.Keep`; NothingLeft where there are none."""
        chosen = self._chooser.keep(layer)
        if chosen is not None and len(chosen) == 0:
            raise NothingLeft
        if chosen is not None:
            self._attention = self._reader(self._rows.chosen(self._chooser.kept.cpu().numpy()))
        return chosen

    def _projected(self, layer: int, key: Tensor, value: Tensor) -> None:
        self._measure(layer, key, value)
        if self._writes == "all":
            self._pool.write(layer, self._slots[self._chooser.kept], key, value)

    def _measure(self, layer: int, key: Tensor, value: Tensor) -> None:
        at = self._slots[self._chooser.kept]
        stored = self._pool.keys(layer).flatten(0, 1)[at], self._pool.values(layer).flatten(0, 1)[at]
        self._chooser.measure((key, value), stored)
