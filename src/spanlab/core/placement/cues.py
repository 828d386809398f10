"""Cues: short runs of tokens before the points at which prompts part, as the template between document and question.

A document that was never seen before is followed by the same words as those before it. Runs of `LENGTH` tokens that
end at most `REACH` tokens before a parting point are counted, once for each point; a run that has stood before two
different points is a cue. Nothing is lost where prompts happen to share the first words behind the template.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import numpy as np

from spanlab.core.request import Tokens

Run = tuple[int, ...]
LENGTH, REACH = 3, 6
_CUES, _REMEMBERED = 16, 4096


class Cues:
    """The cues of one traffic, and where they stand in a prompt."""

    def __init__(self) -> None:
        self._points: OrderedDict[Run, set[int]] = OrderedDict()  # parting points by run, oldest first
        self._cues: dict[Run, int] = {}

    def parted(self, tokens: Tokens, at: int, name: int) -> None:
        """A prompt has left what came before it at a position; `name` tells one parting point from another."""
        end = tokens[max(0, at - REACH - LENGTH) : at].tolist()
        for start in range(len(end) - LENGTH + 1):
            run = tuple(end[start : start + LENGTH])
            points = self._points.setdefault(run, set())
            if len(points) < _REMEMBERED:
                points.add(name)
            self._points.move_to_end(run)
            if len(points) > 1:
                self._admit(run, len(points))
        while len(self._points) > _REMEMBERED:
            self._points.popitem(last=False)

    def _admit(self, run: Run, points: int) -> None:
        self._cues[run] = points
        if len(self._cues) > _CUES:
            del self._cues[min(self._cues, key=self._cues.__getitem__)]

    def find(self, tokens: Tokens, start: int) -> Iterator[tuple[int, Run]]:
        """Positions behind `start` that a cue ends at, each with its cue; those of the cue of most points first."""
        rest = tokens[start:]
        for run in sorted(self._cues, key=self._cues.__getitem__, reverse=True):
            found = np.flatnonzero(rest[: len(rest) - LENGTH + 1] == run[0])
            for at in found[np.all([rest[found + k] == run[k] for k in range(1, LENGTH)], axis=0)].tolist():
                yield start + at + LENGTH, run
