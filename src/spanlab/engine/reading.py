"""How stored keys are read: what turn they carry, and where they count as standing."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from spanlab.core.sections import Section
from spanlab.core.spans import SpanSettings

Rows = NDArray[np.int64]


def carried_turn(reading: SpanSettings, section: Section, base: int, rows: Rows) -> Rows:
    """What keys carry when they are computed and stored: those at `rows` of a section at position `base`.

    Ordered text is turned to its position at once: nobody reads it at another one.
    """
    if reading.keys == "raw":
        return np.zeros_like(rows)
    return rows if reading.keys == "local" and section.independent else base + rows


def bases(sections: tuple[Section, ...], overlapping: bool) -> list[int]:
    """The position of each section's first token."""
    if not overlapping:
        return [section.start for section in sections]
    head = next((section.start for section in sections if section.independent), 0)
    spans = [section.stop - section.start for section in sections if section.independent]
    position, found = head + max(spans, default=0), []
    for section in sections:
        if section.independent:
            found.append(head)
        elif section.start < head or not spans:
            found.append(section.start)
        else:
            found.append(position)
            position += section.stop - section.start
    return found
