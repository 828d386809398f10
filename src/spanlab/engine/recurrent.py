"""Recurrent layers over packed rows: every sequence's state advances over its rows and is copied at checkpoints.

A layer's mixer is transformers' module, run once over all rows. Its convolution and its scan start from the state of
each sequence. Scans are split at checkpoint positions, so that states are captured during the regular prefill.
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
from spanlab.engine.conv_windows import ConvRows, SlotRef, Windows
from spanlab.engine.hook import Forward, decoder_layers
from spanlab.engine.kernel_scan import ScanPlan, plan_scan
from spanlab.engine.mixer_calls import Convolution, LayeredRows, intercept_mixer
from spanlab.engine.slot_pool import ALL, Layers
from spanlab.engine.state_pool import StatePool
from spanlab_kernels.attention import Send, to_device

MIXER = "linear_attn"


class Change(Protocol):
    """An action without rows; it can also run outside a forward, in all layers at once."""

    def record_windows(self, states: StatePool, windows: Windows) -> None:
        """Record the action's effect on the conv windows."""
        ...

    def run(self, states: StatePool, layer: Layers) -> None:
        """Run the action in one layer, or in all; conv windows are handled separately."""
        ...

    def finish(self, states: StatePool) -> None:
        """Update slot positions after all layers have run."""
        ...


class Scan(ABC):
    """An action that scans rows `[start, stop)` of the forward from the contents of `slot`.

    An abstract class, because `isinstance` checks against protocols take longer than the actions.
    """

    __slots__ = ()
    start: int
    stop: int
    slot: int

    @abstractmethod
    def record_windows(self, states: StatePool, windows: Windows) -> None:
        """As `Change`."""

    @abstractmethod
    def memory(self, states: StatePool, layer: int) -> tuple[Tensor, ...]:
        """Views of the tensors that the scan updates, [heads, d_k, …] each."""

    @abstractmethod
    def on_stop(self, states: StatePool, layer: int, inputs: ScanInputs, after: Tensor) -> None:
        """Process the concatenated tensors `after` the rows; a later scan may overwrite them."""

    @abstractmethod
    def finish(self, states: StatePool) -> None:
        """As `Change`."""


Action = Change | Scan
"""An operation of a forward on states, run per layer; the actions of a sequence run in order."""


@dataclass(frozen=True, slots=True)
class StateScan(Scan):
    """Scan rows `[start, stop)` of a forward with the state in `slot`, then copy the state to `copy_slot`, if any.

    `position`       position of the state before these rows
    `copy_position`  position of the copy; None: the position of the state
    """

    start: int
    stop: int
    slot: int
    position: int = field(compare=False)
    copy_slot: int | None = None
    copy_position: int | None = None

    def record_windows(self, states: StatePool, windows: Windows) -> None:
        """Advance the conv window over the rows."""
        windows.scan(SlotRef(states, self.slot), self.start, self.stop)
        if self.copy_slot is not None:
            windows.copy(SlotRef(states, self.slot), SlotRef(states, self.copy_slot))

    def memory(self, states: StatePool, layer: int) -> tuple[Tensor, ...]:
        """The recurrent state."""
        return (states.recurrent(layer, self.slot),)

    def on_stop(self, states: StatePool, layer: int, inputs: ScanInputs, after: Tensor) -> None:
        """Copy the state."""
        if self.copy_slot is not None:
            states.recurrent(layer, self.copy_slot).copy_(after)

    def finish(self, states: StatePool) -> None:
        """Advance the state's position."""
        stop = self.position + self.stop - self.start
        states.advance(self.slot, self.position, stop)
        if self.copy_slot is not None:
            states.advance(self.copy_slot, 0, stop if self.copy_position is None else self.copy_position)


class PackedMixer(nn.Module):
    """Replaces the recurrent mixer of a decoder layer; without a `Forward` it calls the mixer unchanged."""

    def __init__(self, layer: int, mixer: nn.Module) -> None:
        super().__init__()
        self.layer, self.mixer = layer, mixer

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """Compute the layer's output [1, T, H] from hidden states [1, T, H]."""
        forward: Forward | None = kwargs.pop("span_forward", None)
        if forward is None:
            out: Tensor = self.mixer(hidden_states, **kwargs)
            return out
        assert forward.recur is not None, "a forward through recurrent layers needs states"
        return forward.recur(forward.order[self.layer], self.mixer, hidden_states)


def pack_mixers(model: PreTrainedModel) -> None:
    """Replace every recurrent mixer of a model by a `PackedMixer`."""
    silence_kernel_warnings(model)
    for layer, module in enumerate(decoder_layers(model)):
        if hasattr(module, MIXER):
            intercept_mixer(getattr(module, MIXER))
            setattr(module, MIXER, PackedMixer(layer, getattr(module, MIXER)))


def silence_kernel_warnings(model: PreTrainedModel) -> None:
    """Disable the log messages about faster kernels on the CPU, which cannot run them."""
    if model.device.type == "cpu":
        logging.getLogger("transformers.integrations.hub_kernels").setLevel(logging.ERROR)


class _ScanGroup(NamedTuple):
    """Consecutive scans of a sequence and the changes before them; no scans at the end of the sequence."""

    changes: list[Change]
    scans: list[Scan]


class _Batch(NamedTuple):
    """Scans of states of one shape: the consecutive scans of each sequence."""

    scans: list[list[Scan]]
    plan: ScanPlan


class _Round(NamedTuple):
    """The scan groups with the same index in all sequences."""

    changes: list[Change]
    batches: list[_Batch]


class Recurrence(LayeredRows):
    """The recurrent layers of one forward: built once, called by every layer.

    `sequences`  actions of each sequence, in order; sequences are independent of each other
    `send`       copies indexes to the device before the first layer runs
    """

    def __init__(
        self,
        pool: StatePool,
        sequences: Sequence[Sequence[Action]],
        device: torch.device,
        send: Send = to_device,
    ) -> None:
        self._pool, self._actions = pool, list(chain.from_iterable(sequences))
        grouped = zip_longest(*(_scan_groups(actions) for actions in sequences), fillvalue=_ScanGroup([], []))
        self._rounds = [_round(pool, groups, partial(plan_scan, device=device, send=send)) for groups in grouped]
        rows = sum(action.stop - action.start for action in self._actions if isinstance(action, Scan))
        self._conv = ConvRows(_windows(pool, self._actions), rows, device, send)

    def convolve(self, layer: int, convolution: Convolution, rows: Tensor, *args: object) -> Tensor:
        """See `LayeredRows`."""
        return self._conv.convolve(layer, convolution, rows, *args)

    def scan(self, layer: int, inputs: ScanInputs) -> Tensor:
        """See `LayeredRows`."""
        out = torch.empty_like(inputs.value)
        for changes, batches in self._rounds:
            for change in changes:
                change.run(self._pool, layer)
            for batch in batches:
                self._run_batch(layer, batch, inputs, out)
        return out

    def _run_batch(self, layer: int, batch: _Batch, inputs: ScanInputs, out: Tensor) -> None:
        memory = list(zip(*(scans[0].memory(self._pool, layer) for scans in batch.scans), strict=True))
        stacked = [torch.stack(tensors) for tensors in memory]
        states = stacked[0] if len(stacked) == 1 else torch.cat(stacked, dim=-1)

        def on_stop(sequence: int, number: int, after: Tensor) -> None:
            batch.scans[sequence][number].on_stop(self._pool, layer, inputs, after)

        batch.plan.run(inputs, states, out, on_stop)
        final = states.split([tensors.shape[-1] for tensors in stacked], dim=-1)
        for tensors, after in zip(memory, final, strict=True):
            torch._foreach_copy_(list(tensors), list(after))

    def finish(self) -> None:
        """See `LayeredRows`."""
        for action in self._actions:
            action.finish(self._pool)


def _scan_groups(actions: Iterable[Action]) -> Iterator[_ScanGroup]:
    group = _ScanGroup([], [])
    for action in actions:
        if group.scans and not _continues(group.scans[-1], action):
            yield group
            group = _ScanGroup([], [])
        if isinstance(action, Scan):
            group.scans.append(action)
        else:
            group.changes.append(action)
    yield group


def _continues(before: Scan, action: Action) -> bool:
    """Whether an action scans the rows after those of a scan, in the same slot."""
    return isinstance(action, type(before)) and (action.slot, action.start) == (before.slot, before.stop)


def _round(pool: StatePool, groups: Iterable[_ScanGroup], plan: Callable[[Sequence[Segment]], ScanPlan]) -> _Round:
    changes: list[Change] = []
    by_shape: dict[object, list[list[Scan]]] = {}
    for group in groups:
        changes += group.changes
        if group.scans:
            shapes = tuple(tensor.shape for tensor in group.scans[0].memory(pool, 0))
            by_shape.setdefault(shapes, []).append(group.scans)
    return _Round(changes, [_Batch(scans, plan(_segments(scans))) for scans in by_shape.values()])


def _segments(sequences: Iterable[Sequence[Scan]]) -> list[Segment]:
    return [Segment(scans[0].start, tuple(scan.stop for scan in scans)) for scans in sequences]


def _windows(pool: StatePool, actions: Iterable[Action]) -> Windows:
    windows = Windows(pool.shape.kernel)
    for action in actions:
        action.record_windows(pool, windows)
    return windows


def run_changes(changes: Iterable[Action], pool: StatePool) -> None:
    """Run changes outside a forward, in all layers at once."""
    actions = list(changes)
    ConvRows(_windows(pool, actions), 0, pool.device).copy_windows(ALL)
    for change in actions:
        assert not isinstance(change, Scan), "rows can be scanned only in a forward"
        change.run(pool, ALL)
        change.finish(pool)
