"""Recompute: the gap is computed as if its KV were not stored, as in every engine today."""

from __future__ import annotations

from spanlab.core.recovery.contract import RECOVERIES, Plain, Recovery


@RECOVERIES.register("recompute")
def recompute() -> Recovery:
    """`recompute`: all layers over the gap, keys and values included."""
    return Plain()
