"""Progress bars of a study on the terminal: all requests with the remaining time, and each running arm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


@contextmanager
def arm_progress(totals: dict[str, int], console: Console) -> Iterator[Callable[[list[int]], None]]:
    """Show a bar for the whole study and one for each running arm; disabled where the console is no terminal.

    Yields a function that updates every bar from the finished requests by arm, in the order of `totals`.

    `totals`  number of requests by arm
    """
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    disabled = not console.is_terminal
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=disabled) as bars:
        all_arms = bars.add_task("all arms", total=sum(totals.values()))
        arms = [bars.add_task(name, total=total, visible=False) for name, total in totals.items()]

        def show(counts: list[int]) -> None:
            bars.update(all_arms, completed=sum(counts))
            for arm, total, count in zip(arms, totals.values(), counts, strict=True):
                bars.update(arm, completed=count, visible=0 < count < total)

        yield show


def print_line(console: Console, text: str) -> None:
    """Print one line without wrapping, colours or markup; write errors are ignored."""
    with suppress(OSError):
        console.print(text, markup=False, highlight=False, soft_wrap=True)
