"""What runs where, when it runs for real."""

from __future__ import annotations

from dataclasses import dataclass

from spanlab.checks import not_negative, one_of, positive

BACKENDS = ("sim", "engine")
CLOCKS = ("virtual", "wall")
RECORDS = ("nothing", "tokens", "first_logits", "logits")


@dataclass
class EngineSettings:
    """The model that `backend=engine` runs; its sizes are those of the study's `model`, and are checked against it.

    `name`         a built-in model or, with weights=hub, a repository; the study's `model.name` where null
    `weights`      random (for timing), hub, or path
    `path`         folder of the model; weights=path only
    `device`       cpu, cuda or cuda:N; auto: cuda if there is one, else cpu
    `seed`         of random weights and of sampling
    `temperature`  0 is greedy
    `threads`      threads of torch on the CPU; null: torch's choice
    `clock`        virtual: steps last as measured and idle time is skipped; wall: requests arrive in real time
    `record`       what a run keeps of its outputs: nothing, tokens, first_logits (of each request), or logits (of all)
    `teacher`      arm whose outputs all arms are given token by token (teacher forcing); null: each has its own
    """

    name: str | None = None
    weights: str = "random"
    path: str | None = None
    device: str = "auto"
    seed: int = 0
    temperature: float = 0.0
    threads: int | None = None
    clock: str = "virtual"
    record: str = "nothing"
    teacher: str | None = None

    def __post_init__(self) -> None:
        one_of("engine.weights", self.weights, ("random", "hub", "path"))
        one_of("engine.clock", self.clock, CLOCKS)
        one_of("engine.record", self.record, RECORDS)
        if self.teacher is not None and self.record == "nothing":
            raise ValueError(f"engine.teacher={self.teacher} with engine.record=nothing: expected tokens or logits")
        not_negative("engine.temperature", self.temperature)
        positive("engine.threads", self.threads)
        if (self.path is not None) != (self.weights == "path"):
            raise ValueError(
                f"engine.path={self.path} with engine.weights={self.weights}: expected both or neither path"
            )
