"""The benchmark of recurrent checkpoints on the real engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from spanlab.checks import REQUIRED, not_negative, positive
from spanlab.settings.arms import Strategy
from spanlab.settings.bench import BenchEngine, check_arms, chosen, several
from spanlab.settings.study import OutputSettings, TrackingSettings
from spanlab_sim.hardware import HardwareSpec


@dataclass
class CheckpointBench:
    """One sequence per length, computed cold; later prompts share its beginning up to `depths` and differ after it.

    `models`        hybrids; with weights=hub repositories, with path one model in its folder
    `engine`        weights and device
    `hardware`      device of the simulator's roofline, shown beside the bound by this machine's measured rates
    `lengths`       prompt tokens, of the sequence and of every later prompt
    `depths`        shares of the length that later prompts have in common with the sequence
    `rounds`        repetitions of all measurements, each with the arms in another order
    `told`          synthetic observations per depth that `dp` gets before the measurement
    `token_budget`  most tokens of one step
    `seed`          of tokens and orders
    `arms`          arms by name
    `only`          names of the arms to run; empty: all
    `baseline`      the arm that keeps nothing; every other is compared with its cold prefill
    `output`        where the run is written
    `tracking`      experiment tracking
    """

    models: list[str] = field(default_factory=lambda: ["tiny-hybrid"])
    engine: BenchEngine = field(default_factory=BenchEngine)
    hardware: HardwareSpec = REQUIRED
    lengths: list[int] = field(default_factory=lambda: [1024, 2048, 4096, 8192])
    depths: list[float] = field(default_factory=lambda: [0.5, 0.95])
    rounds: int = 3
    told: int = 20
    token_budget: int = 8192
    seed: int = 0
    arms: dict[str, Strategy] = field(default_factory=dict)
    only: list[str] = field(default_factory=list)
    baseline: str = "none"
    output: OutputSettings = field(default_factory=OutputSettings)
    tracking: TrackingSettings = field(default_factory=TrackingSettings)

    def __post_init__(self) -> None:
        several("models", self.models)
        for length in several("lengths", self.lengths):
            positive("lengths", length)
        for depth in several("depths", self.depths):
            if not 0 < depth < 1:
                raise ValueError(f"depths={depth}: expected shares of the length above 0 and below 1")
        for key in ("rounds", "token_budget"):
            positive(key, getattr(self, key))
        not_negative("told", self.told)
        not_negative("seed", self.seed)
        self._check_shared()
        if self.engine.weights == "path" and len(self.models) > 1:
            raise ValueError(f"models={self.models} with engine.weights=path: expected one model, in that folder")
        check_arms(self.arms, self.only, self.baseline)

    def _check_shared(self) -> None:
        """Later prompts share something with the sequence, and not all of it; no two depths are one."""
        for length in self.lengths:
            shared = self.shared(length)
            if shared[0] < 1 or shared[-1] >= length or len(set(shared)) < len(shared):
                raise ValueError(f"lengths={length} with depths={self.depths}: expected more tokens, or other shares")

    def shared(self, length: int) -> list[int]:
        """Tokens that later prompts of a length have in common with the sequence, few to many."""
        return sorted(round(depth * length) for depth in self.depths)

    def chosen(self) -> list[str]:
        """Names of the arms to run, the baseline first, then in the order in which they are set."""
        return chosen(self.arms, self.only, self.baseline)
