"""Answers that a request was not given, behind the same prompt: their logits, for comparison with the given one."""

from __future__ import annotations

from collections.abc import Sequence as Ordered

import torch
from torch import Tensor

from spanlab.core.request import Tokens
from spanlab.core.scheduled import Sequence
from spanlab.engine.attention_metadata import AttentionMetadata
from spanlab.engine.packer import Packer
from spanlab.engine.query_rows import cache_span_rows
from spanlab.engine.reader import Reader
from spanlab.engine.request_state import RequestState
from spanlab.engine.shipment import Shipment


class OtherAnswers:
    """Continues the prompt of a request that still holds its memory; for models without recurrent layers.

    Keys and values of another answer take the place of those of the given one, which are written again in the end.
    """

    def __init__(self, reader: Reader, packer: Packer) -> None:
        self._reader, self._packer, self._model = reader, packer, reader.model

    def of(self, sequence: Sequence, state: RequestState, answers: Ordered[Tokens]) -> list[Tensor]:
        """Logits of every token but the first of each answer, [tokens − 1, V] each; the end of the prompt has those."""
        given = sequence.request.output
        assert given is not None, "an answer that is not known cannot be written again"
        *found, _ = [self._behind_prompt(sequence, state, tokens) for tokens in (*answers, given)]
        return found

    def _behind_prompt(self, sequence: Sequence, state: RequestState, tokens: Tokens) -> Tensor:
        start, count = sequence.prompt, len(tokens) - 1
        if not count:
            return torch.empty(0, self._model.vocab_size)
        part = cache_span_rows(state, len(state.spans) - 1, start, start + count, self._reader.key_layout)
        shipment = Shipment(self._model.device)
        rows = self._packer.pack([sequence], [part], [count], None, shipment, said=tokens)
        attention = AttentionMetadata([part], self._reader, shipment)
        shipment.send()

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            self._reader.pool.write(layer, rows.slots, key, value)
            return attention.attend(layer, query)

        logits = self._model.forward(rows.ids, rows.rotations, attend, rows.asked)
        if not logits.isfinite().all():
            raise FloatingPointError(f"Model {self._model.name!r} gave logits that are no finite numbers.")
        return logits
