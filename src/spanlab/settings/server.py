"""Settings of the timing model, of the store and of the executor."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from spanlab.checks import not_negative, one_of, positive
from spanlab.core.tiers.rules import TierRules
from spanlab_sim.timings import TIMINGS


@dataclass
class TimingSettings:
    """The timing model: the duration of a step.

    `kind`                        roofline: model × hardware, uncalibrated; constant: seconds per token and per step;
                                  calibrated: a profile fitted to measured steps; fitted: a profile fitted to a
                                  server's log
    `seconds_per_computed_token`  constant only; required there
    `seconds_per_decode_token`    constant only; null: that of a computed token
    `seconds_per_step`            constant only; null: 0
    `profile`                     file written by the entry calibrate, or by twin for fitted; null: for calibrated, the
                                  profile of this model and machine
    `options`                     options of a timing model from a plugin, by name
    """

    kind: str = "roofline"
    seconds_per_computed_token: float | None = None
    seconds_per_decode_token: float | None = None
    seconds_per_step: float | None = None
    profile: str | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        one_of("timing.kind", self.kind, TIMINGS)
        for key in ("seconds_per_computed_token", "seconds_per_decode_token", "seconds_per_step"):
            not_negative(f"timing.{key}", getattr(self, key))
        if self.seconds_per_computed_token == 0 and not self.seconds_per_step:
            step = "null" if self.seconds_per_step is None else 0
            pair = f"timing.seconds_per_computed_token=0 with timing.seconds_per_step={step}"
            raise ValueError(f"{pair}: expected a time above zero in one of them")
        TIMINGS.check("timing", self.kind, self.keys, self.options)

    @property
    def keys(self) -> dict[str, Any]:
        """Options that have keys of their own."""
        return {key: value for key, value in vars(self).items() if key not in ("kind", "options")}


@dataclass
class StoreSettings:
    """Memory budget of the device, for cached and running requests together; null: no limit.

    `total_gib`    GiB of KV and states together
    `kv_gib`       GiB of KV
    `state_gib`    GiB of recurrent states
    `state_ratio`  splits total_gib into two pools: bytes of states ÷ bytes of KV; null: one budget for both
    `entries`      number of stored entries
    `tiers`        memory tiers below the device by name, the nearest first; for pools of blocks
    """

    total_gib: float | None = None
    kv_gib: float | None = None
    state_gib: float | None = None
    state_ratio: float | None = None
    entries: int | None = None
    tiers: dict[str, TierRules] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key in ("total_gib", "kv_gib", "state_gib", "state_ratio", "entries"):
            positive(f"store.{key}", getattr(self, key))
        for key, value in (("kv_gib", self.kv_gib), ("state_gib", self.state_gib)):
            if value is not None and self.total_gib is not None and value > self.total_gib:
                expected = f"expected at most store.total_gib={self.total_gib}, or store.total_gib=null"
                raise ValueError(f"store.{key}={value}: {expected}")
            if value is not None and self.state_ratio is not None:
                raise ValueError(f"store.{key}={value} with store.state_ratio={self.state_ratio}: expected one of them")
        if self.state_ratio is not None and self.total_gib is None:
            raise ValueError(f"store.state_ratio={self.state_ratio}: expected store.total_gib too, which it splits")

    @property
    def pools_gib(self) -> tuple[float | None, float | None]:
        """Budgets of KV and of states in GiB; None: no limit."""
        if self.state_ratio is None or self.total_gib is None:
            return self.kv_gib, self.state_gib
        return self.total_gib / (1 + self.state_ratio), self.total_gib * self.state_ratio / (1 + self.state_ratio)


@dataclass
class ExecutorSettings:
    """The executor of the arms.

    `kind`     local: worker processes of this machine; here: this process; dask: workers of a Dask scheduler
    `address`  tcp://HOST:PORT of the scheduler; dask only
    """

    kind: str = "local"
    address: str | None = None

    def __post_init__(self) -> None:
        one_of("executor.kind", self.kind, ("local", "here", "dask"))
        scheduler = "expected the scheduler's tcp://HOST:PORT"
        if self.kind != "dask" and self.address is not None:
            raise ValueError(f"executor.address={self.address} with executor.kind={self.kind}: expected executor=dask")
        if self.kind == "dask" and "://" not in (self.address or ""):
            raise ValueError(f"executor.address={self.address} with executor.kind=dask: {scheduler}")
