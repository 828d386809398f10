"""Recording of a run's outputs: tokens, and the logits that they were sampled from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from spanlab.core.scheduled import Sequence
from spanlab.engine.scoring import LogitsOf, Scorer


@dataclass
class Recording:
    """Collects the outputs of one run; `note` is the engine's `on_logits` callback.

    `what`    `engine.record`
    `scorer`  scores the tokens of known answers as they are computed; None without scoring
    """

    what: str
    scorer: Scorer | None = None
    _logits: list[NDArray[np.float32]] = field(default_factory=list)
    _keys: list[tuple[int, int]] = field(default_factory=list)

    def note(self, sequence: Sequence, row: Tensor) -> None:
        """Record the logits of a sequence's next token, shape (vocabulary,)."""
        if self.scorer is not None:
            self.scorer.note(sequence, row)
        elif self.what == "logits" or (self.what == "first_logits" and sequence.generated == 0):
            self._logits.append(row.float().cpu().numpy())
            self._keys.append((sequence.request.id, sequence.generated))

    def finished(self, sequence: Sequence, logits_of: LogitsOf) -> None:
        """Score the options of a request with a complete answer."""
        if self.scorer is not None:
            self.scorer.finished(sequence, logits_of)

    def write(self, path: Path, outputs: Mapping[int, list[int]]) -> None:
        """Write the recording to `path`; `outputs` are the generated tokens by request."""
        lengths = [len(tokens) for tokens in outputs.values()]
        arrays = {
            "requests": np.array(list(outputs), np.int64),
            "ends": np.cumsum([0, *lengths]),
            "tokens": np.concatenate(
                [np.empty(0, np.int32), *(np.array(tokens, np.int32) for tokens in outputs.values())]
            ),
            "keys": np.array(self._keys, np.int64).reshape(-1, 2),
            "logits": np.array(self._logits, np.float32),
        }
        if self.scorer is not None:
            arrays |= self.scorer.close()
        with path.open("wb") as file:
            np.savez_compressed(file, **arrays)  # type: ignore[arg-type]  # numpy's stub reads arrays as options
