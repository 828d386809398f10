"""The two steps of a recurrent mixer at which rows meet those before them: its convolution, and its scan.

A mixer of transformers hands further keyword arguments on to both. So a forward of ours rides along, and takes both
over; projections, gates and norms are the mixer's own code, over all rows at once.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from spanlab.engine.chunk_scan import ScanInputs

KEYWORD = "span_rows"
_CONVOLUTION, _SCAN = "causal_conv1d_fn", "chunk_gated_delta_rule"
_MARK = "takes_span_rows"

Convolution = Callable[..., Tensor]


class PackedRows(Protocol):
    """One layer's rows of many sequences."""

    def convolve(self, convolution: Convolution, rows: Tensor, *given: object) -> Tensor:
        """The convolution's outputs [1, channels, T]."""
        ...

    def scan(self, inputs: ScanInputs) -> Tensor:
        """The scan's outputs [T, heads, d_v]."""
        ...


class LayeredRows(ABC):
    """One forward's rows in all recurrent layers; each mixer is one that was given to `take_over`."""

    def run(self, layer: int, mixer: nn.Module, hidden: Tensor) -> Tensor:
        """One layer's output [1, T, H]; states in the pool move on, copies are kept."""
        out: Tensor = mixer(hidden, **{KEYWORD: _LayerRows(self, layer)})
        return out

    @abstractmethod
    def convolve(self, layer: int, convolution: Convolution, rows: Tensor, *given: object) -> Tensor:
        """What a layer's convolution makes of rows [1, channels, T]."""

    @abstractmethod
    def scan(self, layer: int, inputs: ScanInputs) -> Tensor:
        """What a layer's scan makes of rows: [T, heads, d_v]."""

    @abstractmethod
    def done(self) -> None:
        """Note what every state has seen, once all layers have run."""


class _LayerRows(NamedTuple):
    """A forward's rows in one layer."""

    rows: LayeredRows
    layer: int

    def convolve(self, convolution: Convolution, rows: Tensor, *given: object) -> Tensor:
        return self.rows.convolve(self.layer, convolution, rows, *given)

    def scan(self, inputs: ScanInputs) -> Tensor:
        return self.rows.scan(self.layer, inputs)


def take_over(mixer: nn.Module) -> None:
    """Let a mixer's convolution and scan be ours in forwards of ours; in others they do what they did.

    They are attributes of the mixer, or of the module that defines it.
    """
    for suffix, method in ((_CONVOLUTION, _convolution), (_SCAN, _scan)):
        owners = (mixer, sys.modules[type(mixer).__module__])
        owner = next(owner for owner in owners if _names(owner, suffix))
        for name in _names(owner, suffix):
            function = getattr(owner, name)
            if not hasattr(function, _MARK):
                setattr(owner, name, method(function))


def _names(owner: object, suffix: str) -> list[str]:
    return [name for name in vars(owner) if name.endswith(suffix)]


def _convolution(own: Convolution) -> Convolution:
    @wraps(own)
    def run(
        rows: Tensor,
        *given: Any,
        activation: str | None = None,
        span_rows: PackedRows | None = None,
        **rest: Any,
    ) -> Tensor:
        if span_rows is None:
            return own(rows, *given, activation=activation, **rest)
        return span_rows.convolve(lambda *inputs: own(*inputs, activation=activation), rows, *given)

    setattr(run, _MARK, True)
    return run


def _scan(own: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(own)
    def run(
        query: Tensor, key: Tensor, value: Tensor, *given: Any, span_rows: PackedRows | None = None, **rest: Any
    ) -> Any:
        if span_rows is None:
            return own(query, key, value, *given, **rest)
        inputs = ScanInputs(query[0], key[0], value[0], rest["g"][0], rest["beta"][0])
        return span_rows.scan(inputs)[None], None

    setattr(run, _MARK, True)
    return run
