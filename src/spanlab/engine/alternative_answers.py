"""Logits of alternative answers to a request's prompt, for comparison with its known answer."""

from __future__ import annotations

from collections.abc import Sequence as Ordered

import torch
from torch import Tensor

from spanlab.core.request import Tokens
from spanlab.core.scheduled import Sequence
from spanlab.engine.attention_context import AttentionContext
from spanlab.engine.attention_metadata import AttentionMetadata
from spanlab.engine.packer import Packer
from spanlab.engine.query_rows import cache_span_rows
from spanlab.engine.request_state import RequestState
from spanlab.engine.transfer import TransferBatch


class AlternativeAnswers:
    """Computes answers after the prompt of a request whose pages are still allocated; for attention-only models.

    Keys and values of an alternative answer overwrite those of the known answer, which are restored at the end.
    """

    def __init__(self, context: AttentionContext, packer: Packer) -> None:
        self._context, self._packer, self._model = context, packer, context.model

    def logits(self, sequence: Sequence, state: RequestState, answers: Ordered[Tokens]) -> list[Tensor]:
        """Logits [tokens − 1, V] of each answer, without its first token, which the last prompt token predicts."""
        known = sequence.request.output
        assert known is not None, "the KV of a sampled answer cannot be restored"
        *logits, _ = [self._after_prompt(sequence, state, tokens) for tokens in (*answers, known)]
        return logits

    def _after_prompt(self, sequence: Sequence, state: RequestState, tokens: Tokens) -> Tensor:
        start, count = sequence.prompt, len(tokens) - 1
        if not count:
            return torch.empty(0, self._model.vocab_size)
        answer_rows = cache_span_rows(state, len(state.spans) - 1, start, start + count, self._context.key_layout)
        transfer = TransferBatch(self._model.device)
        rows = self._packer.pack([sequence], [answer_rows], [count], None, transfer, answer=tokens)
        attention = AttentionMetadata([answer_rows], self._context, transfer)
        transfer.send()

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            self._context.pool.write(layer, rows.slots, key, value)
            return attention.attend(layer, query)

        logits = self._model.forward(rows.ids, rows.rotations, attend, rows.logits_rows)
        if not logits.isfinite().all():
            raise FloatingPointError(f"Model {self._model.name!r} gave logits that are no finite numbers.")
        return logits
