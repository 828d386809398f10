"""What is asked: one sequence, and later prompts that begin as it does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from spanlab.core.placement import PrefillInfo
from spanlab.core.request import Request, Span, Tokens


@dataclass(frozen=True)
class Prompts:
    """Random token ids below `vocabulary`, all prompts of `length` tokens; the same ones for every arm and round.

    `shared`  tokens that later prompts have in common with the sequence, few to many; a workload that knows them marks
              them as boundaries
    """

    seed: int
    vocabulary: int
    length: int
    shared: tuple[int, ...]

    @cached_property
    def _sequence(self) -> Tokens:
        return self._drawn((0,), self.length)

    @property
    def cold(self) -> Request:
        """The sequence itself."""
        return Request(0, 0, self._marked(self._sequence))

    def again(self, shared: int, visit: int) -> Request:
        """A prompt that leaves the sequence, and every other visit's prompt, after exactly `shared` tokens."""
        rest = self._drawn((shared, visit + 1), self.length - shared)
        rest[0] = (self._sequence[shared] + 1 + visit) % self.vocabulary
        number = 1 + self.shared.index(shared) + visit * len(self.shared)
        return Request(number, 0, (*self._marked(self._sequence[:shared]), Span(rest)))

    def visits(self, times: int) -> list[PrefillInfo]:
        """So many visits at every depth, in turns, as a placement sees them."""
        turn = [PrefillInfo(self.length, shared, shared, 0, self.shared) for shared in self.shared]
        return turn * times

    def _marked(self, tokens: Tokens) -> tuple[Span, ...]:
        cuts: Sequence[int] = [cut for cut in self.shared if cut < len(tokens)]
        ends = {*cuts, len(tokens)} & set(self.shared)
        starts, stops = [0, *cuts], [*cuts, len(tokens)]
        return tuple(Span(tokens[start:stop], reusable=stop in ends) for start, stop in zip(starts, stops, strict=True))

    def _drawn(self, key: tuple[int, ...], count: int) -> Tokens:
        rng = np.random.default_rng([self.seed, self.length, *key])
        return rng.integers(self.vocabulary, size=count, dtype=np.int32)
