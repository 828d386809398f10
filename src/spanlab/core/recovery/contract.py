"""What is done where KV reaches deeper than a recurrent state: the tokens between the two are the gap.

`recompute` computes the gap as if its KV were not there. A replay reads that KV where it is stored, and takes the state
through the gap by fewer blocks of the model. A backfill loads a deeper state from a lower tier.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from spanlab.model_spec import ModelSpec
from spanlab.registry import Registry


@dataclass(frozen=True, slots=True)
class Replay:
    """What computing a token of a gap leaves out of computing a token.

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
        """Tokens of a gap that are replayed: all or none."""
        return gap if self.most_tokens is None or gap <= self.most_tokens else 0

    def left_out(self, start: int, stop: int, alone: bool) -> tuple[int, int]:
        """FLOPs and bytes that tokens `[start, stop)` of a gap do not take.

        The KV of the gap is read from memory, which takes the bytes that are not written.

        `alone`  no row behind the gap is in the chunk: such a row would read all KV before it
        """
        rows = stop - start
        flops = rows * self.token_flops + rows * (start + stop + 1) // 2 * self.pair_flops
        return flops, stop * self.read_bytes if alone else 0


class Recovery(Protocol):
    """How an arm recovers a state; None where it does without that.

    `replay`     takes the state through the gap
    `backfill`   always, or break_even, where it is faster: loads deeper states from the tiers of the study
    """

    @property
    def replay(self) -> Replay | None: ...

    @property
    def backfill(self) -> str | None: ...


@dataclass(frozen=True, slots=True)
class Plain:
    """A recovery that is told by its parts."""

    replay: Replay | None = None
    backfill: str | None = None


#: `model` is the study's.
RECOVERIES: Registry[Recovery] = Registry("recovery", given=("model",))


def key_value_flops(model: ModelSpec) -> int:
    """FLOPs per token of the projections of keys and values in one attention layer."""
    return 4 * model.hidden_size * model.kv_heads * model.head_dim


def attention_block_flops(model: ModelSpec) -> int:
    """FLOPs per token of all projections of one attention layer, its output's among them."""
    return model.projection_flops_per_token + 2 * model.hidden_size * model.attention_heads * model.head_dim


def mlp_flops(model: ModelSpec) -> int:
    """FLOPs per token of one layer's MLP block, or of its router and of the experts that a token passes."""
    if not model.expert_layers:
        return 6 * model.hidden_size * model.intermediate_size
    assert model.expert_layers == model.num_layers, "experts are in every layer or in none"
    shared = model.shared_intermediate_size
    width = model.experts_per_token * model.expert_intermediate_size + shared
    return 2 * model.hidden_size * (3 * width + model.experts + (shared > 0))
