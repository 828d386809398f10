"""Settings of the entry `first_light`: commands for the first hour on a GPU, each with a time limit."""

from __future__ import annotations

from dataclasses import dataclass, field

from spanlab.checks import REQUIRED, one_of, positive
from spanlab.settings.output import OutputSettings

PROGRAMS = ("spanlab", "python", "bash")


@dataclass
class Stage:
    """One command, and the files to keep of its output.

    `command`  a program (spanlab, python or bash) and its arguments; {out} is the stage's folder
    `minutes`  time limit
    `keep`     glob patterns of files below the stage's folder that are copied beside the log
    """

    command: list[str] = REQUIRED
    minutes: float = REQUIRED
    keep: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        one_of("command", self.command[0] if self.command else "", PROGRAMS)
        positive("minutes", self.minutes)


@dataclass
class FirstLight:
    """Run all stages for a new GPU in order, report the stages that fail, and skip finished ones on resume.

    `stages`         commands by name, in order; one of the group `stages`
    `only`           names of the stages to run; empty: all
    `engine_device`  cuda or cpu
    `pic_model`      model of calibration and of `pic_bench`, with random weights
    `answers_model`  hub name of the model that answers, with trained weights
    `minutes`        time limit of all stages together; later stages do not start
    `name`           folder of the results; null: the name of the card
    `cards`          folder of all cards; relative to the repository
    `output`         output folder of the stages; resume continues after finished stages, replace starts again
    """

    stages: dict[str, Stage] = field(default_factory=dict)
    only: list[str] = field(default_factory=list)
    engine_device: str = "cuda"
    pic_model: str = "llama-3.1-8b"
    answers_model: str = "HuggingFaceTB/SmolLM2-1.7B-Instruct"
    minutes: float = 60.0
    name: str | None = None
    cards: str = "benchmarks/cards"
    output: OutputSettings = field(default_factory=OutputSettings)

    def __post_init__(self) -> None:
        one_of("engine_device", self.engine_device, ("cuda", "cpu"))
        one_of("output.if_exists", self.output.if_exists, ("resume", "replace"))
        positive("minutes", self.minutes)
        for name in self.only:
            one_of("only", name, tuple(self.stages))
        if self.name is not None and ("/" in self.name or self.name in ("", ".", "..")):
            raise ValueError(f"name={self.name}: expected the name of one folder")

    @property
    def chosen(self) -> dict[str, Stage]:
        """The stages that run, in order."""
        return {name: stage for name, stage in self.stages.items() if not self.only or name in self.only}
