"""A recurrent mixer that runs on the map of a span as it runs on a state: its scans carry A along.

Mixers hand what a cache gives them to their scan, and what the scan gives back to the cache, and look at neither. So a
map can take the way of a state, and everything but the scan is the mixer's own code.
"""

from __future__ import annotations

import sys
from functools import wraps
from typing import Any

from torch import Tensor, nn

from spanlab.engine.affine import AffineMap, Scan, affine_scan

_SCANS = "gated_delta_rule"
_MARK = "span_maps"


def carry_maps(mixer: nn.Module) -> None:
    """Let the scans that a mixer calls begin with an `AffineMap` in place of a state, and then end with one.

    They are attributes of the mixer, or of the module that defines it (transformers from 5.23); with a state they do
    what they did.
    """
    for owner in (mixer, sys.modules[type(mixer).__module__]):
        names = [name for name in vars(owner) if name.endswith(_SCANS)]
        for name in names:
            setattr(owner, name, _with_maps(getattr(owner, name)))
        if names:
            return


def _with_maps(scan: Any) -> Any:
    if hasattr(scan, _MARK):
        return scan

    @wraps(scan)
    def run(
        query: Tensor, key: Tensor, value: Tensor, *, initial_state: Tensor | AffineMap | None = None, **rest: Any
    ) -> tuple[Tensor, Tensor | AffineMap | None]:
        if isinstance(initial_state, AffineMap):
            return affine_scan(query, key, value, scan=scan, initial_state=initial_state, **rest)
        plain: Scan = scan
        return plain(query, key, value, initial_state=initial_state, **rest)

    setattr(run, _MARK, True)
    return run
