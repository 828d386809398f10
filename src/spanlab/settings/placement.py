"""Settings of the placement of recurrent states."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from spanlab.checks import one_of, positive
from spanlab.core.cost import COST
from spanlab.core.eviction import FUTURE
from spanlab.core.placement import PLACEMENTS, Dp


@dataclass
class PlacementSettings:
    """Positions at which recurrent states are stored: the union of `kind` and of the placements in `also`.

    `kind`      the placement; docs/methods.md describes each
    `interval`  tokens between two states; block, retention, second_hit, decode_interval and response_end only
    `count`     states per prompt; balanced, dp and tail only
    `offset`    tokens from the prompt's end to the first state of tail; null: the model's grid
    `also`      further placements, which need no option
    `dp`        how dp learns; dp only
    `options`   options of a placement from a plugin, by name
    """

    kind: str = "none"
    interval: int | None = None
    count: int | None = None
    offset: int | None = None
    also: list[str] = field(default_factory=list)
    dp: Dp | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def check(self, arm: str) -> None:
        """Raise ValueError for invalid settings, naming the arm."""
        path = f"{arm}.placement"
        one_of(f"{path}.kind", self.kind, PLACEMENTS)
        for extra in self.also:
            one_of(f"{path}.also", extra, [name for name in PLACEMENTS if not PLACEMENTS.needs_options(name)])
        for key in ("interval", "count", "offset"):
            positive(f"{path}.{key}", getattr(self, key))
        PLACEMENTS.check(path, self.kind, self.keys, self.options)
        if self.dp is not None:
            self.dp.check(f"{path}.dp")

    @property
    def keys(self) -> dict[str, Any]:
        """Options that are keys of this schema."""
        return {"interval": self.interval, "count": self.count, "offset": self.offset, "dp": self.dp}

    @property
    def foresees(self) -> str:
        """The setting by which the placement reads future requests; empty for an online placement."""
        clairvoyant = [name for name in (self.kind, *self.also) if name in PLACEMENTS.needing(FUTURE)]
        return f"placement.kind={clairvoyant[0]}" if clairvoyant else ""

    @property
    def compares(self) -> bool:
        """Whether the placement compares positions by `cost`; the published solver always counts tokens."""
        solver = "optimal" if self.dp is None else self.dp.solver
        return solver != "published" and any(name in PLACEMENTS.needing(COST) for name in (self.kind, *self.also))

    @property
    def places(self) -> bool:
        """Whether the placement stores states."""
        return self.kind != "none" or bool(self.also)
