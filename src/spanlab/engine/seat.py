"""One admitted request on the device: the pages of its sections, the copies read in their place, its state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from spanlab.core.reuse import TreeAllocation
from spanlab.core.scheduler import Sequence
from spanlab.core.sections import Section
from spanlab.engine.node_pages import NodePages
from spanlab.engine.pool import PagePool
from spanlab.engine.reading import Reading, bases
from spanlab.engine.running_state import RunningState


class Extent(NamedTuple):
    """A section's tokens `[start, stop)` as a reader finds them, in the section's `pages`, `shift` as `Seat.shift`."""

    start: int
    stop: int
    pages: list[int]
    shift: int


@dataclass(slots=True)
class Place:
    """Where one section's tokens lie; page i holds its tokens [i · page, (i + 1) · page).

    `kept`    leading pages that belong to the tree; the others are the request's
    `copy`    pages read in place of `pages` for tokens [0, copied), some or all of them the request's own
    """

    section: Section
    base: int  # position of the first token
    pages: list[int]
    kept: int
    copy: list[int]
    copied: int = 0


class Seat:
    """The pages of a sequence, and its recurrent state if any, from its admission until it ends or is preempted."""

    def __init__(
        self,
        sequence: Sequence,
        allocation: TreeAllocation,
        pool: PagePool,
        nodes: NodePages,
        reading: Reading,
        state: RunningState | None = None,
    ) -> None:
        self.allocation, self._pool, self._nodes, self._reading = allocation, pool, nodes, reading
        self.state = state
        self.page = pool.shape.page_size
        self.tokens = np.asarray(sequence.request.tokens, np.int64)
        sections = tuple(plan.section for plan in allocation.plan.sections)
        at = bases(sections, reading.positions == "overlapping")
        self.places = [Place(section, base, [], 0, []) for section, base in zip(sections, at, strict=True)]
        for place, node, plan in zip(self.places, allocation.nodes, allocation.plan.sections, strict=True):
            place.pages, place.kept = nodes.path(node, plan.stored), plan.stored // self.page
            if plan.twin is not None:
                place.pages = self.places[plan.twin].pages  # one list, which grows and changes for both
        self._private: list[int] = []

    def hold(self, index: int, stop: int) -> None:
        """Make sure that a section has pages for its tokens [0, stop)."""
        place = self.places[index]
        missing = -(-stop // self.page) - len(place.pages)
        if missing > 0:
            place.pages += self._pool.take(missing)

    def slots(self, index: int, rows: np.ndarray, in_copy: bool = False) -> np.ndarray:
        """Slots of tokens `rows`, counted from the section's start, where they are to be written."""
        place = self.places[index]
        pages = np.asarray(place.copy if in_copy else place.pages, np.int64)
        return pages[rows // self.page] * self.page + rows % self.page

    def extents(self, index: int, stop: int) -> list[Extent]:
        """The section's tokens [0, stop) as other sections, and its own later tokens, read them."""
        place = self.places[index]
        cut = min(place.copied, stop)
        turned = self._reading.turns_copies and place.copied > 0
        found = [Extent(0, cut, place.copy, 0 if turned else self.shift(index))] if cut else []
        return [*found, Extent(cut, stop, place.pages, self.shift(index))] if stop > cut else found

    def shift(self, index: int) -> int:
        """By how many positions the stored keys of a section stand short of where they count as standing."""
        place, reading = self.places[index], self._reading
        turned = reading.keys == "absolute" or (reading.keys == "local" and not place.section.independent)
        return 0 if turned else place.base

    # -- copies -------------------------------------------------------------------------------------------------------

    def uncopied(self) -> list[int]:
        """Spans that must be copied before they are read, where the method reads copies, and have not been."""
        if not self._reading.copies:
            return []
        return [i for i, place in enumerate(self.places) if place.copied < self.allocation.plan.sections[i].to_copy]

    def copy_span(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Give a span pages of its own; returns the slots to copy from and to, int64 [tokens]."""
        place, count = self.places[index], self.allocation.plan.sections[index].to_copy
        place.copy = self._take(-(-count // self.page))
        place.copied = count
        rows = np.arange(count)
        return self.slots(index, rows), self.slots(index, rows, in_copy=True)

    def copy_pages_of(self, index: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Copy-on-write: own pages for those that hold `rows`; returns the slots of their tokens, from and to."""
        place, length = self.places[index], self.allocation.plan.sections[index].to_copy
        place.copy, place.copied = place.pages[: -(-length // self.page)], length
        touched = np.unique(rows // self.page)
        for page, own in zip(touched.tolist(), self._take(len(touched)), strict=True):
            place.copy[page] = own
        inside = (touched[:, None] * self.page + np.arange(self.page)).ravel()
        inside = inside[inside < length]
        return self.slots(index, inside), self.slots(index, inside, in_copy=True)

    def _take(self, count: int) -> list[int]:
        taken = self._pool.take(count)
        self._private += taken
        return taken

    # -- what the tree takes over, and what is given back -------------------------------------------------------------

    def claim(self, index: int) -> None:
        """Enter pages for what the policy has stored before it is computed, so that the same step may read it."""
        place = self.places[index]
        for node in self.allocation.nodes[index].path():
            if node in self._nodes:
                break
            self.hold(index, node.depth)
            self._nodes[node] = place.pages[node.start // self.page : node.depth // self.page]

    def adopt(self, index: int) -> None:
        """Hand pages to the nodes that have been stored since, or take over those that somebody else stored first."""
        place, kept = self.places[index], self.places[index].kept
        for node in self.allocation.nodes[index].path():
            first, last = node.start // self.page, node.depth // self.page
            if last <= kept:
                break
            if node not in self._nodes:
                self._nodes[node] = place.pages[first:last]
            elif place.pages[first:last] != self._nodes[node]:
                self._replace(place, first, self._nodes[node])
            place.kept = max(place.kept, last)
        if self.state is not None:
            self.state.adopt()

    def _replace(self, place: Place, first: int, pages: list[int]) -> None:
        """Read what somebody else stored, also where a partial copy goes on with it, and give our own back."""
        own = place.pages[first : first + len(pages)]
        place.pages[first : first + len(pages)] = pages
        renamed = dict(zip(own, pages, strict=True))
        for reader in self.places:
            if reader.pages is place.pages:
                reader.copy = [renamed.get(page, page) for page in reader.copy]
        self._pool.give(own)

    def leave(self) -> None:
        """Give back everything that is the request's own."""
        parts = zip(self.places, self.allocation.plan.sections, strict=True)
        own = [page for place, part in parts if part.twin is None for page in place.pages[place.kept :]]
        self._pool.give([*own, *self._private])
        if self.state is not None:
            self.state.leave()
