"""Recurrent layers over packed rows: every sequence's state advances over its rows and is copied at
checkpoints.

A layer's mixer is transformers' module, run once over all rows. Its convolution and its scan start
from the state of each sequence. Scans are split at checkpoint positions, so that states are
captured during the regular prefill.
"""

from __future__ import annotations

import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from itertools import chain, zip_longest
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from spanlab.engine.hook import Forward, decoder_layers
from spanlab.engine.scan import ScanInputs, ScanPlan, Segment, plan_scan, row_scan
from spanlab.engine.slots import ALL, PADDING_ROW, Layers, SlotPool, StatePool
from spanlab_kernels.attention.batch import Send, to_device

# ------------------------------------------------------------------------------
# The short convolution of recurrent layers over packed rows, in one call, with the earlier
# inputs of each sequence.
#
# The earlier inputs of every sequence are at the same rows and stored positions in every layer.
# So their indexes are computed once; a layer only gathers.
# ------------------------------------------------------------------------------

Window = tuple[int, ...]
"""The last `kernel` − 1 inputs of a sequence: rows of a forward (>= 0), zeros (-1), or stored
inputs (<= -2)."""

_ZEROS = -1
_STORED = -2


class SlotRef(NamedTuple):
    """A slot of a pool."""

    pool: SlotPool
    slot: int

    def memory(self, layer: Layers) -> Tensor:
        """The slot's conv inputs [channels, kernel − 1]; for all layers [layers · channels, kernel
        − 1]."""
        return self.pool.conv(layer, self.slot).flatten(0, -2)


class Windows:
    """Conv windows of slots, updated by the actions of a forward in order."""

    def __init__(self, kernel: int) -> None:
        self.length = kernel - 1
        self.sources: list[SlotRef] = []
        self.by_slot: dict[SlotRef, Window] = {}
        self.changed: set[SlotRef] = set()
        self.before: list[tuple[int, Window]] = []  # per scan: first row, and inputs before it

    def __getitem__(self, ref: SlotRef) -> Window:
        """Window of a slot; initially its stored window before the forward."""
        if ref not in self.by_slot:
            first = _STORED - len(self.sources) * self.length
            self.by_slot[ref] = tuple(range(first, first - self.length, -1))
            self.sources.append(ref)
        return self.by_slot[ref]

    def clear(self, ref: SlotRef) -> None:
        """Set a slot's window to zeros."""
        self._set(ref, (_ZEROS,) * self.length)

    def copy(self, source: SlotRef, target: SlotRef) -> None:
        """Copy a slot's window to another slot."""
        self._set(target, self[source])

    def append(self, source: SlotRef, target: SlotRef, inputs: int) -> None:
        """Append the last `inputs` inputs of one slot to the window of another."""
        tail = self[source][-inputs:] if inputs else ()
        self._set(target, self._last((*self[target], *tail)))

    def scan(self, ref: SlotRef, start: int, stop: int) -> None:
        """Advance a slot's window over rows `[start, stop)` of the forward."""
        before = self[ref]
        self.before.append((start, before))
        self._set(ref, self._last((*before, *range(max(start, stop - self.length), stop))))

    def _last(self, inputs: Window) -> Window:
        return inputs[len(inputs) - self.length :]

    def _set(self, ref: SlotRef, window: Window) -> None:
        self.by_slot[ref] = window
        self.changed.add(ref)


class ConvRows:
    """Convolution inputs of a layer: the rows of every scan after their earlier inputs, and updates
    of conv states.

    The inputs form a table: the rows of scans in order, each after `kernel - 1` earlier inputs;
    zeros; stored inputs. Its indexes may be sent later, before the first layer runs.
    """

    def __init__(
        self, windows: Windows, rows: int, device: torch.device, send: Send = to_device
    ) -> None:
        before = sorted(windows.before)
        reach, starts = windows.length, np.array([start for start, _ in before], np.int64)
        self._length = rows + reach * len(before)
        scans = np.searchsorted(starts, np.arange(rows), side="right")
        self._row_indices = np.arange(rows) + reach * scans
        self._sources, self._reach = windows.sources, reach
        self._targets = sorted(windows.changed, key=lambda ref: (id(ref.pool), ref.slot))
        windows_by_use = (
            [window for _, window in before],
            [windows.by_slot[ref] for ref in self._targets],
        )
        history = starts[:, None] + reach * np.arange(len(before))[:, None] + np.arange(reach)
        arrays = [self._row_indices, history.ravel()]
        for group in windows_by_use:
            ids = np.array(group, np.int64).ravel()
            indices = self._length - 1 - ids
            indices[ids >= 0] = self._row_indices[ids[ids >= 0]]
            arrays.append(indices)
        self._rows, self._history, self._history_sources, self._window_sources = send(
            arrays, torch.int64, device
        )

    def copy_windows(self, layer: Layers) -> None:
        """Update conv states of slots without rows."""
        refs = self._sources or self._targets
        if refs:
            like = refs[0].memory(layer)
            self._inputs(layer, like.new_empty(0, len(like)))

    def convolve(
        self, layer: int, convolution: Callable[..., Tensor], rows: Tensor, *args: object
    ) -> Tensor:
        """Compute the convolution's outputs [1, channels, T] of rows [1, channels, T], and update
        conv states."""
        inputs = self._inputs(layer, rows[0].mT)
        outputs = convolution(inputs.mT.contiguous()[None], *args)[0]
        return outputs.mT.contiguous().index_select(0, self._rows).mT[None]

    def _inputs(self, layer: Layers, rows: Tensor) -> Tensor:
        """Fill the table from `rows` [T, channels], update conv states, and return its rows
        [length, channels]."""
        channels, length = rows.shape[1], self._length
        table = rows.new_empty(length + 1 + self._reach * len(self._sources), channels)
        table[length] = 0
        if self._sources:
            stored = torch.stack([ref.memory(layer) for ref in self._sources])
            torch.stack(
                tuple(stored.unbind(-1)),
                dim=1,
                out=table[length + 1 :].view(-1, self._reach, channels),
            )
        table.index_copy_(0, self._rows, rows)
        table.index_copy_(0, self._history, table.index_select(0, self._history_sources))
        if self._targets:
            windows = table.index_select(0, self._window_sources).view(-1, self._reach, channels).mT
            torch._foreach_copy_([ref.memory(layer) for ref in self._targets], list(windows))
        return table[:length]


# ------------------------------------------------------------------------------
# Interception of the two sequential operations of a recurrent mixer: its convolution and its
# scan.
#
# Transformers' mixers pass extra keyword arguments to both. So a forward is passed as a keyword
# argument and replaces both; projections, gates and norms are the mixer's code, over all rows
# at once.
# ------------------------------------------------------------------------------

KEYWORD = "span_rows"
_CONVOLUTION, _SCAN = "causal_conv1d_fn", "chunk_gated_delta_rule"
_MARK = "takes_span_rows"

Convolution = Callable[..., Tensor]


class LayeredRows(ABC):
    """Rows of one forward in all recurrent layers; mixers must be patched by `intercept_mixer`."""

    def run(self, layer: int, mixer: nn.Module, hidden: Tensor) -> Tensor:
        """Compute one layer's output [1, T, H]; updates states in the pool and copies captured
        states."""
        out: Tensor = mixer(hidden, **{KEYWORD: (self, layer)})
        return out

    @abstractmethod
    def convolve(self, layer: int, convolution: Convolution, rows: Tensor, *args: object) -> Tensor:
        """Compute a layer's convolution of rows [1, channels, T]."""

    @abstractmethod
    def scan(self, layer: int, inputs: ScanInputs) -> Tensor:
        """Compute a layer's scan outputs [T, heads, d_v]."""

    @abstractmethod
    def finish(self) -> None:
        """Update slot positions after all layers have run."""


def intercept_mixer(mixer: nn.Module) -> None:
    """Patch a mixer's convolution and scan to use `LayeredRows` if they are passed; other calls are
    unchanged.

    Both functions are attributes of the mixer, or of the module that defines it.
    """
    for suffix, method in ((_CONVOLUTION, _convolution), (_SCAN, _scan)):
        owners = (mixer, sys.modules[type(mixer).__module__])
        owner = next(owner for owner in owners if _names(owner, suffix))
        for name in _names(owner, suffix):
            function = getattr(owner, name)
            if not hasattr(function, _MARK):
                setattr(owner, name, method(function))


def _names(owner: object, suffix: str) -> list[str]:
    return [name for name in vars(owner) if name.endswith(suffix)]


def _convolution(original: Convolution) -> Convolution:
    @wraps(original)
    def run(
        rows: Tensor,
        *args: Any,
        activation: str | None = None,
        span_rows: tuple[LayeredRows, int] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        if span_rows is None:
            return original(rows, *args, activation=activation, **kwargs)
        layered, layer = span_rows
        return layered.convolve(
            layer, lambda *inputs: original(*inputs, activation=activation), rows, *args
        )

    setattr(run, _MARK, True)
    return run


def _scan(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def run(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *args: Any,
        span_rows: tuple[LayeredRows, int] | None = None,
        **kwargs: Any,
    ) -> Any:
        if span_rows is None:
            return original(query, key, value, *args, **kwargs)
        layered, layer = span_rows
        inputs = ScanInputs(query[0], key[0], value[0], kwargs["g"][0], kwargs["beta"][0])
        return layered.scan(layer, inputs)[None], None

    setattr(run, _MARK, True)
    return run


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
    """Scan rows `[start, stop)` of a forward with the state in `slot`, then copy the state to
    `copy_slot`, if any.

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
            states.advance(
                self.copy_slot, 0, stop if self.copy_position is None else self.copy_position
            )


class PackedMixer(nn.Module):
    """Replaces the recurrent mixer of a decoder layer; without a `Forward` it calls the mixer
    unchanged."""

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
    """Consecutive scans of a sequence and the changes before them; no scans at the end of the
    sequence."""

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
        grouped = zip_longest(
            *(_scan_groups(actions) for actions in sequences), fillvalue=_ScanGroup([], [])
        )
        self._rounds = [
            _round(pool, groups, partial(plan_scan, device=device, send=send)) for groups in grouped
        ]
        rows = sum(
            action.stop - action.start for action in self._actions if isinstance(action, Scan)
        )
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
        memory = list(
            zip(*(scans[0].memory(self._pool, layer) for scans in batch.scans), strict=True)
        )
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
        before = group.scans[-1] if group.scans else None
        # a scan of the rows behind those of the last one, in the same slot, goes on with it
        if before is not None and not (
            isinstance(action, type(before))
            and (action.slot, action.start) == (before.slot, before.stop)
        ):
            yield group
            group = _ScanGroup([], [])
        if isinstance(action, Scan):
            group.scans.append(action)
        else:
            group.changes.append(action)
    yield group


def _round(
    pool: StatePool, groups: Iterable[_ScanGroup], plan: Callable[[Sequence[Segment]], ScanPlan]
) -> _Round:
    changes: list[Change] = []
    by_shape: dict[object, list[list[Scan]]] = {}
    for group in groups:
        changes += group.changes
        if group.scans:
            shapes = tuple(tensor.shape for tensor in group.scans[0].memory(pool, 0))
            by_shape.setdefault(shapes, []).append(group.scans)
    batches = []
    for sequences in by_shape.values():
        segments = [
            Segment(scans[0].start, tuple(scan.stop for scan in scans)) for scans in sequences
        ]
        batches.append(_Batch(sequences, plan(segments)))
    return _Round(changes, batches)


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


# ------------------------------------------------------------------------------
# Recurrent layers of a decode-only forward: one index tensor gathers the states from their
# slab.
#
# Only the index differs between steps, and it is in the transfer's buffer. So a captured graph
# serves every later batch with the same number of rows.
# ------------------------------------------------------------------------------


class DecodeRecurrence(LayeredRows):
    """The recurrent layers of one forward: built once, called by every layer.

    `scans`  one per row, of one row each, in row order; their states are in the pool's slab
    `rows`   number of rows of the forward; rows after the scans' are padding
    `send`   copies the index to the device before the first layer runs
    """

    def __init__(
        self,
        pool: StatePool,
        scans: Sequence[StateScan],
        rows: int,
        device: torch.device,
        send: Send = to_device,
    ) -> None:
        self._pool, self._scans, self._scan = pool, scans, row_scan(device)
        slab_rows = np.full(rows, PADDING_ROW)
        slab_rows[: len(scans)] = pool.rows(scan.slot for scan in scans)
        (self._slab_rows,) = send([slab_rows], torch.int64, device)

    def convolve(self, layer: int, convolution: Convolution, rows: Tensor, *args: object) -> Tensor:
        """See `LayeredRows`; every row is one batch element after its last conv inputs."""
        conv_states = self._pool.slab.tensor("conv", layer)
        before = conv_states.index_select(0, self._slab_rows)
        inputs = torch.cat([before, rows[0].mT[..., None]], dim=-1)
        conv_states.index_copy_(0, self._slab_rows, inputs[..., 1:])
        return convolution(inputs, *args)[..., -1].mT[None]

    def scan(self, layer: int, inputs: ScanInputs) -> Tensor:
        """See `LayeredRows`."""
        states = self._pool.slab.tensor("recurrent", layer)
        out, after = self._scan(inputs, states.index_select(0, self._slab_rows))
        states.index_copy_(0, self._slab_rows, after)
        return out

    def finish(self) -> None:
        """See `LayeredRows`; captured states are copied in all layers at once."""
        for scan in self._scans:
            if scan.copy_slot is not None:
                self._pool.copy(ALL, scan.slot, scan.copy_slot)
            scan.finish(self._pool)
