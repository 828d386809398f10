"""Parts of the pages: Markdown tables, and blocks between marks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a head and rows as a Markdown table."""
    return "".join(f"| {' | '.join(map(str, cells))} |\n" for cells in (head, ("---",) * len(head), *rows))


def fill_mark(text: str, mark: str, content: str) -> str:
    """Return `text` with the block between the two marks replaced by `content`."""
    pattern = re.compile(rf"(<!-- {re.escape(mark)} -->\n).*?(<!-- /{re.escape(mark)} -->)", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"mark={mark}: expected <!-- {mark} --> and <!-- /{mark} --> on the page")
    return pattern.sub(lambda match: match[1] + content + match[2], text)


def fill_page(page: Path, mark: str, content: str) -> None:
    """Replace the block of a mark on a page by `content`."""
    page.write_text(fill_mark(page.read_text(), mark, content))
