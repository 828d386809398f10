"""From rows of several requests to the tensors of one forward."""

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
from spanlab.engine.shipment import Shipment


class PackedRows(NamedTuple):
    """Rows of one forward on the device, int64 [T]: token ids, rotations, slots; and `asked`, rows that need logits."""

    ids: Tensor
    rotations: Tensor
    slots: Tensor
    asked: Tensor


class Packer:
    """Packs rows for one engine, and tells the copier what the keys that they write are rotated by.

    `outputs`  tokens generated so far, by request id
    """

    def __init__(
        self,
        request_states: Mapping[Sequence, RequestState],
        outputs: Mapping[int, list[int]],
        copier: Copier,
        device: torch.device,
    ) -> None:
        self._request_states, self._outputs, self._copier, self._device = request_states, outputs, copier, device

    def pack(
        self,
        owners: Ordered[Sequence],
        parts: Ordered[QueryRows],
        counts: Ordered[int],
        tails: TailRows | None,
        shipment: Shipment,
        said: Tokens | None = None,
    ) -> PackedRows:
        """Parts of their owners, then rows that decode; of each part so many last rows need logits.

        `said`  token ids that stand behind the prompts, in place of the owners' own answers
        """
        columns = [
            (self._ids(owner, part.indices, said), part.rotations, part.slots)
            for owner, part in zip(owners, parts, strict=True)
        ]
        ends = np.cumsum([len(part.indices) for part in parts], dtype=np.int64).tolist()
        asked = [np.arange(end - count, end) for end, count in zip(ends, counts, strict=True)]
        if tails is not None:
            columns.append((tails.ids(self._outputs), tails.rotations, tails.slots))
            asked.append(np.arange(len(tails.slots)) + (ends[-1] if ends else 0))
        ids, rotations, slots = (np.concatenate(column) for column in zip(*columns, strict=True))
        self._copier.note(slots, rotations)
        return PackedRows(*shipment.add([ids, rotations, slots, np.concatenate(asked)], torch.int64, self._device))

    def _ids(self, sequence: Sequence, indices: NDArray[np.int64], said: Tokens | None) -> NDArray[np.int64]:
        tokens, prompt = self._request_states[sequence].tokens, sequence.prompt
        if not len(indices) or indices[-1] < prompt:
            return tokens[indices]
        known = sequence.request.output if said is None else said
        answer = self._outputs[sequence.request.id] if known is None else known
        return np.concatenate([tokens, np.array(answer, np.int64)])[indices]
