"""How a forward in which every row decodes is launched: as it is, or padded to a few sizes and replayed.

A replay needs the same launches and the same addresses: so rows and spans are padded to powers of two, all numbers of a
step lie in one buffer, and what still differs from step to step is part of a key. One graph is captured for each key.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spanlab.engine.decode_rows import TailRows
from spanlab.engine.page_table import PageList, PageTable
from spanlab.engine.pool import PagePool
from spanlab.engine.settings import GRAPHS, PADDED, PLAIN
from spanlab.engine.shipment import LEAST, Shipment
from spanlab_kernels.attention import GroupArrays, Spans, joined

_SPARE_PAGES = 1

Work = Callable[[], Tensor]
"""work() -> logits of all rows, from what was shipped; may be called again on other numbers in the same places."""


class Prepare(Protocol):
    """Adds what a forward of some rows reads to a shipment.

    With `replayed` nothing may depend on the numbers but their places and the key that comes with the work.
    """

    def __call__(self, tails: TailRows | None, shipment: Shipment, *, replayed: bool) -> tuple[Hashable, Work]: ...


class Decoder(Protocol):
    """Runs forwards in which every row decodes."""

    def run(self, tails: TailRows, prepare: Prepare) -> Tensor:
        """Logits of the rows."""
        ...


class Plain:
    """Launches every forward as it is."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def run(self, tails: TailRows | None, prepare: Prepare) -> Tensor:
        """Logits of the rows."""
        shipment = Shipment(self._device)
        _, work = prepare(tails, shipment, replayed=False)
        shipment.send()
        return work()


class Replay(Protocol):
    """Does work that only differs in numbers from other work of the same key."""

    def __call__(self, key: Hashable, work: Work) -> Tensor: ...


def rerun(key: Hashable, work: Work) -> Tensor:
    """Do the work itself: what a CPU can do, and what a replay is compared with."""
    return work()


class CudaGraphs:
    """Captures the work of each key once, and replays it; all graphs share their memory, since one runs at a time.

    Work moves states on, so each call does it once, first as it is and later by the graph; a capture does nothing.
    """

    def __init__(self) -> None:
        self._captured: dict[Hashable, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._memory = torch.cuda.graph_pool_handle()

    def __call__(self, key: Hashable, work: Work) -> Tensor:
        if key not in self._captured:
            done = self._begin(work)
            self._captured[key] = self._capture(work)
            return done
        graph, out = self._captured[key]
        graph.replay()
        return out

    def _begin(self, work: Work) -> Tensor:
        """Do it beside the stream, where kernels are compiled and libraries begun, as no capture may."""
        current, beside = torch.cuda.current_stream(), torch.cuda.Stream()
        beside.wait_stream(current)
        with torch.cuda.stream(beside):
            done = work()
        current.wait_stream(beside)
        return done

    def _capture(self, work: Work) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        from spanlab_kernels.attention.work import forget_lists  # needs Triton, as a CPU does not

        forget_lists()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            out = work()
        forget_lists()  # what lies in the graph's memory belongs to its replays
        return graph, out


class Padded:
    """Pads forwards to powers of two rows and spans. Rows that stand for nobody read and write one page of their own.

    `replay`  does the work of a forward
    """

    def __init__(self, device: torch.device, pages: PageTable, pool: PagePool, replay: Replay) -> None:
        self._device, self._replay = device, replay
        spare = pool.take(_SPARE_PAGES)
        self._slot, self._spare = int(spare[0]) * pool.shape.page_size, PageList(pages, spare)
        self._buffers: dict[tuple[int, int], Tensor] = {}

    def run(self, tails: TailRows, prepare: Prepare) -> Tensor:
        """Logits of the rows."""
        rows = PaddedRows(tails, self._slot, self._spare.start)
        size = len(rows.slots), len(rows.independent)
        if size not in self._buffers:
            room = max(LEAST, 256 * sum(size))  # a few arrays of each, as int64, and their alignment
            self._buffers[size] = torch.empty(room, dtype=torch.uint8, device=self._device)
        shipment = Shipment(self._device, self._buffers[size])
        key, work = prepare(rows, shipment, replayed=True)
        shipment.send()
        # the next replay writes where this one's logits are
        return self._replay((size, key), work)[: len(tails.slots)].clone()


class PaddedRows:
    """Rows that decode, and behind them rows of no request up to the next power of two; their spans likewise."""

    def __init__(self, tails: TailRows, slot: int, page: int) -> None:
        self._tails = tails
        more = _next_power(len(tails.slots)) - len(tails.slots)
        spans = len(tails.independent) + more
        self.slots = np.concatenate([tails.slots, np.full(more, slot)])
        self.rotations = np.concatenate([tails.rotations, np.zeros(more, np.int64)])
        self.groups = _with_spans(joined([tails.groups, _rows_of_nobody(more, page)]), _next_power(spans) - spans)
        padding = np.zeros(len(self.groups.of_span.index) - len(tails.independent), bool)
        self.independent = np.concatenate([tails.independent, padding])

    def ids(self, outputs: Mapping[int, list[int]]) -> NDArray[np.int64]:
        """The token of each row, 0 for those of no request."""
        known = self._tails.ids(outputs)
        return np.concatenate([known, np.zeros(len(self.slots) - len(known), np.int64)])


def _rows_of_nobody(count: int, page: int) -> GroupArrays:
    """Groups of one row, each of which reads the one key that it writes."""
    ones, none = np.ones(count, np.int64), np.zeros(count, np.int64)
    return GroupArrays(ones, ones, none, none, Spans(none, ones, none, none + page, none))


def _with_spans(groups: GroupArrays, more: int) -> GroupArrays:
    """The same with spans of no keys behind, which no group reads."""
    none = np.zeros(more, np.int64)
    return groups._replace(of_span=Spans(*(np.concatenate([values, none]) for values in groups.of_span)))


def _next_power(count: int) -> int:
    return 1 << (count - 1).bit_length()


def _plain(device: torch.device, pages: PageTable, pool: PagePool) -> Decoder:
    return Plain(device)


def _padded(device: torch.device, pages: PageTable, pool: PagePool) -> Decoder:
    return Padded(device, pages, pool, rerun)


def _graphs(device: torch.device, pages: PageTable, pool: PagePool) -> Decoder:
    return Padded(device, pages, pool, CudaGraphs())


DECODERS: dict[str, Callable[[torch.device, PageTable, PagePool], Decoder]] = {
    PLAIN: _plain,
    PADDED: _padded,
    GRAPHS: _graphs,
}
"""By `engine.decode`."""


def spare_pages(decode: str) -> int:
    """Pages that a decoder takes from the pool for itself."""
    return 0 if decode == PLAIN else _SPARE_PAGES
