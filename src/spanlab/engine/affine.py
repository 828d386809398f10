"""A span of a GatedDeltaNet layer as an affine map of the recurrent state, and compressed forms of its transition.

With the inputs of a layer fixed, S_t = exp(g_t) (I − β_t k_t k_tᵀ) S_{t−1} + β_t k_t v_tᵀ, so a span is the map
S → A S + B, and spans compose in any order. B is the state after the span from an empty state. A decays a state (by
γ = exp Σ g or more) and erases the directions of the span's keys; A − γ I has rank min(length, d_k) at most.
Composing maps of arbitrary order is known for diagonal state space models: PICASO, arXiv 2502.17605.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

Scan = Callable[..., tuple[Tensor, Tensor | None]]
"""A chunked gated delta rule with the common arguments of transformers and flash-linear-attention."""


@dataclass(frozen=True)
class AffineMap:
    """S → A S + B of one span, for every head.

    `transition`  A [..., heads, d_k, d_k], fp32
    `state`       B [..., heads, d_k, d_v], fp32
    `decay`       γ [..., heads], fp32: the decay of all directions of a state
    """

    transition: Tensor
    state: Tensor
    decay: Tensor

    def apply(self, state: Tensor) -> Tensor:
        """The state [..., heads, d_k, d_v] after the span."""
        return self.transition @ state + self.state


def compose(first: AffineMap, second: AffineMap) -> AffineMap:
    """Compose two maps: `first`, then `second`."""
    return AffineMap(second.transition @ first.transition, second.apply(first.state), second.decay * first.decay)


def affine_scan(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **options: Any
) -> tuple[Tensor, AffineMap]:
    """Compute the outputs [N, T, value heads, d_v] of spans from empty states, and their maps.

    Arguments are those of transformers' `torch_chunk_gated_delta_rule`; `scan=` selects another implementation, and
    `initial_state` is the map [N, …] of the spans' earlier tokens, or None. If its A lacks columns, the results do too.
    State columns are independent, so one scan over values [v, 0] from the state [B, A] yields the next [B, A].
    """
    heads, width = value.shape[2:]
    scan: Scan = options.pop("scan", torch_chunk_gated_delta_rule)
    query, key = (tensor.repeat_interleave(heads // tensor.shape[2], dim=2) for tensor in (query, key))
    first = options.pop("initial_state", None) or _no_tokens(key, heads, width)
    value = torch.nn.functional.pad(value, (0, first.transition.shape[-1]))
    options |= {"initial_state": torch.cat([first.state, first.transition], dim=-1), "output_final_state": True}
    outputs, final = scan(query, key, value, g=g, beta=beta, **options)
    assert final is not None, "a scan with output_final_state returns a final state"
    final, decay = final.float(), first.decay * g.float().sum(1).exp()
    return outputs[..., :width], AffineMap(final[..., width:], final[..., :width], decay)


def _no_tokens(key: Tensor, heads: int, width: int) -> AffineMap:
    """The map of no tokens, A = I and B = 0, for every span of a batch."""
    count, key_dim = len(key), key.shape[-1]
    identity = torch.eye(key_dim, device=key.device).expand(count, heads, -1, -1)
    empty = identity.new_zeros(count, heads, key_dim, width)
    return AffineMap(identity, empty, identity.new_ones(count, heads))


class Transition(Protocol):
    """A stored form of A: its product with a state, and its bytes."""

    @property
    def nbytes(self) -> int: ...

    def apply(self, state: Tensor) -> Tensor:
        """Approximate A S in fp32."""
        ...


@dataclass(frozen=True)
class Dense:
    """The full A, in the precision of `matrix` [..., heads, d_k, d_k]."""

    matrix: Tensor

    @property
    def nbytes(self) -> int:
        return self.matrix.nbytes

    def apply(self, state: Tensor) -> Tensor:
        return self.matrix.float() @ state


@dataclass(frozen=True)
class LowRank:
    """A = factor I + left right; with rank 0, A = factor I.

    `factor`  [..., heads]
    `left`    [..., heads, d_k, rank]
    `right`   [..., heads, rank, d_k]
    """

    factor: Tensor
    left: Tensor
    right: Tensor

    @property
    def nbytes(self) -> int:
        return self.factor.nbytes + self.left.nbytes + self.right.nbytes

    def apply(self, state: Tensor) -> Tensor:
        return self.factor[..., None, None] * state + self.left.float() @ (self.right.float() @ state)


@dataclass(frozen=True)
class SelectedHeads:
    """A of the heads where `mask` [..., heads] is true, concatenated in `matrix` [selected, d_k, d_k]; else zero."""

    mask: Tensor
    matrix: Tensor

    @property
    def nbytes(self) -> int:
        return self.mask.nbytes + self.matrix.nbytes

    def apply(self, state: Tensor) -> Tensor:
        after = torch.zeros_like(state)
        after[self.mask] = self.matrix.float() @ state[self.mask]
        return after


def exact(span: AffineMap, dtype: torch.dtype = torch.float32) -> Dense:
    """The full A, rounded to `dtype`."""
    return Dense(span.transition.to(dtype))


def scalar(factor: Tensor, width: int) -> LowRank:
    """A = factor I: γ for decay only, 1 for a sum of states, 0 for the last state only."""
    empty = factor.new_empty(*factor.shape, width, 0)
    return LowRank(factor, empty, empty.mT)


def low_rank(span: AffineMap, rank: int, dtype: torch.dtype = torch.float32) -> LowRank:
    """γ I plus the best approximation of A − γ I of rank `rank`."""
    identity = torch.eye(span.transition.shape[-1], device=span.transition.device)
    left, size, right = torch.linalg.svd(span.transition - span.decay[..., None, None] * identity)
    left = left[..., :rank] * size[..., None, :rank]
    return LowRank(span.decay, left.to(dtype), right[..., :rank, :].to(dtype))


def heads_above(span: AffineMap, norm: float) -> SelectedHeads:
    """A of the heads with a spectral norm above `norm`, and zero for the other heads."""
    mask = spectral_norm(span.transition) > norm
    return SelectedHeads(mask, span.transition[mask])


def spectral_norm(matrix: Tensor) -> Tensor:
    """Largest singular value [...] of matrices [..., m, n]."""
    norm: Tensor = torch.linalg.matrix_norm(matrix, ord=2)
    return norm


def assemble(spans: Iterable[tuple[Transition, Tensor]], state: Tensor) -> Tensor:
    """Apply spans to a state in order, each a stored A and its B: S ← A S + B."""
    for transition, span_state in spans:
        state = transition.apply(state) + span_state.float()
    return state
