"""A span of a GatedDeltaNet layer as an affine map of the recurrent state, and cheaper forms of its transition.

With the inputs of a layer fixed, S_t = exp(g_t) (I − β_t k_t k_tᵀ) S_{t−1} + β_t k_t v_tᵀ, so a whole span is
S → A S + B, and spans compose in any order. B is the state that the span leaves in an empty one; A forgets (by
γ = exp Σ g at the least) and overwrites what the span's own keys hold; A − γ I has rank min(length, d_k) at most.
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
"""A chunked gated delta rule with the arguments that transformers and flash-linear-attention share."""


@dataclass(frozen=True)
class AffineMap:
    """S → A S + B of one span, for every head.

    `transition`  A [..., heads, d_k, d_k], fp32
    `state`       B [..., heads, d_k, d_v], fp32
    `decay`       γ [..., heads], fp32: the factor that every direction of a state is forgotten by
    """

    transition: Tensor
    state: Tensor
    decay: Tensor

    def apply(self, state: Tensor) -> Tensor:
        """The state [..., heads, d_k, d_v] after the span."""
        return self.transition @ state + self.state

    def __getitem__(self, index: None) -> AffineMap:
        """The same map as a batch of one."""
        return AffineMap(self.transition[index], self.state[index], self.decay[index])


def compose(first: AffineMap, second: AffineMap) -> AffineMap:
    """The map of `first` followed by `second`."""
    return AffineMap(second.transition @ first.transition, second.apply(first.state), second.decay * first.decay)


def affine_scan(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **rest: Any
) -> tuple[Tensor, AffineMap]:
    """The outputs [N, T, value heads, d_v] of spans from empty states, and their maps.

    Arguments are those of transformers' `torch_chunk_gated_delta_rule`; `scan=` runs another implementation of it, and
    `initial_state` is the map [N, …] of what the spans began with, or None. Its A may lack columns, and so will theirs.
    Columns of a state do not mix, so one scan over values [v, 0] from the state [B, A] ends in the next [B, A].
    """
    heads, width = value.shape[2:]
    scan: Scan = rest.pop("scan", torch_chunk_gated_delta_rule)
    query, key = (each.repeat_interleave(heads // each.shape[2], dim=2) for each in (query, key))
    first = rest.pop("initial_state", None) or _no_tokens(key, heads, width)
    value = torch.nn.functional.pad(value, (0, first.transition.shape[-1]))
    rest |= {"initial_state": torch.cat([first.state, first.transition], dim=-1), "output_final_state": True}
    outputs, final = scan(query, key, value, g=g, beta=beta, **rest)
    assert final is not None, "a scan that was asked for its final state returns it"
    final, decay = final.float(), first.decay * g.float().sum(1).exp()
    return outputs[..., :width], AffineMap(final[..., width:], final[..., :width], decay)


def _no_tokens(key: Tensor, heads: int, width: int) -> AffineMap:
    """A = I and B = 0 for every span of a batch."""
    count, key_dim = len(key), key.shape[-1]
    identity = torch.eye(key_dim, device=key.device).expand(count, heads, -1, -1)
    empty = identity.new_zeros(count, heads, key_dim, width)
    return AffineMap(identity, empty, identity.new_ones(count, heads))


class Transition(Protocol):
    """A stored form of A: what it makes of a state, and the bytes that it takes."""

    @property
    def nbytes(self) -> int: ...

    def apply(self, state: Tensor) -> Tensor:
        """About A S, in fp32."""
        ...


@dataclass(frozen=True)
class Dense:
    """All of A, in the precision of `matrix` [..., heads, d_k, d_k]."""

    matrix: Tensor

    @property
    def nbytes(self) -> int:
        return self.matrix.nbytes

    def apply(self, state: Tensor) -> Tensor:
        return self.matrix.float() @ state


@dataclass(frozen=True)
class LowRank:
    """factor I + left right; a rank of zero leaves the factor alone.

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
class KeptHeads:
    """A of the heads where `kept` [..., heads] is true, one after the other [kept, d_k, d_k]; zero in the others."""

    kept: Tensor
    matrix: Tensor

    @property
    def nbytes(self) -> int:
        return self.kept.nbytes + self.matrix.nbytes

    def apply(self, state: Tensor) -> Tensor:
        after = torch.zeros_like(state)
        after[self.kept] = self.matrix.float() @ state[self.kept]
        return after


def exact(span: AffineMap, dtype: torch.dtype = torch.float32) -> Dense:
    """A as it is, rounded to `dtype`."""
    return Dense(span.transition.to(dtype))


def scalar(factor: Tensor, width: int) -> LowRank:
    """A = factor I: γ for what is forgotten alone, one for a sum of states, zero for the last state alone."""
    empty = factor.new_empty(*factor.shape, width, 0)
    return LowRank(factor, empty, empty.mT)


def low_rank(span: AffineMap, rank: int, dtype: torch.dtype = torch.float32) -> LowRank:
    """γ I and the best `rank` directions of A − γ I."""
    identity = torch.eye(span.transition.shape[-1], device=span.transition.device)
    left, size, right = torch.linalg.svd(span.transition - span.decay[..., None, None] * identity)
    left = left[..., :rank] * size[..., None, :rank]
    return LowRank(span.decay, left.to(dtype), right[..., :rank, :].to(dtype))


def heads_above(span: AffineMap, norm: float) -> KeptHeads:
    """A of the heads whose spectral norm is above `norm`."""
    kept = spectral_norm(span.transition) > norm
    return KeptHeads(kept, span.transition[kept])


def spectral_norm(matrix: Tensor) -> Tensor:
    """The largest factor [...] that a matrix [..., m, n] stretches a vector by."""
    norm: Tensor = torch.linalg.matrix_norm(matrix, ord=2)
    return norm


def assemble(spans: Iterable[tuple[Transition, Tensor]], state: Tensor) -> Tensor:
    """The state after spans in order, each given by a stored A and its B: S ← A S + B."""
    for transition, written in spans:
        state = transition.apply(state) + written.float()
    return state
