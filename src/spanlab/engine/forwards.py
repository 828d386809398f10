"""The forwards of a step: rows of several requests packed, launched together, and the logits that they leave."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from collections.abc import Sequence as Ordered
from functools import partial

import numpy as np
from torch import Tensor

from spanlab.core.scheduled import ScheduledChunk, Sequence
from spanlab.engine.attention_metadata import AttentionMetadata
from spanlab.engine.decode_rows import DecodeRows, TailRows
from spanlab.engine.graphs import DECODERS, Plain, Work
from spanlab.engine.hook import Attend, Keep, Project, Recur
from spanlab.engine.memory import Memory
from spanlab.engine.packer import PackedRows, Packer
from spanlab.engine.query_rows import QueryRows, cache_span_rows, chunk_rows
from spanlab.engine.reader import Reader
from spanlab.engine.request_state import RequestState
from spanlab.engine.running_state import RunningState, StateRows, state_rows
from spanlab.engine.shipment import Shipment
from spanlab.engine.step_tokens import Due


class Forwards:
    """Launches forwards of one engine's model.

    `memory`          what its recurrent layers read and write, if it has any
    `request_states`  of all requests that have rows
    `decode`          how forwards are launched in which every row decodes, see `graphs.DECODERS`
    """

    def __init__(
        self,
        reader: Reader,
        memory: Memory | None,
        packer: Packer,
        request_states: Mapping[Sequence, RequestState],
        decode: str,
    ) -> None:
        self._reader, self._memory, self._packer, self._request_states = reader, memory, packer, request_states
        self._device, self._key_layout = reader.model.device, reader.key_layout
        self._decodes: DecodeRows | None = None
        self._launch = Plain(self._device)
        self._decoder = DECODERS[decode](self._device, reader.pages, reader.pool)

    def run(
        self, chunks: list[ScheduledChunk], repaired: Ordered[np.ndarray | None], decodes: list[Sequence], times: int
    ) -> tuple[list[Due], Tensor]:
        """Compute chunks, and `times` tokens of each that decodes; returns the tokens that are due and their logits.

        `repaired`  by chunk: prompt positions that a repair computes again, None for chunks of no repair
        """
        parts = [
            chunk_rows(self._request_states[chunk.sequence], chunk, self._key_layout, again)
            for chunk, again in zip(chunks, repaired, strict=True)
        ]
        owners, counts = [chunk.sequence for chunk in chunks], [int(chunk.last) for chunk in chunks]
        tails = self._decode_rows(decodes) if times == 1 else None
        if tails is None:
            parts += [self._rows_ahead(sequence, times) for sequence in decodes]
            owners, counts = [*owners, *decodes], counts + [times] * len(decodes)
        due = [Due(one, one.generated + at) for one, count in zip(owners, counts, strict=True) for at in range(count)]
        due += [] if tails is None else [Due(sequence, sequence.generated) for sequence in tails.sequences]
        states = self._state_rows(chunks, decodes, times)
        prepare = partial(self._prepared, owners, parts, counts, states)
        logits = self._launch.run(tails, prepare) if tails is None or parts else self._decoder.run(tails, prepare)
        if self._memory is not None:
            self._memory.done()
        return due, logits

    def _prepared(
        self,
        owners: list[Sequence],
        parts: list[QueryRows],
        counts: list[int],
        states: list[tuple[RunningState, StateRows]],
        tails: TailRows | None,
        shipment: Shipment,
        *,
        replayed: bool,
    ) -> tuple[Hashable, Work]:
        """The forward of some parts and tails, see `graphs.Prepare`."""
        rows = self._packer.pack(owners, parts, counts, tails, shipment)
        recur = self._recur(states, None if parts else tails, shipment)
        # what comes last is shipped last: page ids, of which a step has more or fewer
        attention, key, pool = AttentionMetadata(parts, self._reader, shipment, tails), None, self._reader.pool
        if replayed:
            of_reads, attention = attention.replayed()
            key = of_reads, None if self._memory is None else self._memory.room

        def attend(layer: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            pool.write(layer, rows.slots, keys, values)
            return attention.attend(layer, query)

        return key, lambda: self._logits(rows, attend, recur=recur)

    def _recur(
        self, states: list[tuple[RunningState, StateRows]], decodes: TailRows | None, shipment: Shipment
    ) -> Recur | None:
        """What recurrent layers do with rows of states, if there are any; with `decodes`, of these rows alone."""
        if self._memory is None:
            return None
        if decodes is None:
            return self._memory.recurrence(states, self._device, shipment.add).run
        return self._memory.decodes(states, len(decodes.slots), self._device, shipment.add).run

    def _state_rows(
        self, chunks: list[ScheduledChunk], decodes: list[Sequence], times: int
    ) -> list[tuple[RunningState, StateRows]]:
        """The states that run through the rows of chunks and decodes; none where no layer has any."""
        if self._memory is None:
            return []
        states = self._request_states
        rows = [(states[chunk.sequence].running, run) for chunk in chunks for run in state_rows(chunk)]
        rows += [(states[sequence].running, self._decoded(sequence, times)) for sequence in decodes]
        return rows

    def _decoded(self, sequence: Sequence, times: int) -> StateRows:
        request_state, place = self._request_states[sequence], sequence.prompt + sequence.generated - 1
        due = request_state.allocation.captures
        captures = [position for position in due if place < position <= place + times]
        return StateRows(len(request_state.spans) - 1, place, place + times, captures)

    def _decode_rows(self, sequences: list[Sequence]) -> DecodeRows | None:
        """Their next rows; those of the step before go on where the same sequences decode."""
        rows, states = self._decodes, [self._request_states[sequence] for sequence in sequences]
        if rows is None or rows.sequences is not sequences:
            known = {} if rows is None else rows.reads
            rows = self._decodes = DecodeRows(sequences, states, self._reader, known) if sequences else None
        if rows is not None:
            rows.advance()
        return rows

    def _rows_ahead(self, sequence: Sequence, times: int) -> QueryRows:
        rows, request_state = self._decoded(sequence, times), self._request_states[sequence]
        return cache_span_rows(request_state, rows.cache_span, rows.start, rows.stop, self._key_layout)

    # -- parts of a measured repair -----------------------------------------------------------------------------------

    def without_logits(
        self, of: Sequence, rows: QueryRows, attend: Attend, keep: Keep | None = None, project: Project | None = None
    ) -> None:
        """A forward of rows of one sequence that asks for no logits."""
        shipment = Shipment(self._device)
        packed = self._packer.pack([of], [rows], [0], None, shipment)
        shipment.send()
        self._logits(packed, attend, keep=keep, project=project)

    def attention(self, *rows: QueryRows) -> AttentionMetadata:
        """The attention of rows alone."""
        shipment = Shipment(self._device)
        attention = AttentionMetadata(rows, self._reader, shipment)
        shipment.send()
        return attention

    def _logits(
        self,
        rows: PackedRows,
        attend: Attend,
        keep: Keep | None = None,
        recur: Recur | None = None,
        project: Project | None = None,
    ) -> Tensor:
        return self._reader.model.forward(rows.ids, rows.rotations, attend, rows.asked, keep, recur, project)
