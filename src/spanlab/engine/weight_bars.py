"""Loading of weights without transformers' progress bar."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub.utils import enable_progress_bars  # type: ignore[attr-defined]  # not named as exported
from transformers.utils import logging


@contextmanager
def no_weight_bars() -> Iterator[None]:
    """Hide the progress bar of weight loading, which takes seconds; downloads keep the hub's progress bar."""
    if not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    enable_progress_bars()  # the call above disables the hub's bars too
    try:
        yield
    finally:
        logging.enable_progress_bar()
