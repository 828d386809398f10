"""Recurrent states in numbered slots: what the recurrent layers hold after a prefix of a prompt."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spanlab.engine.slot_pool import Layers, Part, SlotPool


@dataclass(frozen=True)
class StateShape:
    """Sizes of one state: recurrent layers; per layer, value heads of key_dim × value_dim, and conv channels × kernel.

    The convolution keeps its last `kernel` inputs, as transformers' caches do, though one fewer would be enough.
    """

    layers: int
    heads: int
    key_dim: int
    value_dim: int
    channels: int
    kernel: int

    def memory(self, dtype: torch.dtype = torch.float32) -> Part:
        """A layer's recurrent state [heads, key_dim, value_dim]."""
        return Part((self.heads, self.key_dim, self.value_dim), dtype)

    def window(self, dtype: torch.dtype) -> Part:
        """A layer's last convolution inputs [channels, kernel]."""
        return Part((self.channels, self.kernel), dtype)


class StatePool(SlotPool):
    """States of all recurrent layers by slot.

    The recurrent part is float32 whatever the model computes in, the convolution's part is the model's own `dtype`.
    """

    def __init__(
        self, shape: StateShape, dtype: torch.dtype, device: torch.device | str, *, poison: bool = False
    ) -> None:
        parts = {"recurrent": shape.memory(), "conv": shape.window(dtype)}
        super().__init__(shape.layers, parts, device, poison=poison)
        self.shape = shape

    def recurrent(self, layer: Layers, slot: int) -> Tensor:
        """Recurrent states, float32 [heads, key_dim, value_dim]: the memory itself."""
        return self.part("recurrent", layer, slot)

    def conv(self, layer: Layers, slot: int) -> Tensor:
        """The last convolution inputs [channels, kernel]: the memory itself."""
        return self.part("conv", layer, slot)
