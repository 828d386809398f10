"""Settings of additional runs of a study at other loads."""

from __future__ import annotations

from dataclasses import dataclass, field

from spanlab.checks import check_seeds, positive


@dataclass
class LoadSweep:
    """Additional runs of some arms at other arrival rates, for the figure of queueing delay over load.

    `rates_rps`  additional arrival rates, requests per second; empty: none
    `arms`       names of the arms that run at these rates
    `seeds`      seeds of these runs
    `shares`     loads of all arms instead, as shares of the rate that saturates the baseline, measured first
    """

    rates_rps: list[float] = field(default_factory=list)
    arms: list[str] = field(default_factory=list)
    seeds: list[int] = field(default_factory=lambda: [0])
    shares: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        for rate in self.rates_rps:
            positive("load.rates_rps", rate)
        if len(set(self.rates_rps)) != len(self.rates_rps):
            raise ValueError(f"load.rates_rps={self.rates_rps}: expected different rates")
        check_seeds("load.seeds", self.seeds)
        if self.rates_rps and not self.arms:
            raise ValueError(f"load.rates_rps={self.rates_rps} without load.arms: expected arms, or load.rates_rps=[]")
        for load in self.shares:
            positive("load.shares", load)
        if len(set(self.shares)) != len(self.shares):
            raise ValueError(f"load.shares={self.shares}: expected different shares of saturation")
        if self.shares and self.rates_rps:
            raise ValueError(f"load.rates_rps={self.rates_rps} with load.shares: expected none, shares are loads")
