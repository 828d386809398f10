"""The forwards of a step: packed rows of several requests, launched together, and their logits."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from collections.abc import Sequence as Ordered
from functools import partial

import numpy as np
import torch
from torch import Tensor

from spanlab.core.request import Tokens
from spanlab.core.scheduled import ScheduledChunk, Sequence
from spanlab.engine.attention_context import AttentionContext
from spanlab.engine.attention_metadata import AttentionMetadata
from spanlab.engine.decode_rows import DecodeRows, TailRows
from spanlab.engine.graphs import Plain, Work, new_decoder
from spanlab.engine.memory import Memory
from spanlab.engine.packer import Packer
from spanlab.engine.query_rows import QueryRows, cache_span_rows, chunk_rows
from spanlab.engine.request_state import RequestState
from spanlab.engine.running_state import RunningState, StateRows, state_rows
from spanlab.engine.step_tokens import DueToken
from spanlab.engine.transfer import TransferBatch


class Forwards:
    """Launches the forwards of one engine.

    `memory`          states and maps of recurrent layers, if the model has any
    `request_states`  states of all requests that have rows
    `decode`          launch mode of decode-only forwards, see `EngineSettings`
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
        self._device = context.model.device
        self._decodes: DecodeRows | None = None
        self._launch = Plain(self._device)
        self._decoder = new_decoder(decode, self._device, context.pages, context.pool)

    def run(
        self, chunks: list[ScheduledChunk], repaired: Ordered[np.ndarray | None], decodes: list[Sequence], times: int
    ) -> tuple[list[DueToken], Tensor]:
        """Compute chunks and `times` tokens per decode; return the tokens to sample and their logits.

        `repaired`  by chunk: prompt positions that a repair recomputes, or None
        """
        parts = [
            chunk_rows(self._request_states[chunk.sequence], chunk, positions)
            for chunk, positions in zip(chunks, repaired, strict=True)
        ]
        sequences, logits_counts = [chunk.sequence for chunk in chunks], [int(chunk.last) for chunk in chunks]
        everyone, all_counts = [*sequences, *decodes], logits_counts + [times] * len(decodes)
        due = [
            DueToken(sequence, sequence.generated + offset)
            for sequence, count in zip(everyone, all_counts, strict=True)
            for offset in range(count)
        ]
        tails = self._decode_rows(decodes) if times == 1 else None
        if tails is None:
            parts += [self._rows_ahead(sequence, times) for sequence in decodes]
            sequences, logits_counts = everyone, all_counts
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
        answer: Tokens | None = None,
    ) -> tuple[Hashable, Work]:
        """Prepare the forward of `parts` and `tails`, see `graphs.Prepare`; `answer` as in `Packer.pack`."""
        rows = self._packer.pack(sequences, parts, logits_counts, tails, transfer, answer)
        recur = None
        if self._memory is not None and states:
            decode_rows = None if parts or tails is None else len(tails.slots)
            recur = self._memory.recurrence(states, self._device, transfer.add, decode_rows).run
        # added last, because the number of page ids differs between steps
        attention, key = AttentionMetadata(parts, self._context, transfer, tails), None
        model, pool = self._context.model, self._context.pool
        if for_replay:
            attention_key, attention = attention.for_replay()
            key = attention_key, None if self._memory is None else self._memory.slab_rows

        def attend(layer: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            pool.write(layer, rows.slots, keys, values)
            return attention.attend(layer, query)

        return key, lambda: model.forward(rows.ids, rows.rotations, attend, rows.logits_rows, recur=recur)

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

    def _decode_rows(self, sequences: list[Sequence]) -> TailRows | None:
        """Next rows of decoding sequences; the previous rows are advanced if the sequences are unchanged."""
        if not sequences:
            self._decodes = None
            return None
        if self._decodes is None or self._decodes.sequences is not sequences:
            states = [self._request_states[sequence] for sequence in sequences]
            previous = {} if self._decodes is None else self._decodes.reads
            self._decodes = DecodeRows(sequences, states, self._context, previous)
        return self._decodes.advance(self._packer.outputs)

    def _rows_ahead(self, sequence: Sequence, times: int) -> QueryRows:
        rows, request_state = self._decode_state_rows(sequence, times), self._request_states[sequence]
        return cache_span_rows(request_state, rows.cache_span, rows.start, rows.stop)

    # -- alternative answers ------------------------------------------------------------------------------------------

    def answer_logits(self, sequence: Sequence, answers: Ordered[Tokens]) -> list[Tensor]:
        """Logits [tokens − 1, V] of each answer after a prompt, without its first token; for attention-only models.

        The last prompt token predicts the first token. The sequence's pages must still be allocated: keys and values of
        an alternative answer overwrite those of the known answer, which are restored at the end.
        """
        known = sequence.request.output
        assert known is not None, "the KV of a sampled answer cannot be restored"
        *logits, _ = [self._after_prompt(sequence, tokens) for tokens in (*answers, known)]
        return logits

    def _after_prompt(self, sequence: Sequence, answer: Tokens) -> Tensor:
        model, state, count = self._context.model, self._request_states[sequence], len(answer) - 1
        if not count:
            return torch.empty(0, model.vocab_size)
        rows = cache_span_rows(state, len(state.spans) - 1, sequence.prompt, sequence.prompt + count)
        logits = self._launch.run(None, partial(self._prepared, [sequence], [rows], [count], [], answer=answer))
        if not logits.isfinite().all():
            raise FloatingPointError(f"Model {model.name!r} gave logits that are no finite numbers.")
        return logits
