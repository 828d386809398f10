"""Settings of entries that run no study, and the schemas of all entries and config groups."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from spanlab.core.admission import BatchRules
from spanlab.core.tiers import TierRules
from spanlab.engine.settings import EngineSettings, dtype_of
from spanlab.model_spec import HardwareSpec, ModelSpec
from spanlab.plugins import located
from spanlab.registry import REQUIRED, Registry, not_negative, one_of, positive
from spanlab.settings.arms import Strategy
from spanlab.settings.server import (
    ArrivalSettings,
    ExecutorSettings,
    OutputSettings,
    StoreSettings,
    TimingSettings,
    TrackingSettings,
)
from spanlab.settings.study import Study
from spanlab.workloads.load import WorkloadSettings
from spanlab.workloads.workload import WORKLOADS
from spanlab.workloads.writers import WRITERS

if TYPE_CHECKING:
    from spanlab.study.conformance import Measurement


# ------------------------------------------------------------------------------
# Settings of the entry `export`, which writes a workload with its arrival times for other
# tools.
# ------------------------------------------------------------------------------


@dataclass
class WriterSettings:
    """Format and path of the exported file.

    `format`        mooncake: milliseconds, lengths, ids of blocks; guidellm: likewise, seconds; openai: requests
    `path`          the file; it must not exist
    `block_size`    tokens per block; mooncake and guidellm only; null: 512
    `prompts`       tokens: ids; text; messages: one message of a user; openai only; null: tokens
    `tokenizer`     decodes prompts: tokenizer.json, its folder, a packaged model, or a hub name; openai only
    `served_model`  name of the model in each request; openai only; null: none
    `options`       options of a writer from a plugin, by name
    """

    format: str = REQUIRED
    path: str = REQUIRED
    block_size: int | None = None
    prompts: str | None = None
    tokenizer: str | None = None
    served_model: str | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        one_of("writer.format", self.format, WRITERS)
        positive("writer.block_size", self.block_size)
        WRITERS.check("writer", self.format, self.keys, self.options, f"format={self.format}")

    @property
    def keys(self) -> dict[str, Any]:
        """Options that are keys of this schema."""
        return {key: value for key, value in vars(self).items() if key not in ("format", "path", "options")}


@dataclass
class Export:
    """Write a workload with its arrival times for other tools; docs/replay.md describes the formats.

    `workload`    the requests
    `arrivals`    the arrival process
    `seed`        seed of arrivals and popularity, as in a study
    `vocab_size`  token ids are folded below this number, for prompts of token ids; null: unchanged ids
    `writer`      format and path of the file
    `plugins`     Python files (mine.py) or modules to import, which register further names
    """

    workload: WorkloadSettings = REQUIRED
    arrivals: ArrivalSettings = REQUIRED
    seed: int = 0
    vocab_size: int | None = None
    writer: WriterSettings = REQUIRED
    plugins: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        not_negative("seed", self.seed)
        positive("vocab_size", self.vocab_size)
        self.plugins = [located(name) for name in self.plugins]
        if self.arrivals.clients is not None:
            raise ValueError(
                f"arrivals.clients={self.arrivals.clients}: expected arrivals with times, for a closed loop has none"
            )
        if self.vocab_size is not None and self.writer.format != "openai":
            raise ValueError(f"vocab_size={self.vocab_size} with writer.format={self.writer.format}: expected openai")


@dataclass
class MakeShape:
    """Measure the shape of a workload from its text, and write the shape without the text.

    `kind`            as `workload.kind`
    `path`            the text: file or folder
    `out`             the shape: a file, or a folder for NAME.npz
    `tokenizer`       a tokenizer.json or its folder; null for a trace
    `queries_path`    user queries; system_prompts only
    `questions_path`  table of questions; narrativeqa only
    `words_path`      table of document lengths; narrativeqa only
    """

    kind: str = REQUIRED
    path: str = REQUIRED
    out: str = REQUIRED
    tokenizer: str | None = None
    queries_path: str | None = None
    questions_path: str | None = None
    words_path: str | None = None

    def __post_init__(self) -> None:
        local = f"{self.kind}/local"
        if self.tokenizer is None and (local not in WORKLOADS or WORKLOADS.takes(local, "tokenizer")):
            raise ValueError(f"tokenizer is not set with kind={self.kind}: expected a tokenizer.json, or its folder")


@dataclass
class Compare:
    """Compare finished runs: the differences of each arm with intervals, and the settings that differ.

    `runs`    folders of finished studies; the others are compared with the first
    `output`  output folder of the comparison
    """

    runs: list[str] = REQUIRED
    output: OutputSettings = field(default_factory=OutputSettings)

    def __post_init__(self) -> None:
        if len(self.runs) < 2:
            raise ValueError(f"runs={self.runs}: expected two folders or more")


@dataclass
class Schedule:
    """Run the scheduler on given requests, and write its decisions step by step.

    `cases`   JSON file of requests by case
    `out`     JSON file of decisions by case
    `preset`  the scheduler to use: vllm_0_32
    """

    cases: str = REQUIRED
    out: str = REQUIRED
    preset: str = "vllm_0_32"


def schemas() -> dict[tuple[str | None, str], type[Any]]:
    """Return every schema by (config group, name), for the ConfigStore."""
    return {
        (None, "base_study"): Study,
        (None, "base_make_shape"): MakeShape,
        (None, "base_schedule"): Schedule,
        (None, "base_compare"): Compare,
        (None, "base_export"): Export,
        ("model", "base_model"): ModelSpec,
        ("hardware", "base_hardware"): HardwareSpec,
        ("workload", "base_workload"): WorkloadSettings,
        ("arrivals", "base_arrivals"): ArrivalSettings,
        ("timing", "base_timing"): TimingSettings,
        ("batch", "base_batch"): BatchRules,
        ("store", "base_store"): StoreSettings,
        ("strategy", "base_strategy"): Strategy,
        ("tier", "base_tier"): TierRules,
        ("tracking", "base_tracking"): TrackingSettings,
        ("executor", "base_executor"): ExecutorSettings,
    }


# ------------------------------------------------------------------------------
# Settings of the entry `conformance`: the model, its properties and the test prompts.
# ------------------------------------------------------------------------------

#: Functions of a served model that return a measurement; `spanlab.study.conformance.verdicts` describes it.
PROPERTIES: Registry[Measurement] = Registry("properties", given=("subject",))
PROPERTIES.later("greedy_generation", "spanlab.study.conformance")
PROPERTIES.later("prefix_reuse", "spanlab.study.conformance")
PROPERTIES.later("chunked_prefill", "spanlab.study.conformance")
PROPERTIES.later("preemption", "spanlab.study.conformance")
PROPERTIES.later("tenant_isolation", "spanlab.study.conformance")
PROPERTIES.later("copy_on_write", "spanlab.study.conformance")
PROPERTIES.later("span_reuse", "spanlab.study.conformance")
PROPERTIES.later("state_depth", "spanlab.study.conformance")
PROPERTIES.later("map_composition", "spanlab.study.conformance")

_UNREAD = {"clock": "virtual", "record": "nothing", "teacher": None, "temperature": 0.0}


@dataclass
class Conformance:
    """Check on a few prompts that reuse does not change a model's output: one verdict per property.

    `model`            the model's sizes
    `engine`           the model; its clock, record, teacher and temperature are not set
    `properties`       properties to check; empty: all
    `prompts`          prompts of each property
    `output_tokens`    tokens that each prompt generates
    `documents`        documents of a prompt
    `document_tokens`  most tokens of a document
    `output`           where the run is written
    """

    model: ModelSpec = REQUIRED
    engine: EngineSettings = field(default_factory=EngineSettings)
    properties: list[str] = field(default_factory=list)
    prompts: int = 4
    output_tokens: int = 16
    documents: int = 3
    document_tokens: int = 48
    output: OutputSettings = field(default_factory=OutputSettings)

    def __post_init__(self) -> None:
        for key in ("documents", "output_tokens"):
            positive(key, getattr(self, key))
        if self.prompts < 2:
            raise ValueError(f"prompts={self.prompts}: expected 2 or more, for later prompts reuse earlier ones")
        if self.document_tokens < 2:
            raise ValueError(f"document_tokens={self.document_tokens}: expected 2 or more")
        for name in self.properties:
            one_of("properties", name, PROPERTIES)
        for key, only in _UNREAD.items():
            if (value := getattr(self.engine, key)) != only:
                expected = "null" if only is None else only
                raise ValueError(f"engine.{key}={value}: expected {expected}, for this entry chooses its own")
        self.output.refuse_resuming()
        dtype_of(self.model)

    @property
    def chosen(self) -> list[str]:
        """Names of the properties to check, in the order of the registry."""
        return [name for name in PROPERTIES if not self.properties or name in self.properties]


# ------------------------------------------------------------------------------
# Settings of the entry `first_light`: commands for the first hour on a GPU, each with a time
# limit.
# ------------------------------------------------------------------------------

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
