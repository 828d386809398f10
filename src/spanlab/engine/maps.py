"""Affine maps of the recurrent state over a span: their algebra, stored forms and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from spanlab.core.repair import MapRules
from spanlab.engine.slots import Layers, SlotPool, StateShape, TensorSpec

# ------------------------------------------------------------------------------
# A span of a GatedDeltaNet layer as an affine map of the recurrent state, and compressed forms
# of its transition.
#
# With the inputs of a layer fixed, S_t = exp(g_t) (I − β_t k_t k_tᵀ) S_{t−1} + β_t k_t v_tᵀ, so
# a span is the map S → A S + B, and spans compose in any order. B is the state after the span
# from an empty state. A decays a state (by γ = exp Σ g or more) and erases the directions of
# the span's keys; A − γ I has rank min(length, d_k) at most. Composing maps of arbitrary order
# is known for diagonal state space models: PICASO, arXiv 2502.17605.
# ------------------------------------------------------------------------------

Scan = Callable[..., tuple[Tensor, Tensor | None]]
"""A chunked gated delta rule with the common arguments of transformers and
flash-linear-attention."""


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
    return AffineMap(
        second.transition @ first.transition, second.apply(first.state), second.decay * first.decay
    )


def affine_scan(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **options: Any
) -> tuple[Tensor, AffineMap]:
    """Compute the outputs [N, T, value heads, d_v] of spans from empty states, and their maps.

    Arguments are those of transformers' `torch_chunk_gated_delta_rule`; `scan=` selects another
    implementation, and `initial_state` is the map [N, …] of the spans' earlier tokens, or None. If
    its A lacks columns, the results do too. State columns are independent, so one scan over values
    [v, 0] from the state [B, A] yields the next [B, A].
    """
    heads, width = value.shape[2:]
    scan: Scan = options.pop("scan", torch_chunk_gated_delta_rule)
    query, key = (
        tensor.repeat_interleave(heads // tensor.shape[2], dim=2) for tensor in (query, key)
    )
    first = options.pop("initial_state", None)
    if first is None:  # the map of no tokens, A = I and B = 0
        count, key_dim = len(key), key.shape[-1]
        identity = torch.eye(key_dim, device=key.device).expand(count, heads, -1, -1)
        empty = identity.new_zeros(count, heads, key_dim, width)
        first = AffineMap(identity, empty, identity.new_ones(count, heads))
    value = torch.nn.functional.pad(value, (0, first.transition.shape[-1]))
    options |= {
        "initial_state": torch.cat([first.state, first.transition], dim=-1),
        "output_final_state": True,
    }
    outputs, final = scan(query, key, value, g=g, beta=beta, **options)
    assert final is not None, "a scan with output_final_state returns a final state"
    final, decay = final.float(), first.decay * g.float().sum(1).exp()
    return outputs[..., :width], AffineMap(final[..., width:], final[..., :width], decay)


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
        return self.factor[..., None, None] * state + self.left.float() @ (
            self.right.float() @ state
        )


@dataclass(frozen=True)
class SelectedHeads:
    """A of the heads where `mask` [..., heads] is true, concatenated in `matrix` [selected, d_k,
    d_k]; else zero."""

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


# ------------------------------------------------------------------------------
# Storage forms of a span's map: which tensors represent A, and how they are applied to a state.
#
# B and the conv state are stored in every form. A map is always applied in float32.
# ------------------------------------------------------------------------------

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
        return {
            "decay": approximation.factor,
            "left": approximation.left,
            "right": approximation.right,
        }

    def transition(self, tensors: Tensors, state: Tensor) -> Transition:
        return LowRank(tensors["decay"], tensors["left"], tensors["right"])


@dataclass(frozen=True)
class Constant:
    """A = factor I for every span: factor 1 sums the spans' states, factor 0 keeps the last span
    only."""

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
    """A map in its stored form: `state` is B [..., heads, d_k, d_v]; `transition_tensors` represent
    A."""

    form: MapForm
    state: Tensor
    transition_tensors: Tensors

    def apply(self, state: Tensor) -> Tensor:
        """The state after the span, float32."""
        return (
            self.form.transition(self.transition_tensors, self.state).apply(state)
            + self.state.float()
        )

    def to_affine(self) -> AffineMap:
        """The map as the start of a scan over further tokens; A has no columns if the form needs
        none.

        γ is 1 unless the form stores it.
        """
        width = self.state.shape[-2]
        columns = torch.eye(width, device=self.state.device)[:, : width * self.form.carries_a]
        shape = (*self.state.shape[:-2], *columns.shape)
        transition = self.form.transition(self.transition_tensors, self.state).apply(
            columns.expand(shape)
        )
        ones = self.state.new_ones(self.state.shape[:-2], dtype=torch.float32)
        return AffineMap(transition, self.state.float(), self.transition_tensors.get("decay", ones))


# ------------------------------------------------------------------------------
# Slots for maps of spans: stored maps in their storage form, and working maps of spans under
# computation.
# ------------------------------------------------------------------------------


@dataclass(frozen=True)
class MapShape:
    """Shapes and types of span maps.

    `state`     shapes of a recurrent state
    `form`      storage form of A
    `dtype`     data type of the conv state
    `repaired`  number of leading tokens of every span that are recomputed; a map covers the tokens
                after them
    """

    state: StateShape
    form: MapForm
    dtype: torch.dtype
    repaired: int = 0


class WorkingMaps(SlotPool):
    """Maps of span prefixes in float32; columns of A that the form does not use are omitted.

    After repaired tokens the scan continues from their state, as its outputs require. The scan also
    transforms a copy of that state without writing values to it; B of the tokens after the repair
    is the difference of the two.
    """

    def __init__(
        self, shape: MapShape, device: torch.device | str, *, poison: bool = False
    ) -> None:
        self._repairs, state = shape.repaired > 0, shape.state
        columns = state.key_dim if shape.form.carries_a else 0
        specs = {
            "written": state.state_spec(),
            "transition": TensorSpec((state.heads, state.key_dim, columns), torch.float32),
            "decay": TensorSpec((state.heads,), torch.float32),
            "conv": state.window_spec(shape.dtype),
        }
        if self._repairs:
            specs["before"] = state.state_spec()
        super().__init__(state.layers, specs, device, poison=poison)

    def clear(self, layer: Layers, slot: int) -> None:
        """Make a slot the map of no tokens, with a zero conv window."""
        super().clear(layer, slot)
        self.reset(layer, slot)

    def reset(self, layer: Layers, slot: int) -> None:
        """Make a slot the map of no tokens, A = I and B = 0; the conv window is unchanged."""
        self.tensor("written", layer, slot).zero_()
        if self._repairs:
            self.tensor("before", layer, slot).zero_()
        self._reset_transition(layer, slot)

    def _reset_transition(self, layer: Layers, slot: int) -> None:
        self.tensor("transition", layer, slot).zero_().diagonal(dim1=-2, dim2=-1).fill_(1)
        self.tensor("decay", layer, slot).fill_(1)

    def begin_after_repair(self, layer: Layers, slot: int) -> None:
        """Restart a map after the tokens that it covers, which are recomputed on reuse."""
        self.tensor("before", layer, slot).copy_(self.tensor("written", layer, slot))
        self._reset_transition(layer, slot)

    def columns(self, layer: Layers, slot: int) -> tuple[Tensor, ...]:
        """Views of the columns that a scan updates; values are written to the first tensor only."""
        names = ("written", "before", "transition") if self._repairs else ("written", "transition")
        return tuple(self.tensor(name, layer, slot) for name in names)

    def span_state(self, layer: Layers, slot: int) -> Tensor:
        """B of all tokens, including recomputed ones."""
        return self.tensor("written", layer, slot)

    def map(self, layer: Layers, slot: int) -> AffineMap:
        """The working map of one layer or of all."""
        transition, written, decay = (
            self.tensor(name, layer, slot) for name in ("transition", "written", "decay")
        )
        return AffineMap(
            transition,
            written - self.tensor("before", layer, slot) if self._repairs else written,
            decay,
        )

    def load_map(self, layer: Layers, slot: int, span: AffineMap, span_state: Tensor) -> None:
        """Set a slot to a map and to `span_state`, B of all tokens; the conv window is
        unchanged."""
        for name, tensor in (
            ("transition", span.transition),
            ("decay", span.decay),
            ("written", span_state),
        ):
            self.tensor(name, layer, slot).copy_(tensor)
        if self._repairs:
            self.tensor("before", layer, slot).copy_(span_state - span.state)


class StoredMaps(SlotPool):
    """Maps in storage form: B, the conv state, and the form's representation of A.

    If leading tokens are repaired, B of all tokens is stored too.
    """

    def __init__(
        self, shape: MapShape, device: torch.device | str, *, poison: bool = False
    ) -> None:
        form, state = shape.form, shape.state
        self.form = form
        self._repairs = shape.repaired > 0
        self._transition_specs = form.specs(state)
        specs = {"written": state.state_spec(form.dtype), "conv": state.window_spec(shape.dtype)}
        specs |= self._transition_specs
        if self._repairs:
            specs["alone"] = state.state_spec(form.dtype)
        super().__init__(state.layers, specs, device, poison=poison)

    def packed(self, span: AffineMap) -> StoredMap:
        """Convert a map to its stored form, including rounding."""
        packed = self.form.pack(span)
        tensors = {
            name: packed[name].to(spec.dtype) for name, spec in self._transition_specs.items()
        }
        return StoredMap(self.form, span.state.to(self.form.dtype), tensors)

    def write(self, layer: Layers, slot: int, span: AffineMap, span_state: Tensor) -> None:
        """Store a map and `span_state`, B of all tokens; the conv window is unchanged."""
        target, source = self.map(layer, slot), self.packed(span)
        if self._repairs:
            self.tensor("alone", layer, slot).copy_(span_state)
        target.state.copy_(source.state)
        for name, tensor in source.transition_tensors.items():
            target.transition_tensors[name].copy_(tensor)

    def map(self, layer: Layers, slot: int) -> StoredMap:
        """The stored map of one layer or of all, as views."""
        tensors = {name: self.tensor(name, layer, slot) for name in self._transition_specs}
        return StoredMap(self.form, self.tensor("written", layer, slot), tensors)

    def span_state(self, layer: Layers, slot: int) -> Tensor:
        """B of all tokens, including recomputed ones, as a view."""
        return self.tensor("alone" if self._repairs else "written", layer, slot)


class SpanMaps:
    """The maps of one engine: working maps, and maps in the policy's store."""

    def __init__(
        self, shape: MapShape, device: torch.device | str, *, poison: bool = False
    ) -> None:
        self.shape = shape
        self.working = WorkingMaps(shape, device, poison=poison)
        self.stored = StoredMaps(shape, device, poison=poison)

    def store(self, layer: Layers, working: int, stored: int) -> None:
        """Write a working map to a slot of the stored maps; the conv window is not copied."""
        self.stored.write(
            layer, stored, self.working.map(layer, working), self.working.span_state(layer, working)
        )

    def load_map(self, stored: int, layer: Layers, working: int) -> None:
        """Load a stored map into a working map; the conv window is not copied."""
        span_state = self.stored.span_state(layer, stored).float()
        self.working.load_map(
            layer, working, self.stored.map(layer, stored).to_affine(), span_state
        )
