"""Recurrent layers over packed rows: every sequence's state runs through its own rows, and is kept where planned.

A layer's mixer is transformers' own module, run once over all rows. Its convolution and its scan begin with the state
of each sequence. Rows are cut where a state is to be kept, so that it is taken in the one prefill that happens anyway.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, zip_longest
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from spanlab.engine.chunk_scan import ScanInputs, Segment
from spanlab.engine.conv_windows import ConvRows, Place, Windows
from spanlab.engine.hook import Forward, decoder_layers
from spanlab.engine.kernel_scan import ScanPlan, plan_scan
from spanlab.engine.mixer_calls import Convolution, LayeredRows, take_over
from spanlab.engine.slot_pool import ALL, Layers
from spanlab.engine.state_pool import StatePool
from spanlab_kernels.attention import Send, to_device

MIXER = "linear_attn"


class Step(Protocol):
    """One thing that a forward does to states, in one layer after the other; steps of a sequence keep their order."""

    def note(self, states: StatePool, windows: Windows) -> None:
        """Note what becomes of the last inputs of the convolution."""
        ...

    def done(self, states: StatePool) -> None:
        """Note what every slot has seen, once all layers have run."""
        ...


class Change(Step, Protocol):
    """A step that scans no rows; it may also run outside of a forward, in all layers at once."""

    def run(self, states: StatePool, layer: Layers) -> None:
        """Do it in one layer, but for the convolution's inputs."""
        ...


class Scan(ABC):
    """A step over rows `[start, stop)` of the forward, which what `slot` holds runs through.

    A base class, as checks against protocols take longer than the steps.
    """

    __slots__ = ()
    start: int
    stop: int
    slot: int

    @abstractmethod
    def note(self, states: StatePool, windows: Windows) -> None:
        """As a `Step`."""

    @abstractmethod
    def memory(self, states: StatePool, layer: int) -> tuple[Tensor, ...]:
        """What runs through the rows, [heads, d_k, …] each: the memory itself."""

    @abstractmethod
    def reached(self, states: StatePool, layer: int, inputs: ScanInputs, after: Tensor) -> None:
        """Take what is needed of the memory after the rows, its parts side by side; it may yet go on."""

    @abstractmethod
    def done(self, states: StatePool) -> None:
        """As a `Step`."""


Action = Change | Scan


@dataclass(frozen=True, slots=True)
class Piece(Scan):
    """Rows `[start, stop)` of a forward, which the state in `slot` runs through; then `keep`, if any, gets a copy.

    `position`  tokens that the state has seen before these rows
    `kept_as`   tokens that the copy stands for; None: all that the state has seen
    """

    start: int
    stop: int
    slot: int
    position: int = field(compare=False)
    keep: int | None = None
    kept_as: int | None = None

    def note(self, states: StatePool, windows: Windows) -> None:
        """The last inputs are those of the rows."""
        windows.scan(Place(states, self.slot), self.start, self.stop)
        if self.keep is not None:
            windows.copy(Place(states, self.slot), Place(states, self.keep))

    def memory(self, states: StatePool, layer: int) -> tuple[Tensor, ...]:
        """The state."""
        return (states.recurrent(layer, self.slot),)

    def reached(self, states: StatePool, layer: int, inputs: ScanInputs, after: Tensor) -> None:
        """Copy."""
        if self.keep is not None:
            states.recurrent(layer, self.keep).copy_(after)

    def done(self, states: StatePool) -> None:
        """Move the state's position on."""
        stop = self.position + self.stop - self.start
        states.reach(self.slot, self.position, stop)
        if self.keep is not None:
            states.reach(self.keep, 0, stop if self.kept_as is None else self.kept_as)


class PackedMixer(nn.Module):
    """Stands where a decoder layer keeps its recurrent mixer; outside a forward of ours it is that mixer."""

    def __init__(self, layer: int, mixer: nn.Module) -> None:
        super().__init__()
        self.layer, self.mixer = layer, mixer

    def forward(self, hidden_states: Tensor, **rest: Any) -> Tensor:
        """Hidden states [1, T, H] to the layer's output, likewise."""
        forward: Forward | None = rest.pop("span_forward", None)
        if forward is None:
            own: Tensor = self.mixer(hidden_states, **rest)
            return own
        assert forward.recur is not None, "a forward through recurrent layers was given no states"
        return forward.recur(forward.order[self.layer], self.mixer, hidden_states)


def pack_mixers(model: PreTrainedModel) -> None:
    """Let every recurrent layer of a model run over packed rows."""
    hush_kernels(model)
    for layer, module in enumerate(decoder_layers(model)):
        if hasattr(module, MIXER):
            take_over(getattr(module, MIXER))
            setattr(module, MIXER, PackedMixer(layer, getattr(module, MIXER)))


def hush_kernels(model: PreTrainedModel) -> None:
    """Do not tell of faster kernels on a processor, where they do not run."""
    if model.device.type == "cpu":
        logging.getLogger("transformers.integrations.hub_kernels").setLevel(logging.ERROR)


class _Turn(NamedTuple):
    """Scans of a sequence that go on from each other, and what comes before them; none where the sequence ends."""

    changes: list[Change]
    scans: list[Scan]


class _Batch(NamedTuple):
    """Scans of states of one shape, for each sequence those that go on from each other."""

    scans: list[list[Scan]]
    plan: ScanPlan


class _Round(NamedTuple):
    """One turn of every sequence that has so many."""

    changes: list[Change]
    batches: list[_Batch]


class Recurrence(LayeredRows):
    """One forward's recurrent layers: built once, called by each of them.

    `sequences`  for each sequence what it does, in order; sequences do not depend on each other
    `send`       brings its numbers to the device, before a layer runs
    """

    def __init__(
        self,
        pool: StatePool,
        sequences: Sequence[Sequence[Action]],
        device: torch.device,
        send: Send = to_device,
    ) -> None:
        self._pool, self._actions = pool, list(chain.from_iterable(sequences))
        together = zip_longest(*(_turns(each) for each in sequences), fillvalue=_Turn([], []))
        self._rounds = [_round(pool, turns, partial(plan_scan, device=device, send=send)) for turns in together]
        rows = sum(action.stop - action.start for action in self._actions if isinstance(action, Scan))
        self._conv = ConvRows(_windows(pool, self._actions), rows, device, send)

    def convolve(self, layer: int, convolution: Convolution, rows: Tensor, *given: object) -> Tensor:
        """As `LayeredRows`."""
        return self._conv.convolve(layer, convolution, rows, *given)

    def scan(self, layer: int, inputs: ScanInputs) -> Tensor:
        """As `LayeredRows`."""
        out = torch.empty_like(inputs.value)
        for changes, batches in self._rounds:
            for change in changes:
                change.run(self._pool, layer)
            for batch in batches:
                self._run_batch(layer, batch, inputs, out)
        return out

    def _run_batch(self, layer: int, batch: _Batch, inputs: ScanInputs, out: Tensor) -> None:
        held = list(zip(*(scans[0].memory(self._pool, layer) for scans in batch.scans), strict=True))
        stacked = [torch.stack(parts) for parts in held]
        states = stacked[0] if len(stacked) == 1 else torch.cat(stacked, dim=-1)

        def reached(sequence: int, number: int, after: Tensor) -> None:
            batch.scans[sequence][number].reached(self._pool, layer, inputs, after)

        batch.plan.run(inputs, states, out, reached)
        found = states.split([parts.shape[-1] for parts in stacked], dim=-1)
        for parts, after in zip(held, found, strict=True):
            torch._foreach_copy_(list(parts), list(after))

    def done(self) -> None:
        """As `LayeredRows`."""
        for action in self._actions:
            action.done(self._pool)


def _turns(actions: Iterable[Action]) -> Iterator[_Turn]:
    turn = _Turn([], [])
    for action in actions:
        if turn.scans and not _goes_on(turn.scans[-1], action):
            yield turn
            turn = _Turn([], [])
        if isinstance(action, Scan):
            turn.scans.append(action)
        else:
            turn.changes.append(action)
    yield turn


def _goes_on(before: Scan, action: Action) -> bool:
    """Whether an action scans the rows behind those of a scan, from where that one has left its memory."""
    return isinstance(action, type(before)) and (action.slot, action.start) == (before.slot, before.stop)


def _round(pool: StatePool, turns: Iterable[_Turn], plan: Callable[[Sequence[Segment]], ScanPlan]) -> _Round:
    changes: list[Change] = []
    alike: dict[object, list[list[Scan]]] = {}
    for turn in turns:
        changes += turn.changes
        if turn.scans:
            shapes = tuple(part.shape for part in turn.scans[0].memory(pool, 0))
            alike.setdefault(shapes, []).append(turn.scans)
    return _Round(changes, [_Batch(scans, plan(_segments(scans))) for scans in alike.values()])


def _segments(sequences: Iterable[Sequence[Scan]]) -> list[Segment]:
    return [Segment(scans[0].start, tuple(scan.stop for scan in scans)) for scans in sequences]


def _windows(pool: StatePool, actions: Iterable[Action]) -> Windows:
    windows = Windows(pool.shape.kernel)
    for action in actions:
        action.note(pool, windows)
    return windows


def run_at_once(changes: Iterable[Action], pool: StatePool) -> None:
    """Do what scans no rows outside of a forward, in all layers together."""
    done = list(changes)
    ConvRows(_windows(pool, done), 0, pool.device).keep(ALL)
    for change in done:
        assert not isinstance(change, Scan), "rows are scanned in a forward only"
        change.run(pool, ALL)
        change.done(pool)
