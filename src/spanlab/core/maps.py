"""Affine maps of the recurrent state, which let recurrent layers reuse a span anywhere in a prompt.

With its inputs fixed, a span of a GatedDeltaNet layer takes the state S to A · S + B, per value head. A span that is
computed alone, from an empty state, yields A [d_k, d_k], B [d_k, d_v] and the last inputs of its short convolution.
Where the first tokens of every span are repaired, the state passes through these tokens again. The stored map then
covers the tokens behind them; B of the whole span is stored with it, to resume inside the span and to begin a prompt
with the span. Composing spans in any order is known for diagonal state space models: PICASO, arXiv 2502.17605.
"""

from __future__ import annotations

from dataclasses import dataclass

from spanlab.checks import one_of, positive
from spanlab.model_spec import ModelSpec

FORMS = ("exact", "scalar", "low_rank", "sum", "last")
ITEMSIZES = {"float32": 4, "bfloat16": 2}
_FACTOR_BYTES = 4  # γ is stored in float32: bfloat16 has no number between 0.996 and 1


@dataclass
class MapRules:
    """How the map S → A · S + B of a span is kept; it is computed and composed in float32.

    `form`   exact: A and B; scalar: A = γ · I, γ being the product of the span's decays; low_rank: γ · I and the best
             `rank` directions of the rest; sum: A = I; last: A = 0, so that only the last span is remembered
    `rank`   of low_rank
    `dtype`  of A and B where they are kept: float32 or bfloat16
    `interval`  tokens between maps within a span, which spans that begin alike go on from; null: one, at its end
    """

    form: str = "exact"
    rank: int | None = None
    dtype: str = "float32"
    interval: int | None = None

    def check(self, path: str) -> None:
        """Raise ValueError for invalid settings; `path` is their key."""
        one_of(f"{path}.form", self.form, FORMS)
        one_of(f"{path}.dtype", self.dtype, ITEMSIZES)
        positive(f"{path}.rank", self.rank)
        positive(f"{path}.interval", self.interval)
        if (self.rank is not None) != (self.form == "low_rank"):
            expected = "a rank" if self.form == "low_rank" else "null"
            raise ValueError(f"{path}.rank={self.rank} with form={self.form}: expected {expected}")

    def positions(self, length: int) -> tuple[int, ...]:
        """Return the positions in a span behind which a map is stored, increasing."""
        inside = range(self.interval, length, self.interval) if self.interval else ()
        return *inside, length

    @property
    def transitions(self) -> bool:
        """Whether A is computed along with B; in other forms A is fixed or follows from the decays."""
        return self.form in ("exact", "low_rank")


def map_bytes(rules: MapRules, model: ModelSpec, repaired: bool = False) -> int:
    """Bytes of one stored map: A and B of every recurrent layer and value head, and the conv state of a checkpoint.

    A: exact d_k · d_k numbers; scalar γ; low_rank γ and 2 · rank · d_k numbers; sum and last none. B: d_k · d_v.

    `repaired`  the first tokens of spans are recomputed, so that there is a second B
    """
    size, key_dim = ITEMSIZES[rules.dtype], model.recurrent_key_dim
    transition = {
        "exact": key_dim * key_dim * size,
        "scalar": _FACTOR_BYTES,
        "low_rank": _FACTOR_BYTES + 2 * (rules.rank or 0) * key_dim * size,
    }
    head = transition.get(rules.form, 0) + (1 + repaired) * key_dim * model.recurrent_value_dim * size
    return model.recurrent_layers * model.recurrent_value_heads * head + model.conv_state_bytes


def working_map_bytes(model: ModelSpec, repaired: bool = False) -> int:
    """Bytes of the map of a span during its computation: exact, in float32."""
    return map_bytes(MapRules(), model, repaired)
