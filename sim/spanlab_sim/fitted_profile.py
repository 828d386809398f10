"""The profile fitted to a server's log: parameters with intervals, and the deployment that they belong to."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import orjson

from spanlab.checks import positive
from spanlab.model_spec import ModelSpec
from spanlab.typed_json import from_json, reading
from spanlab_sim.deployment import Deployment
from spanlab_sim.hardware import HardwareSpec


@dataclass(frozen=True)
class Rates:
    """The parameters of `FittedTiming`; shares are of the data sheet's peaks and may exceed 1 where it is modest.

    `compute`                share of the peak FLOPs per second
    `bandwidth`              share of the peak bytes per second
    `host_s`                 seconds that every step costs whatever it computes
    `host_s_per_sequence`    further seconds per sequence of the step
    `host_s_with_prefill`    further seconds of a step with prompt tokens, which runs outside the graph of decodes
    `experts`                share of `compute` that experts' matrices reach
    `routing`                share of the step's tokens that choose experts independently: routers prefer some experts
    `collective_s`           seconds that a collective takes whatever it moves
    `link_bytes_per_s`       bytes per second between two devices
    """

    compute: float
    bandwidth: float
    host_s: float
    host_s_per_sequence: float = 1e-5
    host_s_with_prefill: float = 2e-3
    experts: float = 0.7
    routing: float = 0.5
    collective_s: float = 2e-5
    link_bytes_per_s: float = 2.5e10

    @classmethod
    def assumed(cls, hardware: HardwareSpec) -> Rates:
        """Return the rates assumed for a device without a log, where a fit starts."""
        return cls(hardware.compute_efficiency, hardware.bandwidth_efficiency, hardware.host_s)


def names_for(model: ModelSpec, deployment: Deployment) -> tuple[str, ...]:
    """Return the names of the parameters that a model with this deployment depends on."""
    always = ("compute", "bandwidth", "host_s", "host_s_per_sequence", "host_s_with_prefill")
    experts = ("experts", "routing") if model.expert_layers else ()
    return always + experts + (("collective_s", "link_bytes_per_s") if deployment.devices > 1 else ())


@dataclass(frozen=True)
class Parameter:
    """One fitted number with its 95 % interval; without identification by the log, it keeps its start value."""

    value: float
    low: float
    high: float
    identified: bool


@dataclass(frozen=True)
class FittedProfile:
    """A server's parameters, as fitted to its log.

    `model`, `hardware`  names
    `deployment`         devices and number formats
    `parameters`         by the name of a field of `Rates`
    `unseen`             errors on requests outside the fit: by metric and kind; None without such requests
    `log`, `commit`      source of the fit
    """

    model: str
    hardware: str
    deployment: Deployment
    parameters: dict[str, Parameter]
    unseen: dict[str, dict[str, float | None]]
    log: str
    commit: str

    def rates(self, hardware: HardwareSpec) -> Rates:
        """Return the fitted values; parameters that the deployment does not depend on are as assumed."""
        return Rates(
            **asdict(Rates.assumed(hardware)) | {name: parameter.value for name, parameter in self.parameters.items()}
        )

    def write(self, path: Path) -> None:
        """Write the profile as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(orjson.dumps(asdict(self), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


def read_fitted(path: Path) -> FittedProfile:
    """Read a profile; raises ValueError with one sentence for an invalid file."""
    with reading(f"timing.profile={path}", "a profile as the entry twin writes it"):
        profile = from_json(path.read_bytes(), FittedProfile)
        for name, parameter in profile.parameters.items():
            if name not in Rates.__dataclass_fields__:
                raise ValueError(f"parameters.{name}: no such key")
            positive(f"parameters.{name}", parameter.value)
        return profile
