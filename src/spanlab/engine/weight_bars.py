"""Loading of weights without the bar that transformers prints for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub.utils import enable_progress_bars  # type: ignore[attr-defined]  # not named as exported
from transformers.utils import logging


@contextmanager
def no_weight_bars() -> Iterator[None]:
    """Load in silence: reading a file takes seconds. Downloads, which take longer, keep the hub's own bar."""
    if not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    enable_progress_bars()  # the call above switches those of the hub off, too
    try:
        yield
    finally:
        logging.enable_progress_bar()
