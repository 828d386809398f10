"""Progress bars of a study on the terminal: all requests with the remaining time, and each running arm."""

from __future__ import annotations

from contextlib import suppress
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class ArmProgress:
    """A bar for the whole study and one for each running arm; disabled where the console is no terminal.

    `totals`  number of requests by arm, in the order of the counts that `show` takes
    """

    def __init__(self, totals: dict[str, int], console: Console) -> None:
        self._totals = list(totals.items())
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._all = self._bars.add_task("all arms", total=sum(totals.values()))
        self._arms = {name: self._bars.add_task(name, total=total, visible=False) for name, total in self._totals}

    def __enter__(self) -> ArmProgress:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def show(self, counts: list[int]) -> None:
        """Update every bar: finished requests by arm."""
        self._bars.update(self._all, completed=sum(counts))
        for (name, total), count in zip(self._totals, counts, strict=True):
            self._bars.update(self._arms[name], completed=count, visible=0 < count < total)


def print_line(console: Console, text: str) -> None:
    """Print one line without wrapping, colours or markup; write errors are ignored."""
    with suppress(OSError):
        console.print(text, markup=False, highlight=False, soft_wrap=True)
