"""Peak rates of a device, and the assumed share of each that steps reach."""

from __future__ import annotations

from dataclasses import dataclass

from spanlab.checks import not_negative, positive


# Not frozen, because OmegaConf makes a frozen schema read-only and YAML could not extend it; nothing assigns to it.
@dataclass
class HardwareSpec:
    """Data-sheet peaks of one device and the assumed share of each that a step reaches.

    `name`                   the device's name.
    `peak_flops`             dense bf16 matrix FLOPs per second (no sparsity).
    `bandwidth_bytes_per_s`  peak memory bandwidth.
    `memory_gib`             memory in 2^30 bytes, nominal: a server leaves room for weights and workspace.
    `*_efficiency`           reached share of the peak, in (0, 1].
    `host_s`                 seconds that every step costs whatever it computes: scheduling, launches, sampling.
    """

    name: str = ""
    peak_flops: float = 0.0
    bandwidth_bytes_per_s: float = 0.0
    memory_gib: float = 0.0
    compute_efficiency: float = 0.6
    bandwidth_efficiency: float = 0.8
    host_s: float = 0.002

    def __post_init__(self) -> None:
        for key in ("peak_flops", "bandwidth_bytes_per_s", "memory_gib"):
            positive(f"hardware.{key}", getattr(self, key))
        for key in ("compute_efficiency", "bandwidth_efficiency"):
            if not 0 < getattr(self, key) <= 1:
                raise ValueError(f"hardware.{key}={getattr(self, key)}: expected a share above 0 and up to 1")
        not_negative("hardware.host_s", self.host_s)

    @property
    def flops_per_s(self) -> float:
        """FLOPs per second that a step is assumed to reach."""
        return self.peak_flops * self.compute_efficiency

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second that a step is assumed to move."""
        return self.bandwidth_bytes_per_s * self.bandwidth_efficiency
