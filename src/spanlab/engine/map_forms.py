"""Forms in which the map of a span is stored: what is kept of A, and what stands in for it when the map is applied.

B, and the convolution's last inputs, are kept in every form. A map is always applied in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from spanlab.core.maps import MapRules
from spanlab.engine.affine import AffineMap, Dense, LowRank, Transition, low_rank, scalar
from spanlab.engine.slot_pool import Part
from spanlab.engine.state_pool import StateShape

Parts = dict[str, Tensor]


class MapForm(Protocol):
    """What is stored of A, as named tensors of all value heads.

    `dtype`      of matrices; factors are always float32
    `carries_a`  whether a scan must carry A along
    """

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def carries_a(self) -> bool: ...

    def parts(self, shape: StateShape) -> dict[str, Part]:
        """The tensors of one layer."""
        ...

    def pack(self, span: AffineMap) -> Parts:
        """The tensors of a map."""
        ...

    def transition(self, parts: Parts, written: Tensor) -> Transition:
        """What stands in for A; `written` is the map's B."""
        ...

    def decay(self, parts: Parts, written: Tensor) -> Tensor:
        """γ [..., heads] where it is stored, else ones."""
        ...


@dataclass(frozen=True)
class Exact:
    """All of A."""

    dtype: torch.dtype
    carries_a: bool = True

    def parts(self, shape: StateShape) -> dict[str, Part]:
        return {"transition": Part((shape.heads, shape.key_dim, shape.key_dim), self.dtype)}

    def pack(self, span: AffineMap) -> Parts:
        return {"transition": span.transition}

    def transition(self, parts: Parts, written: Tensor) -> Transition:
        return Dense(parts["transition"])

    def decay(self, parts: Parts, written: Tensor) -> Tensor:
        return written.new_ones(written.shape[:-2], dtype=torch.float32)


@dataclass(frozen=True)
class Scalar:
    """A = γ I: what a span makes a state forget, without what it overwrites."""

    dtype: torch.dtype
    carries_a: bool = False

    def parts(self, shape: StateShape) -> dict[str, Part]:
        return {"decay": Part((shape.heads,), torch.float32)}

    def pack(self, span: AffineMap) -> Parts:
        return {"decay": span.decay}

    def transition(self, parts: Parts, written: Tensor) -> Transition:
        return scalar(parts["decay"], written.shape[-2])

    def decay(self, parts: Parts, written: Tensor) -> Tensor:
        return parts["decay"]


@dataclass(frozen=True)
class LowRankForm:
    """A = γ I and the best `rank` directions of the rest."""

    dtype: torch.dtype
    rank: int
    carries_a: bool = True

    def parts(self, shape: StateShape) -> dict[str, Part]:
        heads, width = shape.heads, shape.key_dim
        return {
            "decay": Part((heads,), torch.float32),
            "left": Part((heads, width, self.rank), self.dtype),
            "right": Part((heads, self.rank, width), self.dtype),
        }

    def pack(self, span: AffineMap) -> Parts:
        found = low_rank(span, self.rank)
        return {"decay": found.factor, "left": found.left, "right": found.right}

    def transition(self, parts: Parts, written: Tensor) -> Transition:
        return LowRank(parts["decay"], parts["left"], parts["right"])

    def decay(self, parts: Parts, written: Tensor) -> Tensor:
        return parts["decay"]


@dataclass(frozen=True)
class Constant:
    """A = factor I with the same factor for every span: one is a sum of what spans write, zero the last span alone."""

    dtype: torch.dtype
    factor: float
    carries_a: bool = False

    def parts(self, shape: StateShape) -> dict[str, Part]:
        return {}

    def pack(self, span: AffineMap) -> Parts:
        return {}

    def transition(self, parts: Parts, written: Tensor) -> Transition:
        factor = written.new_full(written.shape[:-2], self.factor, dtype=torch.float32)
        return scalar(factor, written.shape[-2])

    def decay(self, parts: Parts, written: Tensor) -> Tensor:
        return written.new_ones(written.shape[:-2], dtype=torch.float32)


FORMS: dict[str, Callable[[torch.dtype, int], MapForm]] = {
    "exact": lambda dtype, rank: Exact(dtype),
    "scalar": lambda dtype, rank: Scalar(dtype),
    "low_rank": LowRankForm,
    "sum": lambda dtype, rank: Constant(dtype, 1.0),
    "last": lambda dtype, rank: Constant(dtype, 0.0),
}
"""By the name that rules have for them."""


def form_of(rules: MapRules) -> MapForm:
    """The form that a policy's rules name."""
    return FORMS[rules.form](getattr(torch, rules.dtype), rules.rank or 0)


@dataclass(frozen=True, eq=False)
class StoredMap:
    """A map in its form: B [..., heads, d_k, d_v] and what is kept of A."""

    form: MapForm
    written: Tensor
    of_a: Parts

    def apply(self, state: Tensor) -> Tensor:
        """The state after the span, float32."""
        return self.form.transition(self.of_a, self.written).apply(state) + self.written.float()

    def unpacked(self) -> AffineMap:
        """The map to go on from inside the span; no column of A where the form needs none."""
        width = self.written.shape[-2]
        columns = torch.eye(width, device=self.written.device)[:, : width * self.form.carries_a]
        shape = (*self.written.shape[:-2], *columns.shape)
        transition = self.form.transition(self.of_a, self.written).apply(columns.expand(shape))
        return AffineMap(transition, self.written.float(), self.form.decay(self.of_a, self.written))
