"""The benchmark of position-independent caching on the real engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from spanlab.checks import not_negative, one_of, positive
from spanlab.evaluation.fresh_text import DOCUMENT_WORDS, MOST_DOCUMENTS
from spanlab.settings.arms import Strategy
from spanlab.settings.bench import BenchEngine, check_arms, chosen, several
from spanlab.settings.study import OutputSettings, TrackingSettings

OUTPUTS = ("speedup", "latency", "hit_rate", "iqr", "json", "accuracy", "agreement")
TIMED = ("speedup", "latency", "hit_rate", "iqr", "json")
JUDGED = ("accuracy", "agreement")


@dataclass
class QualitySettings:
    """Questions of outputs accuracy and agreement: fictional alias chains, each over 2 + `distractors` documents.

    `questions`      number of questions
    `words`          words per document
    `distractors`    documents of a prompt that do not contribute to the answer
    `output_tokens`  most tokens of an answer
    """

    questions: int = 16
    words: int = 50
    distractors: int = 2
    output_tokens: int = 16

    def __post_init__(self) -> None:
        for key in ("questions", "words", "output_tokens"):
            positive(f"quality.{key}", getattr(self, key))
        not_negative("quality.distractors", self.distractors)


@dataclass
class JudgeSettings:
    """A model behind an OpenAI-compatible endpoint that scores answers too, where `base_url` is given.

    See `spanlab.evaluation.judge.JudgeOptions`.

    `base_url`          address of the endpoint; empty: no judge
    `model`             the model's name there
    `asks`              score: a number from 0 to 100; correct: yes or no
    `timeout_s`         seconds per question
    `api_key_variable`  name of the environment variable that holds the key; empty: none
    """

    base_url: str = ""
    model: str = ""
    asks: str = "score"
    timeout_s: float = 60.0
    api_key_variable: str = ""


@dataclass
class PicBench:
    """Documents of several sizes: one cold request, then requests with the same documents in other orders.

    `models`          models to run
    `sizes`           document lengths to run, by name
    `full`            run `full_models` and every size
    `full_models`     models of a full run with random weights
    `engine`          with weights=hub `models` are repositories, with path one model in its folder; threads null is
                      one per core that this process may use
    `seed`            of texts and orders
    `tokenizer`       a folder; null is the built-in one with random weights, else the model's own
    `documents`       documents per prompt
    `trials`          times that fresh documents are drawn; each begins with one cold request
    `repeats`         warm requests per trial, the documents in shuffled order
    `question_words`  words of the question; 56 with the chat template are 64 fresh tokens
    `output_tokens`   tokens to generate per request
    `token_budget`    most tokens of one step
    `prepare`         every document is computed alone before the first request; its cost is reported apart
    `arms`            arms by name
    `only`            names of the arms to run; empty: all
    `baseline`        the arm that keeps nothing; every other is compared with it
    `outputs`         speedup, latency, hit_rate and iqr choose columns, json prints the summary instead of the table,
                      accuracy and agreement ask alias chains
    `quality`         questions of accuracy and agreement
    `judge`           a model that scores answers
    `output`          where the run is written
    `tracking`        experiment tracking
    """

    models: list[str] = field(default_factory=lambda: ["tiny"])
    sizes: list[str] = field(default_factory=lambda: list(DOCUMENT_WORDS))
    full: bool = False
    full_models: list[str] = field(default_factory=lambda: ["tiny", "tiny-qwen2", "tiny-qwen3", "tiny-mistral"])
    engine: BenchEngine = field(default_factory=BenchEngine)
    seed: int = 0
    tokenizer: str | None = None
    documents: int = 4
    trials: int = 3
    repeats: int = 5
    question_words: int = 56
    output_tokens: int = 1
    token_budget: int = 8192
    prepare: bool = False
    arms: dict[str, Strategy] = field(default_factory=dict)
    only: list[str] = field(default_factory=list)
    baseline: str = "none"
    outputs: list[str] = field(default_factory=lambda: ["speedup", "latency", "hit_rate", "iqr"])
    quality: QualitySettings = field(default_factory=QualitySettings)
    judge: JudgeSettings = field(default_factory=JudgeSettings)
    output: OutputSettings = field(default_factory=OutputSettings)
    tracking: TrackingSettings = field(default_factory=TrackingSettings)

    def __post_init__(self) -> None:
        for size in several("sizes", self.sizes):
            one_of("sizes", size, DOCUMENT_WORDS)
        for output in several("outputs", self.outputs):
            one_of("outputs", output, OUTPUTS)
        for key in ("documents", "trials", "repeats", "question_words", "output_tokens", "token_budget"):
            positive(key, getattr(self, key))
        if self.documents > MOST_DOCUMENTS:
            raise ValueError(f"documents={self.documents}: expected 1 to {MOST_DOCUMENTS}")
        not_negative("seed", self.seed)
        if self.judge.base_url and "accuracy" not in self.outputs:
            raise ValueError(f"judge.base_url with outputs={self.outputs}: expected accuracy among them")
        self._check_models()
        self._check_arms()

    def _check_models(self) -> None:
        several("models", self.models)
        several("full_models", self.full_models)
        if self.engine.weights == "path" and len(self.swept_models) > 1:
            raise ValueError(f"models={self.swept_models} with engine.weights=path: expected one model, in that folder")

    def _check_arms(self) -> None:
        check_arms(self.arms, self.only, self.baseline)
        for name, arm in self.arms.items():
            if arm.placement.places:
                raise ValueError(
                    f"arms.{name}.placement.kind={arm.placement.kind}: expected none, as in attention models"
                )

    def chosen(self) -> list[str]:
        """Names of the arms to run, the baseline first, then in the order in which they are set."""
        return chosen(self.arms, self.only, self.baseline)

    @property
    def swept_models(self) -> list[str]:
        """The models of this run; stored weights have no family of models to sweep."""
        return self.full_models if self.full and self.engine.weights == "random" else self.models

    @property
    def swept_sizes(self) -> list[str]:
        """The sizes of this run, short to long."""
        return [size for size in DOCUMENT_WORDS if self.full or size in self.sizes]
