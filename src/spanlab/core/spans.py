"""Settings of position-independent reuse of spans: the independent choices behind every published method.

Policies read the settings that decide what is stored, the engine those that decide how keys are read. The study
checks them, since it has the arm's name.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from spanlab.checks import one_of, positive
from spanlab.core.maps import MapRules
from spanlab.core.repair import Repair

PROVENANCES = ("isolated", "conditioned", "as_seen")
KEYS_OF_KERNEL = {"rotate_keys": ("raw",), "rotate_queries": ("local",), "pre_rotated": ("local", "absolute")}


@dataclass
class SpanSettings:
    """One point of the grid of position-independent methods.

    `provenance`   isolated: a span is computed alone; conditioned: after the prompt's opening text; as_seen: after the
                   text that preceded it in its first prompt
    `keys`         stored raw (not rotated), local (rotated by the position in the span) or absolute (by the position in
                   the first prompt)
    `positions`    sequential: as in the prompt; overlapping: all spans begin at one position; original: where they were
                   first computed, a control that must be worse
    `repair`       tokens that are recomputed in full view of the prompt
    `sharing`      canonical: stored pages are shared, and copied before a write; private: every request copies the
                   spans that it reads
    `kernel`       rotate_keys: as they are loaded; rotate_queries: once per span; pre_rotated: keys were rotated before
    `temperature`, `scale`  of the attention to spans (APE's T and S); 1 and 1 change nothing
    `maps`         how recurrent layers keep a span, for hybrid models; null: there are none
    """

    provenance: str = "isolated"
    keys: str = "local"
    positions: str = "sequential"
    repair: Repair = field(default_factory=Repair)
    sharing: str = "canonical"
    kernel: str = "rotate_queries"
    temperature: float = 1.0
    scale: float = 1.0
    maps: MapRules | None = None

    @property
    def copies(self) -> bool:
        """Whether a request reads private copies of spans."""
        return self.sharing == "private"

    @property
    def rotates_copies(self) -> bool:
        """Whether copied keys are rotated to their positions in the prompt."""
        return self.copies and self.kernel == "pre_rotated"

    @property
    def reweighs(self) -> bool:
        """Whether attention to spans is changed at all."""
        return (self.temperature, self.scale) != (1.0, 1.0)

    def check(self, arm: str) -> None:
        """Raise ValueError for invalid settings; `arm` is the prefix of their keys."""
        one_of(f"{arm}.provenance", self.provenance, PROVENANCES)
        one_of(f"{arm}.positions", self.positions, ("sequential", "overlapping", "original"))
        one_of(f"{arm}.sharing", self.sharing, ("canonical", "private"))
        one_of(f"{arm}.kernel", self.kernel, KEYS_OF_KERNEL)
        expected_keys = KEYS_OF_KERNEL[self.kernel]
        if self.keys not in expected_keys:
            expected = f"expected {' or '.join(expected_keys)}"
            raise ValueError(f"{arm}.keys={self.keys} with kernel={self.kernel}: {expected}")
        positive(f"{arm}.temperature", self.temperature)
        positive(f"{arm}.scale", self.scale)
        self.repair.check(f"{arm}.repair")
        self._check_pages(arm)
        if self.reweighs and self.repair.measured and not self.repair.compares:
            weights = f"temperature={self.temperature}, scale={self.scale}"
            raise ValueError(f"{arm}.repair.kind={self.repair.kind} with {weights}: expected 1 and 1")
        if self.maps is not None:
            self.maps.check(f"{arm}.maps")
            self._check_maps(arm)

    def _check_maps(self, arm: str) -> None:
        """Raise ValueError for settings that do not work with maps.

        A map is of a span computed alone, read where it is stored; recomputed rows come before the rows of the map.
        """
        required = {"provenance": "isolated", "sharing": "canonical"}
        for key, value in required.items():
            if getattr(self, key) != value:
                raise ValueError(f"{arm}.{key}={getattr(self, key)} with {arm}.maps: expected {value}")
        if self.repair.kind not in ("none", "first"):
            reason = f"with {arm}.maps, which are of what follows a repair: expected none or first"
            raise ValueError(f"{arm}.repair.kind={self.repair.kind} {reason}")

    def _check_pages(self, arm: str) -> None:
        """Raise ValueError for contradictory keys and positions, and for writes to shared pages.

        A rule that writes into pages needs private copies. Keys at original positions have nothing to write.
        """
        if self.positions == "original" and (self.kernel, self.keys) != ("pre_rotated", "absolute"):
            setting = f"kernel={self.kernel}, keys={self.keys}"
            raise ValueError(f"{arm}.positions=original with {setting}: expected kernel=pre_rotated, keys=absolute")
        if self.keys == "absolute" and self.positions != "original":
            raise ValueError(f"{arm}.keys=absolute with positions={self.positions}: expected keys=local")
        if self.provenance == "conditioned" and self.positions != "overlapping":  # the opening text's distance counts
            raise ValueError(f"{arm}.provenance=conditioned with positions={self.positions}: expected overlapping")
        rotates = self.kernel == "pre_rotated" and self.positions != "original"
        if (rotates or self.repair.rewrites) and self.sharing != "private":
            reason = "kernel=pre_rotated" if rotates else f"repair.kind={self.repair.kind}"
            raise ValueError(f"{arm}.sharing={self.sharing} with {reason}, which writes to spans: expected private")


#: Settings of arms that reuse prefixes only: keys are stored rotated by their final positions.
PREFIXES_ALONE = SpanSettings(keys="absolute", kernel="pre_rotated")
