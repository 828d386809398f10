"""Token ids of a prompt as slices of the arrays, or of the runs, that a workload's requests
share."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]


class IdRun:
    """Token ids at equal distances, int32: `first`, `first + step` and so on, made as an array
    where they are read.

    Contents that a log knows by their hashes have consecutive ids, and an unknown answer repeats
    one id.
    """

    __slots__ = ("first", "length", "step")

    def __init__(self, first: int, length: int, step: int = 1) -> None:
        self.first, self.length, self.step = first, length, step

    def __len__(self) -> int:
        return self.length

    def __reduce__(self) -> tuple[type[IdRun], tuple[int, int, int]]:
        return IdRun, (self.first, self.length, self.step)

    def __array__(self, dtype: Any = None, copy: Any = None) -> NDArray[Any]:
        return self.array(0, self.length).astype(np.int32 if dtype is None else dtype, copy=False)

    def array(self, start: int, stop: int) -> Tokens:
        """Return the ids `[start, stop)`."""
        if self.step == 0:
            return np.full(stop - start, self.first, np.int32)
        assert self.step == 1, "ids are equal, or consecutive"
        return np.arange(self.first + start, self.first + stop, dtype=np.int32)

    def cut(self, start: int, stop: int) -> IdRun:
        """Return the run of the ids `[start, stop)`."""
        whole = start == 0 and stop == self.length
        return self if whole else IdRun(self.first + start * self.step, stop - start, self.step)


TokenIds: TypeAlias = Tokens | IdRun
TokenKey: TypeAlias = bytes | int


def array_of(ids: TokenIds) -> Tokens:
    """Return the ids as an array, int32."""
    return ids.array(0, ids.length) if isinstance(ids, IdRun) else ids


def cut_ids(ids: TokenIds, start: int, stop: int) -> TokenIds:
    """Return the ids `[start, stop)`, without a copy."""
    return ids.cut(start, stop) if isinstance(ids, IdRun) else ids[start:stop]


def _array(ids: TokenIds, start: int, stop: int) -> Tokens:
    return ids.array(start, stop) if isinstance(ids, IdRun) else ids[start:stop]


def _key_of(ids: Tokens) -> TokenKey:
    """Return the key of at least two ids: a number where they could be an `IdRun`, else bytes, four
    each.

    Bytes of long runs would take longer to make and to look up than all else that a match does.
    """
    first, distance = ids.item(0), ids.item(-1) - ids.item(0)
    if distance in (0, len(ids) - 1):
        step = int(distance > 0)
        if (ids == IdRun(first, len(ids), step).array(0, len(ids))).all():
            return 2 * first + step
    return ids.tobytes()


class BlockWeights:
    """Odd random numbers, one for each position in a block, and two sums over them, modulo 2^64.

    `total`  their sum, by which a block of equal ids is weighted
    `ramp`   the sum of position · number, by which the distance of its ids is weighted
    """

    def __init__(self, size: int) -> None:
        self.each: NDArray[np.uint64] = np.random.default_rng(size).integers(
            2**64, size=size, dtype=np.uint64
        )
        self.each |= np.uint64(1)
        self.total: np.uint64 = self.each.sum()
        self.ramp: np.uint64 = (np.arange(size, dtype=np.uint64) * self.each).sum()


class TokenString:
    """Token ids in order: cut and joined without copies, compared by identity before content.

    `arrays`  the array or the run of each slice
    `ends`    end of each slice in the string, increasing
    `shifts`  for each slice, the offset from a position in the string to the index in the array
    """

    __slots__ = ("arrays", "ends", "shifts")

    def __init__(
        self, arrays: tuple[TokenIds, ...], ends: tuple[int, ...], shifts: tuple[int, ...]
    ) -> None:
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

    def key(self, start: int, length: int) -> TokenKey:
        """Return up to `length` tokens from `start` on as a key, equal where their number and ids
        are; for a length of 1, the id."""
        number = bisect_right(self.ends, start)
        if number < len(self.ends) and start + length <= self.ends[number]:
            index, array = self.shifts[number] + start, self.arrays[number]
            if isinstance(array, IdRun):
                first = array.first + index * array.step
                return first if length == 1 else 2 * first + array.step
            if length == 1:
                item: int = array.item(index)
                return item
            return _key_of(array[index : index + length])
        rest = self.cut(start, min(start + length, len(self)))
        return rest.tobytes() if len(rest) < length else _key_of(rest.array())

    def tobytes(self) -> bytes:
        """All ids as bytes; four each, in the machine's order."""
        return b"".join([piece.data for piece in self._pieces()])

    def array(self) -> Tokens:
        """All ids as an array, int32."""
        pieces = self._pieces()
        return np.concatenate(pieces) if pieces else np.zeros(0, np.int32)

    def _pieces(self) -> list[Tokens]:
        start, pieces = 0, []
        for array, end, shift in zip(self.arrays, self.ends, self.shifts, strict=True):
            pieces.append(_array(array, start + shift, end + shift))
            start = end
        return pieces

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
                if isinstance(array, IdRun) and isinstance(other_array, IdRun):
                    first = array.first + (shift + compared) * array.step
                    if first != other_array.first + (other_shift + compared) * other_array.step:
                        return compared
                    if array.step != other_array.step and stop > compared + 1:
                        return compared + 1
                else:
                    piece = _array(array, shift + compared, shift + stop)
                    other_piece = _array(other_array, other_shift + compared, other_shift + stop)
                    equal = common_prefix(piece, other_piece)
                    if equal < len(piece):
                        return compared + equal
            number += end == stop
            other_number += other_end == stop
            compared = stop
        return most

    def weighted_sums(self, start: int, count: int, weights: BlockWeights) -> NDArray[np.uint64]:
        """Return the sum of the weighted ids, modulo 2^64, of each of `count` blocks from `start`
        on."""
        size = len(weights.each)
        blocks = self.cut(start, start + count * size)
        runs = [ids for ids in blocks.arrays if isinstance(ids, IdRun)]
        if len(runs) < len(blocks.arrays):
            return (
                blocks.array().reshape(count, size).astype(np.int64).view(np.uint64) @ weights.each
            )
        # a run's ids are those of a line, and a block inside it takes one product
        if len(runs) == 1 and runs[0].step == 1:
            begin = runs[0].first + blocks.shifts[0]
            each = np.arange(begin, begin + count * size, size).view(np.uint64)
            each *= weights.total
            each += weights.ramp
            return each
        at_zero = [
            run.first + shift * run.step for run, shift in zip(runs, blocks.shifts, strict=True)
        ]
        begins = np.arange(0, count * size, size)
        ends = np.array(blocks.ends)
        number = ends.searchsorted(begins, side="right")
        steps = np.array([run.step for run in runs])[number]
        first = (np.array(at_zero)[number] + begins * steps).view(np.uint64)
        sums: NDArray[np.uint64] = first * weights.total + steps.view(np.uint64) * weights.ramp
        for block in np.flatnonzero(ends[number] < begins + size).tolist():
            ids = blocks.cut(block * size, (block + 1) * size).array()
            sums[block] = ids.astype(np.int64).view(np.uint64) @ weights.each
        return sums


EMPTY = TokenString((), (), ())


def string_of(arrays: Iterable[TokenIds]) -> TokenString:
    """Join arrays, int32 and contiguous, and runs; a run that continues the one before it extends
    it."""
    nonempty: list[TokenIds] = []
    ends: list[int] = []
    shifts: list[int] = []
    position = 0
    for array in arrays:
        length = len(array)
        if not length:
            continue
        position += length
        if nonempty and continues(nonempty[-1], array):
            last = nonempty[-1]
            assert isinstance(last, IdRun), "only runs continue"
            nonempty[-1], ends[-1] = IdRun(last.first, last.length + length), position
            continue
        nonempty.append(array)
        shifts.append(length - position)
        ends.append(position)
    return TokenString(tuple(nonempty), tuple(ends), tuple(shifts))


def continues(ids: TokenIds, behind: TokenIds) -> bool:
    """Whether both are runs of consecutive ids, and the second begins where the first ends."""
    if (
        not isinstance(ids, IdRun)
        or not isinstance(behind, IdRun)
        or not ids.step == behind.step == 1
    ):
        return False
    return ids.first + ids.length == behind.first


_AT_ONCE = 4  # tokens that are compared one by one


def common_prefix(a: Tokens, b: Tokens) -> int:
    """Return the length of the longest common prefix of two arrays of equal length, at least 1."""
    # contents that differ mostly do so at once, and two numbers are compared faster than two arrays
    for index in range(min(_AT_ONCE, len(a))):
        if a.item(index) != b.item(index):
            return index
    differ = a != b
    first = int(differ.argmax())
    return first if differ[first] else len(a)


_CHUNK = 1 << 18  # lengths that are converted at once: all of a long log as 64 bits take gigabytes


def sums_before(lengths: NDArray[np.integer], indexes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the sum of the lengths before each index, as int64; indexes go up to the number of
    lengths."""
    bounds, places = np.unique(indexes, return_inverse=True)
    sums, total = np.zeros(len(bounds), dtype=np.int64), 0
    for start in range(0, len(lengths) + 1, _CHUNK):
        first, last = bounds.searchsorted([start, start + _CHUNK])
        inside = bounds[first:last] - start
        begins = np.append(0, inside[inside > 0])  # of the parts between the bounds
        chunk = np.append(lengths[start : start + _CHUNK].astype(np.int64), 0)
        parts = total + np.cumsum(np.append(0, np.add.reduceat(chunk, begins)))
        sums[first:last] = parts[begins.searchsorted(inside)]
        total = int(parts[-1])  # a NumPy integer is not an int where this file is compiled
    return sums[places]
