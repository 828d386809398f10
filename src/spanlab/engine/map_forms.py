"""Storage forms of a span's map: which tensors represent A, and how they are applied to a state.

B and the conv state are stored in every form. A map is always applied in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from spanlab.core.maps import MapRules
from spanlab.engine.affine import AffineMap, Dense, LowRank, Transition, low_rank, scalar
from spanlab.engine.slot_pool import TensorSpec
from spanlab.engine.state_pool import StateShape

Tensors = dict[str, Tensor]


class MapForm(Protocol):
    """The stored representation of A, as named tensors of all value heads.

    `dtype`      data type of matrices; factors are always float32
    `carries_a`  whether a scan must compute A next to B
    """

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def carries_a(self) -> bool: ...

    def specs(self, shape: StateShape) -> dict[str, TensorSpec]:
        """Shapes and types of the tensors of one layer."""
        ...

    def pack(self, span: AffineMap) -> Tensors:
        """The tensors that store a map."""
        ...

    def transition(self, tensors: Tensors, state: Tensor) -> Transition:
        """The stored A as an operator on states; `state` is the map's B."""
        ...


@dataclass(frozen=True)
class Exact:
    """The full matrix A."""

    dtype: torch.dtype
    carries_a: bool = True

    def specs(self, shape: StateShape) -> dict[str, TensorSpec]:
        return {"transition": TensorSpec((shape.heads, shape.key_dim, shape.key_dim), self.dtype)}

    def pack(self, span: AffineMap) -> Tensors:
        return {"transition": span.transition}

    def transition(self, tensors: Tensors, state: Tensor) -> Transition:
        return Dense(tensors["transition"])


@dataclass(frozen=True)
class Scalar:
    """A = γ I: the decay of a span, without its overwriting of the state."""

    dtype: torch.dtype
    carries_a: bool = False

    def specs(self, shape: StateShape) -> dict[str, TensorSpec]:
        return {"decay": TensorSpec((shape.heads,), torch.float32)}

    def pack(self, span: AffineMap) -> Tensors:
        return {"decay": span.decay}

    def transition(self, tensors: Tensors, state: Tensor) -> Transition:
        return scalar(tensors["decay"], state.shape[-2])


@dataclass(frozen=True)
class LowRankForm:
    """A = γ I plus the best approximation of A − γ I of rank `rank`."""

    dtype: torch.dtype
    rank: int
    carries_a: bool = True

    def specs(self, shape: StateShape) -> dict[str, TensorSpec]:
        heads, width = shape.heads, shape.key_dim
        return {
            "decay": TensorSpec((heads,), torch.float32),
            "left": TensorSpec((heads, width, self.rank), self.dtype),
            "right": TensorSpec((heads, self.rank, width), self.dtype),
        }

    def pack(self, span: AffineMap) -> Tensors:
        approximation = low_rank(span, self.rank)
        return {"decay": approximation.factor, "left": approximation.left, "right": approximation.right}

    def transition(self, tensors: Tensors, state: Tensor) -> Transition:
        return LowRank(tensors["decay"], tensors["left"], tensors["right"])


@dataclass(frozen=True)
class Constant:
    """A = factor I for every span: factor 1 sums the spans' states, factor 0 keeps the last span only."""

    dtype: torch.dtype
    factor: float
    carries_a: bool = False

    def specs(self, shape: StateShape) -> dict[str, TensorSpec]:
        return {}

    def pack(self, span: AffineMap) -> Tensors:
        return {}

    def transition(self, tensors: Tensors, state: Tensor) -> Transition:
        factor = state.new_full(state.shape[:-2], self.factor, dtype=torch.float32)
        return scalar(factor, state.shape[-2])


FORMS: dict[str, Callable[[torch.dtype, int], MapForm]] = {
    "exact": lambda dtype, rank: Exact(dtype),
    "scalar": lambda dtype, rank: Scalar(dtype),
    "low_rank": LowRankForm,
    "sum": lambda dtype, rank: Constant(dtype, 1.0),
    "last": lambda dtype, rank: Constant(dtype, 0.0),
}
"""Constructors by `MapRules.form`."""


def form_of(rules: MapRules) -> MapForm:
    """The form that a policy's map rules select."""
    return FORMS[rules.form](getattr(torch, rules.dtype), rules.rank or 0)


@dataclass(frozen=True, eq=False)
class StoredMap:
    """A map in its stored form: `state` is B [..., heads, d_k, d_v]; `transition_tensors` represent A."""

    form: MapForm
    state: Tensor
    transition_tensors: Tensors

    def apply(self, state: Tensor) -> Tensor:
        """The state after the span, float32."""
        return self.form.transition(self.transition_tensors, self.state).apply(state) + self.state.float()

    def to_affine(self) -> AffineMap:
        """The map as the start of a scan over further tokens; A has no columns if the form needs none.

        γ is 1 unless the form stores it.
        """
        width = self.state.shape[-2]
        columns = torch.eye(width, device=self.state.device)[:, : width * self.form.carries_a]
        shape = (*self.state.shape[:-2], *columns.shape)
        transition = self.form.transition(self.transition_tensors, self.state).apply(columns.expand(shape))
        ones = self.state.new_ones(self.state.shape[:-2], dtype=torch.float32)
        return AffineMap(transition, self.state.float(), self.transition_tensors.get("decay", ones))
