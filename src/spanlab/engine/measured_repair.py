"""Forwards of measured repairs, which select the tokens to recompute from model outputs."""

from __future__ import annotations

from contextlib import suppress

import numpy as np

from spanlab.core.repair import Repair
from spanlab.core.scheduled import ScheduledChunk, Sequence
from spanlab.engine.attention_context import AttentionContext
from spanlab.engine.blend import Blend, DeviationBlend, NeighbourBlend, NoRowsLeft
from spanlab.engine.hook import Attend, Keep, Project
from spanlab.engine.packer import Packer
from spanlab.engine.probe import Probe
from spanlab.engine.query_rows import QueryRows, chunk_rows, probe_rows, reading_before, rows_of_query
from spanlab.engine.request_state import RequestState
from spanlab.engine.transfer import TransferBatch


class MeasuredRepair:
    """A repair rule on one model: a blend recomputes tokens while it selects them, a probe only selects."""

    def __init__(self, rule: Repair, context: AttentionContext, packer: Packer) -> None:
        self._rule, self._context, self._packer = rule, context, packer

    def blend(self, request_state: RequestState, chunk: ScheduledChunk) -> None:
        """Recompute tokens selected among the rows of this forward; the selection changes from layer to layer."""
        rule, spans = self._rule, request_state.allocation.plan.spans
        everything = np.concatenate([np.arange(span.start, span.stop) for span in spans])
        rows, count = chunk_rows(request_state, chunk, everything), rule.count(spans)
        blend: Blend
        if rule.compares:
            blend = DeviationBlend(rule, count, rows, self._context)
        else:
            blend = NeighbourBlend(rule, count, rows, self._context, reading_before(request_state, rows))
        self._run(chunk.sequence, rows, blend.attend, blend.keep, blend.project)

    def probe(self, request_state: RequestState, chunk: ScheduledChunk) -> np.ndarray:
        """Prompt positions with the highest attention from the query, increasing."""
        assert self._rule.layers is not None, "the layers of a profile are named once the model is known"
        rows = probe_rows(request_state, chunk.start)
        probe = Probe(rows, rows_of_query(request_state, rows), self._rule.layers, self._context)
        self._run(chunk.sequence, rows, probe.attend)
        return probe.chosen(self._rule.count(request_state.allocation.plan.spans))

    def _run(
        self,
        sequence: Sequence,
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
            self._context.model.forward(packed.ids, packed.rotations, attend, packed.logits_rows, keep, project=project)
