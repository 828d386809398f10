"""Progress of a study on the terminal: all requests with an estimate, and the arms at work."""

from __future__ import annotations

from contextlib import suppress
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class ArmProgress:
    """A bar for the whole study and one for each arm that is running; silent where nobody looks.

    `totals`  requests to finish, by arm, in the order in which counts come
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


def say(console: Console, words: str) -> None:
    """One line as it is: not wrapped, not coloured, and brackets are no markup; nothing where it cannot be written."""
    with suppress(OSError):
        console.print(words, markup=False, highlight=False, soft_wrap=True)
