"""Settings of the entry `export`, which writes a workload with its arrival times for other tools."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from spanlab.checks import REQUIRED, not_negative, one_of, positive
from spanlab.plugins import located
from spanlab.settings.workload import ArrivalSettings
from spanlab.workloads.load import WorkloadSettings
from spanlab.workloads.writers.formats import WRITERS


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
