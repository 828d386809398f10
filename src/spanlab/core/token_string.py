"""Token ids of a prompt as slices of the arrays that a workload's requests share."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]


class TokenString:
    """Token ids in order: cut and joined without copies, compared by identity before content.

    `arrays`  the array of each slice
    `ends`    end of each slice in the string, increasing
    `shifts`  for each slice, the offset from a position in the string to the index in the array
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
        """Return the ids of up to `length` tokens from `start` on, as bytes; four each."""
        number = bisect_right(self.ends, start)
        if number < len(self.ends) and start + length <= self.ends[number]:
            index = self.shifts[number] + start
            ids: np.generic | Tokens = self.arrays[number][index if length == 1 else slice(index, index + length)]
            return ids.tobytes()  # one token is a number, which takes half the time of an array
        return self.cut(start, min(start + length, len(self))).tobytes()

    def tobytes(self) -> bytes:
        """All ids as bytes; four each, in the machine's order."""
        start, pieces = 0, []
        for array, end, shift in zip(self.arrays, self.ends, self.shifts, strict=True):
            pieces.append(array[start + shift : end + shift].data)
            start = end
        return b"".join(pieces)

    def common(self, start: int, other: TokenString) -> int:
        """Return the length of the longest common prefix of `self[start:]` and another string."""
        most = min(len(self) - start, len(other))
        number, other_number, compared = bisect_right(self.ends, start), 0, 0
        while compared < most:
            end, other_end = self.ends[number] - start, other.ends[other_number]
            stop = end if end < other_end else other_end
            array, other_array = self.arrays[number], other.arrays[other_number]
            shift, other_shift = self.shifts[number] + start, other.shifts[other_number]
            if array is not other_array or shift != other_shift:
                piece = array[shift + compared : shift + stop]
                equal = common_prefix(piece, other_array[other_shift + compared : other_shift + stop])
                if equal < len(piece):
                    return compared + equal
            number += end == stop
            other_number += other_end == stop
            compared = stop
        return most


EMPTY = TokenString((), (), ())


def string_of(arrays: Iterable[Tokens]) -> TokenString:
    """Join arrays, int32 and contiguous."""
    nonempty, ends, shifts, position = [], [], [], 0
    for array in arrays:
        length = len(array)
        if length:
            nonempty.append(array)
            shifts.append(-position)
            position += length
            ends.append(position)
    return TokenString(tuple(nonempty), tuple(ends), tuple(shifts))


def common_prefix(a: Tokens, b: Tokens) -> int:
    """Return the length of the longest common prefix of two arrays of equal length, at least 1."""
    differ = a != b
    first = int(differ.argmax())
    return first if differ[first] else len(a)
