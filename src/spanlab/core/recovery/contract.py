"""The contract of a recovery: how the gap between a recurrent state and the end of deeper KV is closed.

`recompute` computes the gap as if its KV were not stored. A replay reads that KV in place, and advances the state
through the gap with fewer blocks of the model. A backfill loads a deeper state from a lower tier.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from spanlab.model_spec import ModelSpec
from spanlab.registry import Registry


@dataclass(frozen=True, slots=True)
class Replay:
    """The part of a token's computation that a replayed token of a gap skips.

    `exact`           the state and all that follows are those of recompute
    `token_flops`     FLOPs of a token that do not depend on its position
    `pair_flops`      FLOPs of a query-key pair
    `read_bytes`      KV bytes of each token before a row that the row does not read
    `most_tokens`     a longer gap is recomputed; None: no gap is too long
    """

    exact: bool
    token_flops: int
    pair_flops: int
    read_bytes: int
    most_tokens: int | None = None

    def tokens(self, gap: int) -> int:
        """Return the replayed tokens of a gap: all or none."""
        return gap if self.most_tokens is None or gap <= self.most_tokens else 0

    def left_out(self, start: int, stop: int, alone: bool) -> tuple[int, int]:
        """Return the FLOPs and bytes that tokens `[start, stop)` of a gap skip.

        The KV of the gap is read from memory, which takes the bytes that are not written.

        `alone`  no row behind the gap is in the chunk: such a row would read all KV before it
        """
        rows = stop - start
        flops = rows * self.token_flops + rows * (start + stop + 1) // 2 * self.pair_flops
        return flops, stop * self.read_bytes if alone else 0


class Recovery(Protocol):
    """How an arm recovers a state; each part is None where the arm does not use it.

    `replay`     advances the state through the gap
    `backfill`   loads deeper states from the tiers of the study: always, or break_even, where that is faster
    """

    @property
    def replay(self) -> Replay | None: ...

    @property
    def backfill(self) -> str | None: ...


@dataclass(frozen=True, slots=True)
class Plain:
    """A recovery given by its two parts."""

    replay: Replay | None = None
    backfill: str | None = None


#: `model` is the study's.
RECOVERIES: Registry[Recovery] = Registry("recovery", given=("model",))


def key_value_flops(model: ModelSpec) -> int:
    """Return the FLOPs per token of the key and value projections in one attention layer."""
    return 4 * model.hidden_size * model.kv_heads * model.head_dim


def attention_block_flops(model: ModelSpec) -> int:
    """Return the FLOPs per token of all projections of one attention layer, the output's included."""
    return model.projection_flops_per_token + 2 * model.hidden_size * model.attention_heads * model.head_dim


def mlp_flops(model: ModelSpec) -> int:
    """Return the FLOPs per token of one layer's MLP block, or of its router and the experts that a token passes."""
    if not model.expert_layers:
        return 6 * model.hidden_size * model.intermediate_size
    assert model.expert_layers == model.num_layers, "experts are in every layer or in none"
    shared = model.shared_intermediate_size
    width = model.experts_per_token * model.expert_intermediate_size + shared
    return 2 * model.hidden_size * (3 * width + model.experts + (shared > 0))
