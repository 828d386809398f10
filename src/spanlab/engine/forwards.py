"""The forwards of a step: packed rows of several requests, launched together, and their logits."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from collections.abc import Sequence as Ordered
from functools import partial

import numpy as np
from torch import Tensor

from spanlab.core.scheduled import ScheduledChunk, Sequence
from spanlab.engine.attention_context import AttentionContext
from spanlab.engine.attention_metadata import AttentionMetadata
from spanlab.engine.decode_rows import DecodeRows, TailRows
from spanlab.engine.graphs import DECODERS, Plain, Work
from spanlab.engine.hook import Attend, Keep, Project, Recur
from spanlab.engine.memory import Memory
from spanlab.engine.packer import PackedRows, Packer
from spanlab.engine.query_rows import QueryRows, cache_span_rows, chunk_rows
from spanlab.engine.request_state import RequestState
from spanlab.engine.running_state import RunningState, StateRows, state_rows
from spanlab.engine.step_tokens import DueToken
from spanlab.engine.transfer import TransferBatch


class Forwards:
    """Launches the forwards of one engine.

    `memory`          states and maps of recurrent layers, if the model has any
    `request_states`  states of all requests that have rows
    `decode`          launch mode of decode-only forwards, see `graphs.DECODERS`
    """

    def __init__(
        self,
        context: AttentionContext,
        memory: Memory | None,
        packer: Packer,
        request_states: Mapping[Sequence, RequestState],
        decode: str,
    ) -> None:
        self._context, self._memory, self._packer, self._request_states = context, memory, packer, request_states
        self._device, self._key_layout = context.model.device, context.key_layout
        self._decodes: DecodeRows | None = None
        self._launch = Plain(self._device)
        self._decoder = DECODERS[decode](self._device, context.pages, context.pool)

    def run(
        self, chunks: list[ScheduledChunk], repaired: Ordered[np.ndarray | None], decodes: list[Sequence], times: int
    ) -> tuple[list[DueToken], Tensor]:
        """Compute chunks and `times` tokens per decode; return the tokens to sample and their logits.

        `repaired`  by chunk: prompt positions that a repair recomputes, or None
        """
        parts = [
            chunk_rows(self._request_states[chunk.sequence], chunk, self._key_layout, positions)
            for chunk, positions in zip(chunks, repaired, strict=True)
        ]
        sequences, logits_counts = [chunk.sequence for chunk in chunks], [int(chunk.last) for chunk in chunks]
        tails = self._decode_rows(decodes) if times == 1 else None
        if tails is None:
            parts += [self._rows_ahead(sequence, times) for sequence in decodes]
            sequences, logits_counts = [*sequences, *decodes], logits_counts + [times] * len(decodes)
        due = [
            DueToken(sequence, sequence.generated + offset)
            for sequence, count in zip(sequences, logits_counts, strict=True)
            for offset in range(count)
        ]
        due += [] if tails is None else [DueToken(sequence, sequence.generated) for sequence in tails.sequences]
        states = self._state_rows(chunks, decodes, times)
        prepare = partial(self._prepared, sequences, parts, logits_counts, states)
        logits = self._launch.run(tails, prepare) if tails is None or parts else self._decoder.run(tails, prepare)
        if self._memory is not None:
            self._memory.finish()
        return due, logits

    def _prepared(
        self,
        sequences: list[Sequence],
        parts: list[QueryRows],
        logits_counts: list[int],
        states: list[tuple[RunningState, StateRows]],
        tails: TailRows | None,
        transfer: TransferBatch,
        *,
        for_replay: bool,
    ) -> tuple[Hashable, Work]:
        """Prepare the forward of `parts` and `tails`, see `graphs.Prepare`."""
        rows = self._packer.pack(sequences, parts, logits_counts, tails, transfer)
        recur = self._recur(states, None if parts else tails, transfer)
        # added last, because the number of page ids differs between steps
        attention, key, pool = AttentionMetadata(parts, self._context, transfer, tails), None, self._context.pool
        if for_replay:
            attention_key, attention = attention.for_replay()
            key = attention_key, None if self._memory is None else self._memory.slab_rows

        def attend(layer: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            pool.write(layer, rows.slots, keys, values)
            return attention.attend(layer, query)

        return key, lambda: self._logits(rows, attend, recur=recur)

    def _recur(
        self, states: list[tuple[RunningState, StateRows]], decodes: TailRows | None, transfer: TransferBatch
    ) -> Recur | None:
        """Build the computation of recurrent layers, if any; `decodes` are the rows of a decode-only forward."""
        if self._memory is None:
            return None
        if decodes is None:
            return self._memory.recurrence(states, self._device, transfer.add).run
        return self._memory.decode_recurrence(states, len(decodes.slots), self._device, transfer.add).run

    def _state_rows(
        self, chunks: list[ScheduledChunk], decodes: list[Sequence], times: int
    ) -> list[tuple[RunningState, StateRows]]:
        """States and their rows in chunks and decodes; empty for models without recurrent layers."""
        if self._memory is None:
            return []
        states = self._request_states
        rows = [(states[chunk.sequence].running, state_run) for chunk in chunks for state_run in state_rows(chunk)]
        rows += [(states[sequence].running, self._decode_state_rows(sequence, times)) for sequence in decodes]
        return rows

    def _decode_state_rows(self, sequence: Sequence, times: int) -> StateRows:
        request_state, start = self._request_states[sequence], sequence.prompt + sequence.generated - 1
        capture_positions = request_state.allocation.captures
        captures = [position for position in capture_positions if start < position <= start + times]
        return StateRows(len(request_state.spans) - 1, start, start + times, captures)

    def _decode_rows(self, sequences: list[Sequence]) -> DecodeRows | None:
        """Next rows of decoding sequences; the previous rows are advanced if the sequences are unchanged."""
        rows, states = self._decodes, [self._request_states[sequence] for sequence in sequences]
        if rows is None or rows.sequences is not sequences:
            previous = {} if rows is None else rows.reads
            rows = self._decodes = DecodeRows(sequences, states, self._context, previous) if sequences else None
        if rows is not None:
            rows.advance()
        return rows

    def _rows_ahead(self, sequence: Sequence, times: int) -> QueryRows:
        rows, request_state = self._decode_state_rows(sequence, times), self._request_states[sequence]
        return cache_span_rows(request_state, rows.cache_span, rows.start, rows.stop, self._key_layout)

    # -- forwards of a measured repair --------------------------------------------------------------------------------

    def without_logits(
        self,
        sequence: Sequence,
        rows: QueryRows,
        attend: Attend,
        keep: Keep | None = None,
        project: Project | None = None,
    ) -> None:
        """Run a forward of rows of one sequence without logits."""
        transfer = TransferBatch(self._device)
        packed = self._packer.pack([sequence], [rows], [0], None, transfer)
        transfer.send()
        self._logits(packed, attend, keep=keep, project=project)

    def attention(self, *rows: QueryRows) -> AttentionMetadata:
        """Build the attention of rows outside a regular forward."""
        transfer = TransferBatch(self._device)
        attention = AttentionMetadata(rows, self._context, transfer)
        transfer.send()
        return attention

    def _logits(
        self,
        rows: PackedRows,
        attend: Attend,
        keep: Keep | None = None,
        recur: Recur | None = None,
        project: Project | None = None,
    ) -> Tensor:
        return self._context.model.forward(rows.ids, rows.rotations, attend, rows.logits_rows, keep, recur, project)
