"""Interception of the two sequential operations of a recurrent mixer: its convolution and its scan.

Transformers' mixers pass extra keyword arguments to both. So a forward is passed as a keyword argument and replaces
both; projections, gates and norms are the mixer's code, over all rows at once.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor, nn

from spanlab.engine.chunk_scan import ScanInputs

KEYWORD = "span_rows"
_CONVOLUTION, _SCAN = "causal_conv1d_fn", "chunk_gated_delta_rule"
_MARK = "takes_span_rows"

Convolution = Callable[..., Tensor]


class LayeredRows(ABC):
    """Rows of one forward in all recurrent layers; mixers must be patched by `intercept_mixer`."""

    def run(self, layer: int, mixer: nn.Module, hidden: Tensor) -> Tensor:
        """Compute one layer's output [1, T, H]; updates states in the pool and copies captured states."""
        out: Tensor = mixer(hidden, **{KEYWORD: (self, layer)})
        return out

    @abstractmethod
    def convolve(self, layer: int, convolution: Convolution, rows: Tensor, *args: object) -> Tensor:
        """Compute a layer's convolution of rows [1, channels, T]."""

    @abstractmethod
    def scan(self, layer: int, inputs: ScanInputs) -> Tensor:
        """Compute a layer's scan outputs [T, heads, d_v]."""

    @abstractmethod
    def finish(self) -> None:
        """Update slot positions after all layers have run."""


def intercept_mixer(mixer: nn.Module) -> None:
    """Patch a mixer's convolution and scan to use `LayeredRows` if they are passed; other calls are unchanged.

    Both functions are attributes of the mixer, or of the module that defines it.
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


def _convolution(original: Convolution) -> Convolution:
    @wraps(original)
    def run(
        rows: Tensor,
        *args: Any,
        activation: str | None = None,
        span_rows: tuple[LayeredRows, int] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        if span_rows is None:
            return original(rows, *args, activation=activation, **kwargs)
        layered, layer = span_rows
        return layered.convolve(layer, lambda *inputs: original(*inputs, activation=activation), rows, *args)

    setattr(run, _MARK, True)
    return run


def _scan(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def run(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *args: Any,
        span_rows: tuple[LayeredRows, int] | None = None,
        **kwargs: Any,
    ) -> Any:
        if span_rows is None:
            return original(query, key, value, *args, **kwargs)
        layered, layer = span_rows
        inputs = ScanInputs(query[0], key[0], value[0], kwargs["g"][0], kwargs["beta"][0])
        return layered.scan(layer, inputs)[None], None

    setattr(run, _MARK, True)
    return run
