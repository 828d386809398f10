"""Packing of rows of several requests into the input tensors of one forward."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Ordered
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spanlab.core.request import Tokens
from spanlab.core.scheduled import Sequence
from spanlab.engine.copies import Copier
from spanlab.engine.decode_rows import TailRows
from spanlab.engine.query_rows import QueryRows
from spanlab.engine.request_state import RequestState
from spanlab.engine.transfer import TransferBatch


class PackedRows(NamedTuple):
    """Inputs of one forward, int64 [T]: token ids, rotations, slots; and `logits_rows`, rows that need logits."""

    ids: Tensor
    rotations: Tensor
    slots: Tensor
    logits_rows: Tensor


class Packer:
    """Packs rows of one engine and records the rotations of the written keys in the copier.

    `outputs`  tokens generated so far, by request id
    """

    def __init__(
        self,
        request_states: Mapping[Sequence, RequestState],
        outputs: Mapping[int, list[int]],
        copier: Copier,
        device: torch.device,
    ) -> None:
        self._request_states, self.outputs, self._copier, self._device = request_states, outputs, copier, device

    def pack(
        self,
        sequences: Ordered[Sequence],
        parts: Ordered[QueryRows],
        logits_counts: Ordered[int],
        tails: TailRows | None,
        transfer: TransferBatch,
        answer: Tokens | None = None,
    ) -> PackedRows:
        """Pack the `parts` of `sequences`, then decode rows; the last `logits_counts` rows of each part need logits.

        `answer`  token ids after the prompts, in place of the sequences' outputs
        """
        columns = [
            (self._ids(sequence, rows.indices, answer), rows.rotations, rows.slots)
            for sequence, rows in zip(sequences, parts, strict=True)
        ]
        ends = np.cumsum([len(rows.indices) for rows in parts], dtype=np.int64).tolist()
        logits_rows = [np.arange(end - count, end) for end, count in zip(ends, logits_counts, strict=True)]
        if tails is not None:
            columns.append((tails.ids, tails.rotations, tails.slots))
            logits_rows.append(np.arange(len(tails.slots)) + (ends[-1] if ends else 0))
        ids, rotations, slots = (np.concatenate(column) for column in zip(*columns, strict=True))
        self._copier.note(slots, rotations)
        return PackedRows(
            *transfer.add([ids, rotations, slots, np.concatenate(logits_rows)], torch.int64, self._device)
        )

    def _ids(self, sequence: Sequence, indices: NDArray[np.int64], answer: Tokens | None) -> NDArray[np.int64]:
        tokens, prompt = self._request_states[sequence].tokens, sequence.prompt
        if not len(indices) or indices[-1] < prompt:
            return tokens[indices]
        known_tokens = sequence.request.output if answer is None else answer
        output = self.outputs[sequence.request.id] if known_tokens is None else known_tokens
        return np.concatenate([tokens, np.array(output, np.int64)])[indices]
