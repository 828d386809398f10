"""Kinds of recurrent layers: what a token computes on the state of one, and what of it is
stored."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Recurrence:
    """Work and memory of one kind of recurrent layer, on top of the products with its matrices.

    `per_number`      operations of a token per number of the state, those of the key and value
                      dimensions left out
    `per_channel`     operations of a token per channel of the convolution, which itself counts as a
                      matrix
    `convolves_keys`  whether keys and queries pass the convolution, too, so that its state has
                      their inputs
    `exports`         whether a kernel of vLLM stores a state inside of a chunk on the cards that a
                      release names
    """

    per_number: int
    per_channel: int = 0
    convolves_keys: bool = True
    exports: bool = False

    def flops(self, numbers: int, channels: int) -> int:
        """Return the operations per token of a layer whose state has `numbers` numbers, beside its
        matrices."""
        return self.per_number * numbers + self.per_channel * channels


#: Operations per number of the state S, of d_k · d_v numbers per head; a multiply-add counts two,
#: an exponential one.
#:
#: gated_delta_net  S ← a S (1); the old value k S (2); S ← S + k ⊗ u (2); the output q S (2): 7.
#: kda              the same, with a factor of its own for every channel of the key in place of one per head: 7.
#: mamba_2          S ← a S (1); S ← S + B ⊗ Δx (2); C S (2): 5, for it writes without reading the old value.
#: mamba_1          each number has a factor exp(Δ A) of its own: Δ A (1), exp (1), S ← a S (1), then as Mamba-2: 7.
#: short_conv       no state but the inputs of the convolution, which one gate multiplies before it and one behind it.
RECURRENCES: dict[str, Recurrence] = {
    "gated_delta_net": Recurrence(7, exports=True),
    "kda": Recurrence(7),
    "mamba_2": Recurrence(5),
    "mamba_1": Recurrence(7, convolves_keys=False),
    "short_conv": Recurrence(0, per_channel=2, convolves_keys=False),
}
