"""Where a run is written and tracked."""

from __future__ import annotations

from dataclasses import dataclass

from spanlab.checks import one_of


@dataclass
class OutputSettings:
    """Where a run is written: `root`/WORKLOAD/`run`.

    `root`       folder of all runs; relative to the repository
    `run`        folder of this run; empty: the entry with its overrides
    `if_exists`  replace the run, which is kept under its time; resume it; or fail
    `figures`    whether figures are drawn
    `trace`      whether the first run of each arm leaves a trace file for Perfetto: steps, requests, counters
    """

    root: str = "outputs"
    run: str = ""
    if_exists: str = "replace"
    figures: bool = True
    trace: bool = False

    def __post_init__(self) -> None:
        one_of("output.if_exists", self.if_exists, ("replace", "resume", "fail"))
        if "/" in self.run or self.run in (".", ".."):
            raise ValueError(f"output.run={self.run}: expected the name of one folder")

    def refuse_resuming(self) -> None:
        """Refuse to resume a run that writes nothing before it is complete."""
        if self.if_exists == "resume":
            raise ValueError("output.if_exists=resume: expected replace or fail, for this entry writes all at its end")


@dataclass
class TrackingSettings:
    """Experiment tracking.

    `kind`     wandb, or none
    `project`  name of the project
    `mode`     auto: online if the user is logged in, else offline
    """

    kind: str = "wandb"
    project: str = "spanlab"
    mode: str = "auto"

    def __post_init__(self) -> None:
        one_of("tracking.kind", self.kind, ("wandb", "none"))
        one_of("tracking.mode", self.mode, ("auto", "online", "offline"))
