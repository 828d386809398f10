"""Token ids of a prompt as slices of the arrays that a workload's requests share."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]


class TokenString:
    """Token ids in order: cut and joined without copying them, compared by identity before they are looked at.

    `arrays`  where slices lie
    `ends`    where each slice ends in the string, increasing
    `shifts`  added to a position in the string, its index in the slice's array
    """

    __slots__ = ("arrays", "ends", "shifts")

    def __init__(self, arrays: tuple[Tokens, ...], ends: tuple[int, ...], shifts: tuple[int, ...]) -> None:
        self.arrays, self.ends, self.shifts = arrays, ends, shifts

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TokenString) and len(self) == len(other) == self.common(0, other)

    def __hash__(self) -> int:
        return hash(self.tobytes())

    def __add__(self, other: TokenString) -> TokenString:
        before = len(self)
        ends = tuple([before + end for end in other.ends])
        shifts = tuple([shift - before for shift in other.shifts])
        return TokenString(self.arrays + other.arrays, self.ends + ends, self.shifts + shifts)

    def cut(self, start: int, stop: int) -> TokenString:
        """The tokens `[start, stop)`."""
        if start >= stop:
            return EMPTY
        first, last = bisect_right(self.ends, start), bisect_left(self.ends, stop)
        ends = [end - start for end in self.ends[first:last]]
        shifts = [shift + start for shift in self.shifts[first : last + 1]]
        return TokenString(self.arrays[first : last + 1], (*ends, stop - start), tuple(shifts))

    def key(self, start: int, length: int) -> bytes:
        """The ids of `length` tokens from `start` on, or of as many as there are, as bytes; four each."""
        at = bisect_right(self.ends, start)
        if at < len(self.ends) and start + length <= self.ends[at]:
            index = self.shifts[at] + start
            part: np.generic | Tokens = self.arrays[at][index if length == 1 else slice(index, index + length)]
            return part.tobytes()  # one token is a number, which takes half the time of an array
        return self.cut(start, min(start + length, len(self))).tobytes()

    def tobytes(self) -> bytes:
        """All ids as bytes; four each, in the machine's order."""
        start, parts = 0, []
        for array, end, shift in zip(self.arrays, self.ends, self.shifts, strict=True):
            parts.append(array[start + shift : end + shift].data)
            start = end
        return b"".join(parts)

    def common(self, start: int, other: TokenString) -> int:
        """Length of the longest common prefix of what begins at `start` and of another string."""
        most = min(len(self) - start, len(other))
        mine, theirs, done = bisect_right(self.ends, start), 0, 0
        while done < most:
            end, other_end = self.ends[mine] - start, other.ends[theirs]
            stop = end if end < other_end else other_end
            here, there = self.arrays[mine], other.arrays[theirs]
            shift, other_shift = self.shifts[mine] + start, other.shifts[theirs]
            if here is not there or shift != other_shift:
                ours = here[shift + done : shift + stop]
                equal = common_prefix(ours, there[other_shift + done : other_shift + stop])
                if equal < len(ours):
                    return done + equal
            mine += end == stop
            theirs += other_end == stop
            done = stop
        return most


EMPTY = TokenString((), (), ())


def string_of(arrays: Iterable[Tokens]) -> TokenString:
    """The arrays, int32 and contiguous, one behind the other."""
    kept, ends, shifts, position = [], [], [], 0
    for array in arrays:
        length = len(array)
        if length:
            kept.append(array)
            shifts.append(-position)
            position += length
            ends.append(position)
    return TokenString(tuple(kept), tuple(ends), tuple(shifts))


def common_prefix(a: Tokens, b: Tokens) -> int:
    """Length of the longest common prefix of two arrays of one length, at least 1."""
    differ = a != b
    first = int(differ.argmax())
    return first if differ[first] else len(a)
