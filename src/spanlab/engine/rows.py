"""The rows of one chunk: which tokens, turned by what, written where, and what they see."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from spanlab.core.scheduler import ScheduledChunk
from spanlab.core.sections import Section
from spanlab.core.spans import SpanSettings
from spanlab.core.work import PrefillRange
from spanlab.engine.reading import carried_turn
from spanlab.engine.seat import Seat
from spanlab_kernels.attention import Span


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Packed rows of one request that see the same spans; arrays are int64 [T].

    `places`    in prompt and output, increasing
    `turns`     what the model is to turn query and key by
    `shifts`    what the query is still to be turned by, to stand at its position
    `slots`     where key and value are written
    `spans`     what they read: (span, whether it is an independent one that ordered text reads) each
    `free`      False for rows that a measured repair must keep
    `together`  the common shift of all rows, where keys that lack the same need not be turned; None for raw keys
    """

    places: np.ndarray
    turns: np.ndarray
    shifts: np.ndarray
    slots: np.ndarray
    spans: list[tuple[Span, bool]]
    free: np.ndarray
    together: int | None

    @property
    def extent(self) -> tuple[int, int]:
        """`[start, stop)` in prompt and output, where rows have no gaps."""
        return int(self.places[0]), int(self.places[-1]) + 1

    def chosen(self, kept: np.ndarray) -> Rows:
        """Some of the rows, by index; they read the same."""
        return replace(
            self, places=self.places[kept], turns=self.turns[kept], shifts=self.shifts[kept], slots=self.slots[kept]
        )


def chunk_rows(seat: Seat, chunk: ScheduledChunk, reading: SpanSettings, repaired: np.ndarray | None) -> Rows:
    """Rows of a chunk; of a repair, those of the `repaired` prompt positions and of the text between the spans."""
    if isinstance(chunk.work, PrefillRange):
        return section_rows(seat, chunk.work.section, chunk.start, chunk.stop, reading)
    assert repaired is not None, "a repair has no rows"
    return _repair_rows(seat, chunk, repaired[(repaired >= chunk.start) & (repaired < chunk.stop)], reading)


def section_rows(seat: Seat, index: int, start: int, stop: int, reading: SpanSettings) -> Rows:
    """Prompt and output tokens `[start, stop)` of one section, in the section's own context."""
    place = seat.places[index]
    rows = np.arange(start, stop) - place.section.start
    seat.hold(index, stop - place.section.start)
    positions = place.base + rows
    turns = _turns(seat, index, rows, reading)
    spans = [span for other in visible(seat, place.section) for span in _whole(seat, other, reading)]
    spans += _spans(seat, index, stop - place.section.start, reading)
    if place.section.independent:
        spans = [(span, False) for span, _ in spans]
    slots = seat.slots(index, rows)
    shifts = positions - turns
    together = int(shifts[0]) if reading.keys != "raw" and len(rows) and (shifts == shifts[0]).all() else None
    return Rows(np.arange(start, stop), turns, shifts, slots, spans, np.zeros(len(rows), bool), together)


def visible(seat: Seat, section: Section) -> list[int]:
    """The sections before a section that its rows see."""
    return [index for index, other in enumerate(seat.places) if other.section.stop <= section.context]


def _repair_rows(seat: Seat, chunk: ScheduledChunk, repaired: np.ndarray, reading: SpanSettings) -> Rows:
    """All rows of a repair by place: tokens of spans go to the request's own copies, text between them to its pages."""
    parts, spans = [], []
    for index, place in enumerate(seat.places):
        start, stop = place.section.start, min(place.section.stop, chunk.stop)
        if stop <= start:
            break
        if index in chunk.work.sections:
            seat.hold(index, stop - start)
            resume = max(seat.allocation.plan.sections[index].resume, chunk.start - start)
            parts.append(_part(seat, index, np.arange(resume, stop - start), False, reading))
        rows = repaired[(repaired >= start) & (repaired < stop)] - start
        parts.append(_part(seat, index, rows, True, reading))
        spans += _spans(seat, index, stop - start, reading)
    places, turns, shifts, slots, free = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.argsort(places, kind="stable")
    return Rows(places[order], turns[order], shifts[order], slots[order], spans, free[order], None)


def _part(seat: Seat, index: int, rows: np.ndarray, own: bool, reading: SpanSettings) -> tuple[np.ndarray, ...]:
    place = seat.places[index]
    positions = place.base + rows
    turns = positions if own and reading.turns_copies else _turns(seat, index, rows, reading)
    slots = seat.slots(index, rows, in_copy=own) if len(rows) else rows
    return place.section.start + rows, turns, positions - turns, slots, np.full(len(rows), own)


def _turns(seat: Seat, index: int, rows: np.ndarray, reading: SpanSettings) -> np.ndarray:
    place = seat.places[index]
    return carried_turn(reading, place.section, place.base, rows)


def _whole(seat: Seat, index: int, reading: SpanSettings) -> list[tuple[Span, bool]]:
    section = seat.places[index].section
    return _spans(seat, index, section.stop - section.start, reading)


def _spans(seat: Seat, index: int, stop: int, reading: SpanSettings) -> list[tuple[Span, bool]]:
    section, page = seat.places[index].section, seat.page
    found = []
    for start, end, pages, shift in seat.extents(index, stop):
        held = pages[start // page : -(-end // page)]
        position = shift + start if reading.keys == "raw" else shift  # raw keys are turned one by one, others together
        span = Span(section.start + start, end - start, position, held, start % page)
        found.append((span, section.independent))
    return found
