"""Settings of the run folder and of experiment tracking."""

from __future__ import annotations

from dataclasses import dataclass

from spanlab.checks import one_of


@dataclass
class OutputSettings:
    """The run folder: `root`/WORKLOAD/`run`.

    `root`       folder of all runs; relative to the repository
    `run`        name of the run folder; empty: the entry with its overrides
    `if_exists`  an existing run: replace (the old run is renamed to its time stamp), resume or fail
    `figures`    whether figures are drawn
    `trace`      whether the first run of each arm writes a trace file for Perfetto: steps, requests, counters
    """

    root: str = "outputs"
    run: str = ""
    if_exists: str = "replace"
    figures: bool = True
    trace: bool = False

    def __post_init__(self) -> None:
        one_of("output.if_exists", self.if_exists, ("replace", "resume", "fail"))
        if "/" in self.run or self.run.startswith((".", "-")):
            raise ValueError(f"output.run={self.run}: expected the name of one folder, without . or - in front")

    def refuse_resuming(self) -> None:
        """Raise ValueError for `resume` in an entry that writes only complete runs."""
        if self.if_exists == "resume":
            raise ValueError(
                "output.if_exists=resume: expected replace or fail, for this entry writes only complete runs"
            )


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
