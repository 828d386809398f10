"""Cues: short runs of tokens before the points where prompts diverge, such as a template between document and question.

A new document is followed by the same template as earlier ones. Runs of `LENGTH` tokens that end at most `REACH`
tokens before a point of divergence are counted, once for each point. A run that preceded two different points is a cue.
Cues also work where prompts happen to share the first tokens after the template, because of `REACH`.
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
    """The cues of one traffic, and their positions in a prompt."""

    def __init__(self) -> None:
        self._points: OrderedDict[Run, set[int]] = OrderedDict()  # points of divergence by run, oldest first
        self._cues: dict[Run, int] = {}

    def add(self, tokens: Tokens, position: int, name: int) -> None:
        """Count the runs before a position where a prompt diverges from earlier ones; `name` identifies the point."""
        tail = tokens[max(0, position - REACH - LENGTH) : position].tolist()
        for start in range(len(tail) - LENGTH + 1):
            run = tuple(tail[start : start + LENGTH])
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
        """Yield positions after `start` at which a cue ends, each with its cue; cues with most points first."""
        suffix = tokens[start:]
        for run in sorted(self._cues, key=self._cues.__getitem__, reverse=True):
            heads = np.flatnonzero(suffix[: len(suffix) - LENGTH + 1] == run[0])
            for index in heads[np.all([suffix[heads + k] == run[k] for k in range(1, LENGTH)], axis=0)].tolist():
                yield start + index + LENGTH, run
