"""Settings of the entry `tail_replay`: models, and gaps between a state and the end of the resident KV."""

from __future__ import annotations

from dataclasses import dataclass, field

from spanlab.registry import not_negative, positive
from spanlab.settings.probe import TaskSettings
from spanlab.settings.server import OutputSettings


@dataclass
class TailReplay:
    """Measure the predictions of hybrids whose KV reaches deeper than the state, by method of recovery.

    `weights`    folders of trained probes
    `groups`     groups of four layers of random models; [] for none
    `scores`     standard deviations of attention scores of random models; 1 is what transformers draws
    `task`       training task of the probes; its sequences are the prompts
    `documents`  documents of a prompt, whose KV is resident to their end
    `tokens`     tokens of a document
    `facts`      facts of a document
    `gaps`       tokens between the state and the end of KV
    `sequences`  prompts
    `models`     models to count FLOPs of: choices of conf/model
    `contexts`   prompt tokens before the gap, for the FLOP counts
    `seed`       seed of random weights and prompts
    `threads`    threads of torch
    `output`     the run folder
    """

    weights: list[str] = field(default_factory=list)
    groups: list[int] = field(default_factory=lambda: [1, 2, 4])
    scores: list[float] = field(default_factory=lambda: [1.0, 4.0])
    task: TaskSettings = field(default_factory=TaskSettings)
    documents: int = 6
    tokens: int = 60
    facts: int = 5
    gaps: list[int] = field(default_factory=lambda: [16, 64, 256])
    sequences: int = 32
    models: list[str] = field(default_factory=lambda: ["qwen3.5-0.8b", "qwen3.5-27b", "qwen3.5-35b-a3b"])
    contexts: list[int] = field(default_factory=lambda: [4096, 32768, 131072])
    seed: int = 0
    threads: int = 1
    output: OutputSettings = field(default_factory=OutputSettings)

    def __post_init__(self) -> None:
        for key in ("documents", "facts", "threads"):
            positive(key, getattr(self, key))
        for key in ("groups", "scores", "contexts"):
            for value in getattr(self, key):
                positive(key, value)
        not_negative("seed", self.seed)
        self._check_sources()
        self._check_prompts()
        self.output.refuse_resuming()

    def _check_sources(self) -> None:
        if not (self.weights or self.groups):
            raise ValueError("groups=[]: expected groups of random models, or folders of trained ones as weights")
        if bool(self.groups) != bool(self.scores):
            raise ValueError(f"scores={self.scores}: expected [] where groups=[], one score or more elsewhere")

    def _check_prompts(self) -> None:
        if self.sequences < 2:
            raise ValueError(f"sequences={self.sequences}: expected 2 or more, for intervals are over sequences")
        least, prompt = 1 + 2 * self.facts, self.documents * self.tokens
        if self.tokens < least:
            raise ValueError(f"tokens={self.tokens}: expected {least} or more, for facts={self.facts}")
        self.task.check_facts(self.documents * self.facts)
        if not self.gaps:
            raise ValueError("gaps=[]: expected one gap or more")
        for gap in self.gaps:
            if not 1 <= gap < prompt:
                raise ValueError(f"gaps={gap}: expected 1 to {prompt - 1} tokens, less than documents x tokens")
