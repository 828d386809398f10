"""Settings of the three programs: training of the probe, its answers, and recovery of its states."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from spanlab.registry import REQUIRED, not_negative, one_of, positive, share
from spanlab.settings.server import OutputSettings

# ------------------------------------------------------------------------------
# Settings of the probe, a small trained hybrid: its task, its training and the comparison of
# its answers.
# ------------------------------------------------------------------------------

SPECIAL = 2  # token ids before the first key: the start of a document, and of a question


@dataclass
class TaskSettings:
    """Recall of facts: documents of key-value pairs among filler tokens, then keys whose latest value is the answer.

    `vocabulary`  token ids; all that are no key, value or mark are filler
    `keys`        token ids that are keys
    `values`      token ids that are values, answered at random with probability 1 / `values`
    `updated`     share of the facts of a second or later document that give a key of an earlier one another value
    `questions`   questions after the documents, one key each
    """

    vocabulary: int = 600
    keys: int = 200
    values: int = 200
    updated: float = 0.3
    questions: int = 8

    def __post_init__(self) -> None:
        for key in ("keys", "values", "questions"):
            positive(f"task.{key}", getattr(self, key))
        share("task.updated", self.updated)
        least = SPECIAL + self.keys + self.values + 1
        if self.vocabulary < least:
            raise ValueError(
                f"task.vocabulary={self.vocabulary}: expected {least} or more, for keys, values and filler"
            )

    def check_facts(self, facts: int, purpose: str = "all facts") -> None:
        """Raise ValueError for fewer keys or values than one sequence may need."""
        if min(self.keys, self.values) < facts:
            raise ValueError(f"task.keys={self.keys}: expected {facts} keys and values or more, for {purpose}")


@dataclass
class ProbeModel:
    """Sizes of the probe: groups of three GatedDeltaNet layers and one of attention.

    `groups`     groups of four layers
    `hidden`     width of the residual stream, and of the MLP
    `heads`      heads of every layer
    `head_dim`   width of a head of either kind
    """

    groups: int = 2
    hidden: int = 128
    heads: int = 2
    head_dim: int = 48

    def __post_init__(self) -> None:
        for key in ("groups", "hidden", "heads", "head_dim"):
            positive(f"model.{key}", getattr(self, key))


@dataclass
class TrainProbe:
    """Train the probe and write its weights to the run folder.

    `task`           the training task
    `model`          sizes of the probe
    `start`          folder of initial weights; null: random weights
    `steps`          training steps
    `batch_tokens`   most tokens of a step
    `learning_rate`  peak learning rate of AdamW
    `warm_up`        share of the steps in which the learning rate rises; it falls to zero over the last `decay` of them
    `decay`          share of the steps in which the learning rate falls
    `documents`      most documents of a sequence
    `curriculum`     share of the steps over which the most documents rise from one
    `shortest`       least tokens of a document
    `longest`        most tokens of a document
    `fewest_facts`   least facts of a document
    `most_facts`     most facts of a document
    `hidden_kv`      share of the steps in which questions do not attend to the documents' KV
    `isolated`       share of the steps in which every document is encoded alone and states are composed
    `empty_state`    share of the steps in which documents are encoded alone and questions read only their KV
    `every`          steps between two measurements of loss and accuracy
    `seed`           seed of weights, sequences and order
    `threads`        threads of torch
    `output`         the run folder
    """

    task: TaskSettings = field(default_factory=TaskSettings)
    model: ProbeModel = field(default_factory=ProbeModel)
    start: str | None = None
    steps: int = 300
    batch_tokens: int = 2048
    learning_rate: float = 6e-3
    warm_up: float = 0.05
    decay: float = 0.3
    documents: int = 6
    curriculum: float = 0.5
    shortest: int = 13
    longest: int = 60
    fewest_facts: int = 4
    most_facts: int = 6
    hidden_kv: float = 0.35
    isolated: float = 0.0
    empty_state: float = 0.0
    every: int = 10
    seed: int = 0
    threads: int = 1
    output: OutputSettings = field(default_factory=OutputSettings)

    def __post_init__(self) -> None:
        for key in ("steps", "batch_tokens", "learning_rate", "documents", "fewest_facts", "every", "threads"):
            positive(key, getattr(self, key))
        for key in ("warm_up", "decay", "curriculum", "hidden_kv", "empty_state", "isolated"):
            share(key, getattr(self, key))
        if (total := self.hidden_kv + self.isolated + self.empty_state) > 1 + 1e-9:
            raise ValueError(f"hidden_kv + isolated + empty_state={total:g}: expected at most 1, for each step is one")
        self.output.refuse_resuming()
        not_negative("seed", self.seed)
        if self.most_facts < self.fewest_facts:
            raise ValueError(f"most_facts={self.most_facts}: expected fewest_facts={self.fewest_facts} or more")
        least = 1 + 2 * self.most_facts
        if not least <= self.shortest <= self.longest:
            raise ValueError(f"shortest={self.shortest}: expected {least}, for most_facts, to longest={self.longest}")
        self.task.check_facts(1 + self.documents * self.most_facts)


@dataclass
class NormSettings:
    """Norms of the transitions of spans, by layer and head.

    `lengths`    tokens of a span
    `spans`      spans of each length
    `tokens`     task: documents of the task; random: token ids at random, for a model of another vocabulary
    `published`  whether to measure weights as transformers initialises them too
    `slow`       whether to measure weights with slow decay too
    """

    lengths: list[int] = field(default_factory=lambda: [32, 128, 512])
    spans: int = 8
    tokens: str = "task"
    published: bool = True
    slow: bool = True

    def __post_init__(self) -> None:
        for length in self.lengths:
            positive("norms.lengths", length)
        positive("norms.spans", self.spans)
        one_of("norms.tokens", self.tokens, ("task", "random"))


@dataclass
class HybridAnswers:
    """Compare the answers of a trained probe when documents are encoded separately and states are composed.

    `weights`    folder of a trained probe, as transformers saves it; or a hub model, for `norms` only
    `task`       the task of its training
    `cases`      documents x tokens of each: 4x31
    `facts`      facts of a document
    `sequences`  sequences of each case
    `ranks`      ranks of A - γ I that are stored
    `drop`       spectral norms of A up to which a head's A is dropped
    `repaired`   first tokens of each document that are recomputed with all earlier tokens in view
    `separator`  start marks before each document; 0: no such arms
    `norms`      settings of the table of norms
    `seed`       seed of the sequences
    `batch`      sequences per forward pass
    `threads`    threads of torch
    `output`     the run folder
    """

    weights: str = REQUIRED
    task: TaskSettings = field(default_factory=TaskSettings)
    cases: list[str] = field(default_factory=lambda: ["4x31", "6x41", "8x41", "4x121"])
    facts: int = 5
    sequences: int = 128
    ranks: list[int] = field(default_factory=lambda: [2, 4, 8])
    drop: list[float] = field(default_factory=lambda: [0.1, 0.3])
    repaired: list[int] = field(default_factory=lambda: [4, 8])
    separator: int = 3
    norms: NormSettings = field(default_factory=NormSettings)
    seed: int = 1000
    batch: int = 16
    threads: int = 1
    output: OutputSettings = field(default_factory=OutputSettings)

    def __post_init__(self) -> None:
        for key in ("facts", "batch", "threads"):
            positive(key, getattr(self, key))
        if self.sequences < 2:
            raise ValueError(f"sequences={self.sequences}: expected 2 or more, for intervals are over sequences")
        for rank in self.ranks:
            positive("ranks", rank)
        for norm in self.drop:
            if not 0 < norm < 1:
                raise ValueError(f"drop={norm}: expected norms above 0 and below 1, which no transition exceeds")
        not_negative("separator", self.separator)
        not_negative("seed", self.seed)
        self.output.refuse_resuming()
        for case in self.cases:
            self._check_case(case)
        if self.norms.tokens == "task":
            for length in self.norms.lengths:
                self._check_case(f"1x{length}", "norms.lengths")

    def _check_case(self, case: str, key: str = "cases") -> None:
        documents, tokens = parse_case(case)
        least = 1 + 2 * self.facts
        if documents < 1 or tokens < least:
            raise ValueError(f"{key}={case}: expected one document or more, of {least} tokens or more for its facts")
        self.task.check_facts(documents * self.facts, f"cases={case}")
        for repaired in self.repaired:
            if key == "cases" and not 0 < repaired < tokens:
                raise ValueError(f"repaired={repaired}: expected 1 to {tokens - 1}, a part of a document of {case}")


def parse_case(case: str) -> tuple[int, int]:
    """Parse a case such as 4x31: the number of documents, and the tokens of each."""
    documents, _, tokens = case.partition("x")
    if not (documents.isdecimal() and tokens.isdecimal()):
        raise ValueError(f"cases={case}: expected documents x tokens, such as 4x31")
    return int(documents), int(tokens)


def check_weights(key: str, folder: str) -> None:
    """Raise ValueError for a folder without a model."""
    if not (Path(folder) / "config.json").is_file():
        raise ValueError(f"{key}={folder}: expected a folder with a config.json and weights")


# ------------------------------------------------------------------------------
# Settings of the entry `tail_replay`: models, and gaps between a state and the end of the
# resident KV.
# ------------------------------------------------------------------------------


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
