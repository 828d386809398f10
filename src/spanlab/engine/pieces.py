"""Forwards of a model as CUDA graphs between its attentions, which the host launches in a tenth of the time.

A captured piece depends on the padded number of rows alone: not on the spans, pages or states that attention and
recurrent layers read, which run between the pieces. So a few captures serve every step and every engine of a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from spanlab.engine.hook import Attend, Recur
from spanlab.engine.model import SpanModel

ROWS = 64  # a device computes up to so many rows in about the time of one: it reads the same weights
LARGEST = 512  # rows; the device needs more time for more of them than the host does without graphs

Replay = Callable[[], None]


class Recorder(Protocol):
    """Records launches; what is recorded is not computed."""

    def session(self) -> AbstractContextManager[None]:
        """Surround all pieces of one forward."""
        ...

    def begin(self) -> None:
        """Start a piece."""
        ...

    def end(self) -> Replay:
        """End the piece; the result computes it on the present contents of the tensors that it reads."""
        ...


class GraphRecorder:
    """Records CUDA graphs that share one memory pool, since one is replayed at a time, in the order of capture."""

    def __init__(self) -> None:
        self._memory, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        self._graph = torch.cuda.CUDAGraph()

    @contextmanager
    def session(self) -> Iterator[None]:
        """See `Recorder`; a capture needs a stream of its own."""
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream().wait_stream(self._stream)

    def begin(self) -> None:
        """See `Recorder`."""
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=self._memory)

    def end(self) -> Replay:
        """See `Recorder`."""
        self._graph.capture_end()
        return self._graph.replay


class _Break(NamedTuple):
    """A layer that runs between two pieces.

    `before`  computes the piece that ends with the layer's inputs
    `run`     computes the layer for the first rows, and writes them where the next piece reads
    """

    before: Replay
    run: Callable[[int, Attend, Recur | None], None]


class _Captured(NamedTuple):
    """The pieces of a forward of so many rows, and its inputs and logits."""

    ids: Tensor
    rotations: Tensor
    logits_rows: Tensor
    breaks: list[_Break]
    last: Replay
    logits: Tensor


class Pieces:
    """Replays a model's forwards of up to `LARGEST` rows; each number of rows is captured at first use.

    Padding rows are computed from any earlier contents: no row of a piece affects another one.
    """

    def __init__(self, model: SpanModel, recorder: Recorder) -> None:
        self._model, self._recorder = ref(model), recorder  # weak, so that a model that is no longer used is freed
        self._captured: dict[tuple[int, int], _Captured] = {}
        heads = model.query_heads, model.head_dim
        self._attended = torch.zeros(LARGEST, *heads, dtype=model.dtype, device=model.device)
        self._recurred = torch.zeros(1, LARGEST, model.config.hidden_size, dtype=model.dtype, device=model.device)

    def prepare(self) -> None:
        """Capture every number of rows, with logits of one row."""
        for rows in range(ROWS, LARGEST + 1, ROWS):
            self._of(rows, 1)

    @torch.no_grad()
    def forward(
        self, ids: Tensor, rotations: Tensor, attend: Attend, logits_rows: Tensor, recur: Recur | None = None
    ) -> Tensor:
        """As `SpanModel.forward`."""
        rows, chosen = len(ids), len(logits_rows)
        captured = self._of(-(-rows // ROWS) * ROWS, 1 << max(chosen - 1, 0).bit_length())
        inputs = captured.ids, captured.rotations, captured.logits_rows
        for target, source in zip(inputs, (ids, rotations, logits_rows), strict=True):
            target[: len(source)].copy_(source)
        for before, run in captured.breaks:
            before()
            run(rows, attend, recur)
        captured.last()
        return captured.logits[:chosen].clone()  # the next replay overwrites these logits

    def _of(self, rows: int, chosen: int) -> _Captured:
        if (rows, chosen) not in self._captured:
            self._captured[rows, chosen] = self._capture(rows, chosen)
        return self._captured[rows, chosen]

    def _capture(self, rows: int, chosen: int) -> _Captured:
        model, counts = self._model(), (rows, rows, chosen)
        assert model is not None, "a model is kept by its engines"
        ids, rotations, logits_rows = (torch.zeros(count, dtype=torch.int64, device=model.device) for count in counts)
        attended, recurred = self._attended[:rows], self._recurred[:, :rows]
        breaks: list[_Break] = []

        def attend(layer: int, *states: Tensor) -> Tensor:
            def run(count: int, attend: Attend, recur: Recur | None) -> None:
                query, key, value = (state[:count] for state in states)
                attended[:count].copy_(attend(layer, query, key, value))

            breaks.append(_Break(self._recorder.end(), run))
            self._recorder.begin()
            return attended

        def recur(layer: int, mixer: nn.Module, hidden: Tensor) -> Tensor:
            def run(count: int, attend: Attend, recur: Recur | None) -> None:
                assert recur is not None, "a forward through recurrent layers needs states"
                recurred[:, :count].copy_(recur(layer, mixer, hidden[:, :count]))

            breaks.append(_Break(self._recorder.end(), run))
            self._recorder.begin()
            return recurred

        with self._recorder.session():
            # once without a capture, in which libraries may not be initialised
            model.forward(ids, rotations, lambda *given: attended, logits_rows, recur=lambda *given: recurred)
            self._recorder.begin()
            logits = model.forward(ids, rotations, attend, logits_rows, recur=recur)
            last = self._recorder.end()
        return _Captured(ids, rotations, logits_rows, breaks, last, logits)


_SHARED: WeakKeyDictionary[SpanModel, Pieces] = WeakKeyDictionary()


def pieces_of(model: SpanModel) -> Pieces:
    """The pieces of a model as CUDA graphs, all captured; every engine of the model gets the same."""
    if model not in _SHARED:
        pieces = Pieces(model, GraphRecorder())
        pieces.prepare()
        _SHARED[model] = pieces
    return _SHARED[model]
