"""Where a benchmark runs, and how it says that it does."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from spanlab.settings import EngineSettings


def device_of(engine: EngineSettings) -> str:
    """Where the model runs."""
    device = engine.device
    return device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def use_threads(engine: EngineSettings) -> int:
    """Set torch's threads: as asked, else one per core that this process may use."""
    torch.set_num_threads(engine.threads or len(os.sched_getaffinity(0)))
    return torch.get_num_threads()


def device_name(device: torch.device) -> str:
    """The card's name, or cpu."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def engine_facts() -> dict[str, str]:
    """Versions that only the engine has."""
    import transformers

    return {"torch": torch.__version__, "transformers": transformers.__version__}


@contextmanager
def progress(console: Console) -> Iterator[Progress]:
    """A bar; silent where nobody looks."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    times = (TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, *times, console=console, transient=True, disable=not console.is_terminal) as bars:
        yield bars
