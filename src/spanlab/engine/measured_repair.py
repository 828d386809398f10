"""Forwards of measured repairs, which select the tokens to recompute from model outputs."""

from __future__ import annotations

from contextlib import suppress
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from spanlab.core.repair import Repair
from spanlab.core.scheduled import ScheduledChunk, Sequence
from spanlab.core.spans import SpanSettings
from spanlab.engine.blend import Blend, BuildAttention, DeviationBlend, NoRowsLeft
from spanlab.engine.deviation import DeviationChooser
from spanlab.engine.hook import Attend, Keep, Project
from spanlab.engine.neighbours import NeighbourBlend
from spanlab.engine.pool import PagePool
from spanlab.engine.probe import Probe
from spanlab.engine.query_rows import QueryRows, chunk_rows, probe_rows, reading_before, rows_of_query
from spanlab.engine.request_state import RequestState
from spanlab.engine.row_chooser import RowChooser
from spanlab_kernels.attention import to_device


class Forward(Protocol):
    """A forward of rows of one sequence without logits; other parameters as in `hook`."""

    def __call__(
        self,
        sequence: Sequence,
        rows: QueryRows,
        attend: Attend,
        keep: Keep | None = None,
        project: Project | None = None,
    ) -> None: ...


class MeasuredRepair:
    """A repair rule on one model: a blend recomputes tokens while it selects them, a probe only selects.

    `layers`           number of attention layers
    `build_attention`  builds the attention of rows
    `forward`          runs rows through the model
    """

    def __init__(
        self,
        rule: Repair,
        layers: int,
        key_layout: SpanSettings,
        pool: PagePool,
        build_attention: BuildAttention,
        forward: Forward,
    ) -> None:
        self._rule, self._layers, self._key_layout, self._pool = rule, layers, key_layout, pool
        self._build_attention, self._forward = build_attention, forward

    def blend(self, request_state: RequestState, chunk: ScheduledChunk) -> None:
        """Recompute tokens selected among the rows of this forward; the selection changes from layer to layer."""
        spans = request_state.allocation.plan.spans
        everything = np.concatenate([np.arange(span.start, span.stop) for span in spans])
        rows = chunk_rows(request_state, chunk, self._key_layout, everything)
        blend = self._blend(request_state, rows, self._rule.count(spans))
        with suppress(NoRowsLeft):
            self._forward(chunk.sequence, rows, blend.attend, blend.keep, blend.project)

    def probe(self, request_state: RequestState, chunk: ScheduledChunk) -> np.ndarray:
        """Prompt positions with the highest attention from the query, increasing."""
        assert self._rule.layers is not None, "the layers of a profile are named once the model is known"
        rows = probe_rows(request_state, chunk.start, self._key_layout)
        query = rows_of_query(request_state, rows, self._key_layout)
        probe = Probe(rows, self._tensor(rows.slots), self._pool, self._build_attention, self._rule.layers, query)
        with suppress(NoRowsLeft):
            self._forward(chunk.sequence, rows, probe.attend)
        return probe.chosen(self._rule.count(request_state.allocation.plan.spans))

    def _blend(self, request_state: RequestState, rows: QueryRows, count: int) -> Blend:
        rule, slots = self._rule, self._tensor(rows.slots)
        if rule.compares:
            chooser = DeviationChooser(rule, count, self._layers, rows.free, slots.device)
            return DeviationBlend(chooser, rows, slots, self._pool, self._build_attention, rule.writes)
        before = reading_before(request_state, rows)
        neighbours = RowChooser(rule, count, self._layers, rows.free, slots.device)
        return NeighbourBlend(neighbours, rows, slots, self._pool, self._build_attention, before)

    def _tensor(self, numbers: np.ndarray) -> Tensor:
        return to_device([numbers], torch.int64, self._pool.keys(0).device)[0]
