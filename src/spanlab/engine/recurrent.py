"""Recurrent layers over packed rows: every request's state runs through its own rows, and is kept where planned.

A layer's mixer is transformers' own module, run piece by piece with a cache of one layer that is a slot of ours. So
whatever it calls for the scan (flash-linear-attention where installed, plain torch elsewhere) is called here too, and
a state is taken in the middle of the one prefill that happens anyway: the rows before it end a piece.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from spanlab.engine.hook import Forward
from spanlab.engine.state_pool import StatePool

MIXER = "linear_attn"
_CPU_ROWS = 256  # the torch scan of more rows at once leaves the processor's caches, and takes longer for each


class Piece(NamedTuple):
    """Rows `[start, stop)` of a forward, which the state in `slot` runs through; then `keep`, if any, gets a copy.

    `position`  tokens that the state has seen before these rows
    """

    start: int
    stop: int
    slot: int
    position: int
    keep: int | None = None


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
    hush_kernels(model)
    for layer, module in enumerate(model.base_model.layers):
        if hasattr(module, MIXER):
            setattr(module, MIXER, PackedMixer(layer, getattr(module, MIXER)))


def hush_kernels(model: PreTrainedModel) -> None:
    """Do not tell of faster kernels on a processor, where they do not run."""
    if model.device.type == "cpu":
        logging.getLogger("transformers.integrations.hub_kernels").setLevel(logging.ERROR)


class Recurrence:
    """One forward's recurrent layers: built once, called by each of them.

    Pieces of one state come in order. Where its last one is a single row, as a decode is, it runs in one batch with
    those of other states.
    """

    def __init__(self, pool: StatePool, pieces: Sequence[Piece], device: torch.device) -> None:
        last = {piece.slot: piece for piece in pieces}
        self._pool, self._pieces = pool, pieces
        self._single = [piece for piece in last.values() if piece.stop - piece.start == 1 and piece.keep is None]
        together = set(self._single)
        longest = _CPU_ROWS if device.type == "cpu" else max((piece.stop for piece in pieces), default=0)
        self._long = [part for piece in pieces if piece not in together for part in _cut(piece, longest)]
        self._rows = torch.tensor([piece.start for piece in self._single], device=device)

    def run(self, layer: int, mixer: nn.Module, hidden: Tensor) -> Tensor:
        """One layer's output [1, T, H]; states in the pool move on, copies are kept."""
        out = torch.empty_like(hidden)
        for piece in self._long:
            states = self._pool.recurrent(layer, piece.slot)[None], self._pool.conv(layer, piece.slot)[None]
            out[:, piece.start : piece.stop] = mixer(hidden[:, piece.start : piece.stop], cache_params=_Slot(*states))
            if piece.keep is not None:
                self._pool.recurrent(layer, piece.keep).copy_(states[0][0])
                self._pool.conv(layer, piece.keep).copy_(states[1][0])
        if self._single:
            out[0, self._rows] = self._run_singles(layer, mixer, hidden[0, self._rows][:, None])[:, 0]
        return out

    def _run_singles(self, layer: int, mixer: nn.Module, hidden: Tensor) -> Tensor:
        recurrent = [self._pool.recurrent(layer, piece.slot) for piece in self._single]
        conv = [self._pool.conv(layer, piece.slot) for piece in self._single]
        batch = _Slot(torch.stack(recurrent), torch.stack(conv))
        out: Tensor = mixer(hidden, cache_params=batch)
        torch._foreach_copy_(recurrent, list(batch.recurrent))
        torch._foreach_copy_(conv, list(batch.conv))
        return out

    def done(self) -> None:
        """Note what every state has seen, once all layers have run."""
        for piece in self._pieces:
            stop = piece.position + piece.stop - piece.start
            self._pool.reach(piece.slot, piece.position, stop)
            if piece.keep is not None:
                self._pool.reach(piece.keep, 0, stop)


def _cut(piece: Piece, longest: int) -> Iterator[Piece]:
    """The same rows in pieces of `longest` at most; what is to be kept is kept after the last."""
    for start in range(piece.start, piece.stop, longest):
        stop = min(start + longest, piece.stop)
        position = piece.position + start - piece.start
        yield Piece(start, stop, piece.slot, position, piece.keep if stop == piece.stop else None)


class _Slot:
    """What a mixer sees as transformers' cache: one layer's states [N, …], changed in place.

    A slot has always a previous state, be it that of nothing: zeros, which scan and convolution begin with anyway.
    Mixers up to transformers 5.20 at least ask for states as `layers[…].conv_states[0]`, later ones call a method.
    """

    record_past = False

    def __init__(self, recurrent: Tensor, conv: Tensor) -> None:
        self.recurrent, self.conv = recurrent, conv
        self.recurrent_states, self.conv_states = (recurrent,), (conv,)

    @property
    def layers(self) -> _Slot:
        return self

    def __getitem__(self, layer_idx: int) -> _Slot:
        return self

    def has_previous_state(self, layer_idx: int, state_idx: int = 0) -> bool:
        return True

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
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

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, **rest: Any) -> Tensor:
        return self.recurrent.copy_(recurrent_states)
