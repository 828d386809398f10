"""How stored keys are read: what turn they carry, where they count as standing, which form of the kernel does it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from spanlab.core.sections import Section

Rows = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Reading:
    """The engine's half of a reuse method; the policy's half is its layout and its repair.

    `keys`         what a span's stored keys are turned by: raw nothing, local their place in the span, absolute their
                   position in the prompt that they were computed in
    `positions`    sequential: a span counts as standing where it stands; overlapping: all begin behind the opening
                   text, and what follows them begins behind the longest; original: where it was first computed
    `form`         of the attention kernel: KR, QR or MAT (`spanlab_kernels.attention`)
    `copies`       a request reads its own copies of spans; with MAT they are turned while they are copied
    `temperature`, `scale`  APE's T and S (arXiv 2502.05431): scores of spans are divided by T, and the spans' share of
                   the softmax is exp(S · T · lse); 1 and 1 change nothing
    """

    keys: Literal["raw", "local", "absolute"] = "absolute"
    positions: Literal["sequential", "overlapping", "original"] = "sequential"
    form: Literal["KR", "QR", "MAT"] = "MAT"
    copies: bool = False
    temperature: float = 1.0
    scale: float = 1.0

    @property
    def reweighs(self) -> bool:
        """Whether attention to spans is changed at all."""
        return (self.temperature, self.scale) != (1.0, 1.0)

    @property
    def turns_copies(self) -> bool:
        """Whether copied keys are turned to where they stand now."""
        return self.copies and self.form == "MAT"

    def turn(self, section: Section, base: int, rows: Rows) -> Rows:
        """What keys carry when they are computed and stored: those at `rows` of a section at position `base`.

        Ordered text is turned to its position at once: nobody reads it at another one.
        """
        if self.keys == "raw":
            return np.zeros_like(rows)
        return rows if self.keys == "local" and section.independent else base + rows


def bases(sections: tuple[Section, ...], overlapping: bool) -> list[int]:
    """The position of each section's first token."""
    if not overlapping:
        return [section.start for section in sections]
    head = next((section.start for section in sections if section.independent), 0)
    spans = [section.stop - section.start for section in sections if section.independent]
    position, found = head + max(spans, default=0), []
    for section in sections:
        if section.independent:
            found.append(head)
        elif section.start < head or not spans:
            found.append(section.start)
        else:
            found.append(position)
            position += section.stop - section.start
    return found
