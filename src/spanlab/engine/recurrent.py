"""Recurrent layers over packed rows: every request's state runs through its own rows, and is kept where planned.

A layer's mixer is transformers' own module, run piece by piece with a cache of one layer that is a slot of ours. So
whatever it calls for the scan (flash-linear-attention where installed, plain torch elsewhere) is called here too, and
a state is taken in the middle of the one prefill that happens anyway: the rows before it end a piece.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from spanlab.engine.affine import AffineMap
from spanlab.engine.hook import Forward
from spanlab.engine.slot_pool import ALL, Layers
from spanlab.engine.span_scan import carry_maps
from spanlab.engine.state_pool import StatePool

MIXER = "linear_attn"
_CPU_ROWS = 256  # the torch scan of more rows at once leaves the processor's caches, and takes longer for each


Scan = Callable[[int, int, "LayerCache"], None]
"""scan(start, stop, cache): run the mixer over rows `[start, stop)` of the forward, from and to what `cache` holds."""


class Action(Protocol):
    """One thing that a forward does to states, in one layer after the other; actions of a forward keep their order.

    What scans no rows may also `run` outside of a forward, in all layers at once.
    """

    def run(self, states: StatePool, layer: Layers, scan: Scan) -> None:
        """Do it in one layer."""
        ...

    def done(self, states: StatePool) -> None:
        """Note what every slot has seen, once all layers have run."""
        ...


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows `[start, stop)` of a forward, which the state in `slot` runs through; then `keep`, if any, gets a copy.

    `position`  tokens that the state has seen before these rows
    `kept_as`   tokens that the copy stands for; None: all that the state has seen
    """

    start: int
    stop: int
    slot: int
    position: int
    keep: int | None = None
    kept_as: int | None = None

    def run(self, states: StatePool, layer: Layers, scan: Scan) -> None:
        """Scan the rows, and copy."""
        memory, conv = states.recurrent(layer, self.slot), states.conv(layer, self.slot)
        scan(self.start, self.stop, StateCache(memory[None], conv[None]))
        if self.keep is not None:
            states.copy(layer, self.slot, self.keep)

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
            return self.mixer(hidden_states, **rest)
        assert forward.recur is not None, "a forward through recurrent layers was given no states"
        return forward.recur(forward.order[self.layer], self.mixer, hidden_states)


def pack_mixers(model: PreTrainedModel) -> None:
    """Let every recurrent layer of a model run over packed rows."""
    if model.device.type == "cpu":  # where the faster kernels that transformers would tell of do not run
        logging.getLogger("transformers.integrations.hub_kernels").setLevel(logging.ERROR)
    for layer, module in enumerate(model.base_model.layers):
        if hasattr(module, MIXER):
            carry_maps(getattr(module, MIXER))
            setattr(module, MIXER, PackedMixer(layer, getattr(module, MIXER)))


class Recurrence:
    """One forward's recurrent layers: built once, called by each of them.

    Pieces of one state come in order. Where its last one is a single row, as a decode is, it runs in one batch with
    those of other states.
    """

    def __init__(self, pool: StatePool, actions: Sequence[Action], device: torch.device) -> None:
        pieces = [action for action in actions if isinstance(action, Piece)]
        last = {piece.slot: piece for piece in pieces}
        self._pool, self._actions = pool, actions
        self._single = [piece for piece in last.values() if piece.stop - piece.start == 1 and piece.keep is None]
        together = set(map(id, self._single))
        self._in_order = [action for action in actions if id(action) not in together]
        self._longest = _CPU_ROWS if device.type == "cpu" else None
        self._rows = torch.tensor([piece.start for piece in self._single], device=device)

    def run(self, layer: int, mixer: nn.Module, hidden: Tensor) -> Tensor:
        """One layer's output [1, T, H]; states in the pool move on, copies are kept."""
        out = torch.empty_like(hidden)

        def scan(start: int, stop: int, cache: LayerCache) -> None:
            for begin in range(start, stop, self._longest or stop - start):
                end = min(begin + self._longest, stop) if self._longest else stop
                out[:, begin:end] = mixer(hidden[:, begin:end], cache_params=cache)

        for action in self._in_order:
            action.run(self._pool, layer, scan)
        if self._single:
            out[0, self._rows] = self._run_singles(layer, mixer, hidden[0, self._rows][:, None])[:, 0]
        return out

    def _run_singles(self, layer: int, mixer: nn.Module, hidden: Tensor) -> Tensor:
        recurrent = [self._pool.recurrent(layer, piece.slot) for piece in self._single]
        conv = [self._pool.conv(layer, piece.slot) for piece in self._single]
        batch = StateCache(torch.stack(recurrent), torch.stack(conv))
        out: Tensor = mixer(hidden, cache_params=batch)
        torch._foreach_copy_(recurrent, list(batch.recurrent))
        torch._foreach_copy_(conv, list(batch.conv))
        return out

    def done(self) -> None:
        """Note what every state has seen, once all layers have run."""
        for action in self._actions:
            action.done(self._pool)


def run_at_once(actions: Iterable[Action], states: StatePool) -> None:
    """Do what scans no rows outside of a forward, in all layers together."""

    def no_scan(start: int, stop: int, cache: LayerCache) -> None:
        raise AssertionError("rows are scanned in a forward only")

    for action in actions:
        action.run(states, ALL, no_scan)
        action.done(states)


class LayerCache:
    """What a mixer sees as transformers' cache: one layer's memory and convolution inputs [N, …], changed in place.

    There is always a previous state, be it that of nothing: zeros, which scan and convolution begin with anyway.
    Mixers up to transformers 5.20 at least ask for states as `layers[…].conv_states[0]`, later ones call a method.
    """

    record_past = False

    def __init__(self, recurrent: Tensor | AffineMap, conv: Tensor) -> None:
        self.recurrent, self.conv = recurrent, conv
        self.recurrent_states, self.conv_states = (recurrent,), (conv,)

    @property
    def layers(self) -> LayerCache:
        return self

    def __getitem__(self, layer_idx: int) -> LayerCache:
        return self

    def has_previous_state(self, layer_idx: int, state_idx: int = 0) -> bool:
        return True

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | AffineMap:
        return self.recurrent

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        return self.conv

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, **rest: Any) -> Tensor:
        """The inputs so far [N, channels, kernel + T]; the last of them stay."""
        inputs = torch.cat([self.conv, conv_states], dim=-1)
        self.conv.copy_(inputs[..., -self.conv.shape[-1] :])
        return inputs


class StateCache(LayerCache):
    """A state [N, heads, key_dim, value_dim] that runs through rows."""

    recurrent: Tensor

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, **rest: Any) -> Tensor:
        return self.recurrent.copy_(recurrent_states)


class MapCache(LayerCache):
    """The map of a span's rows so far, N = 1, that goes on over further rows of it."""

    recurrent: AffineMap

    def update_recurrent_state(self, recurrent_states: AffineMap, layer_idx: int, **rest: Any) -> AffineMap:
        self.recurrent.copy_(recurrent_states)
        return self.recurrent
