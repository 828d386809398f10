"""The entry `export`: write a workload's requests with their arrival times to a file, one line
each."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from spanlab.build import build_workload
from spanlab.core.request import Request
from spanlab.engine.settings import remap_tokens
from spanlab.registry import REQUIRED, entry, located, not_negative, one_of, positive
from spanlab.study.jobs import build_arrivals
from spanlab.workloads import Workload
from spanlab.workloads.load import WorkloadSettings
from spanlab.workloads.writers import HASHED, SESSIONS, WRITERS, SessionWriter
from spanlab_sim.arrivals import Arrivals


@dataclass
class WriterSettings:
    """Format and path of the exported file.

    `format`        mooncake: milliseconds, lengths, ids of blocks; guidellm: likewise, seconds;
                    openai: requests; with arrivals=sessions aiperf, weka (for GuideLLM) and dynamo:
                    sessions with their waits
    `path`          the file; it must not exist
    `block_size`    tokens per block; not openai; null: 512, of weka 64
    `prompts`       tokens: ids; text; messages: one message of a user; openai only; null: tokens
    `tokenizer`     decodes prompts: tokenizer.json, its folder, a packaged model, or a hub name;
                    openai only
    `served_model`  name of the model in each request; openai and dynamo only; null: none
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
        WRITERS.check(
            "writer.options", self.format, f"writer.format={self.format}", self.options, self.keys
        )

    @property
    def keys(self) -> dict[str, Any]:
        """Options that are keys of this schema."""
        return {
            key: value
            for key, value in vars(self).items()
            if key not in ("format", "path", "options")
        }


@dataclass
class Export:
    """Write a workload with its arrival times for other tools; docs/replay.md describes the
    formats.

    `workload`    the requests
    `arrivals`    the arrival process
    `seed`        seed of arrivals and popularity, as in a study
    `vocab_size`  token ids are folded below this number, for prompts of token ids; null: unchanged
                  ids
    `writer`      format and path of the file
    `anonymise`   refuse writers of tokens or texts: the file has lengths, times and numbers of
                  equal blocks alone
    `plugins`     Python files (mine.py) or modules to import, which register further names
    """

    workload: WorkloadSettings = REQUIRED
    arrivals: Arrivals = REQUIRED
    seed: int = 0
    vocab_size: int | None = None
    writer: WriterSettings = REQUIRED
    anonymise: bool = False
    plugins: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        not_negative("seed", self.seed)
        positive("vocab_size", self.vocab_size)
        self.plugins = [located(name) for name in self.plugins]
        if self.arrivals.clients is not None:
            raise ValueError(
                f"arrivals.clients={self.arrivals.clients}: expected arrivals with times, for a closed loop has none"
            )
        if self.anonymise and self.writer.format not in HASHED:
            raise ValueError(
                f"anonymise=true with writer.format={self.writer.format}: expected "
                f"{', '.join(HASHED[:-1])} or {HASHED[-1]}, which write "
                "numbers of equal blocks in place of tokens"
            )
        if self.writer.format in SESSIONS and not self.arrivals.keeps_order:
            raise ValueError(
                f"writer.format={self.writer.format} with other arrivals: expected arrivals=sessions"
            )
        if self.vocab_size is not None and self.writer.format != "openai":
            raise ValueError(
                f"vocab_size={self.vocab_size} with writer.format={self.writer.format}: expected openai"
            )


@entry("export", Export, check=lambda settings, root: arrived_requests(settings, root))
def run_export(settings: Export, run: str, root: Path) -> None:
    """Write the file, and print one line that describes it; `root` is the folder of outputs."""
    path, writer = Path(settings.writer.path), settings.writer
    workload, arrived = arrived_requests(settings, root)
    write = WRITERS.make(writer.format, writer.keys, writer.options)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        for line in write(arrived):
            file.write(
                orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY)
            )
    partial.rename(path)
    tokens = sum(request.num_tokens for request in arrived)
    print(
        f"{path}: {len(arrived):,} requests, {tokens:,} prompt tokens · {workload.provenance.line()}"
    )
    for note in write.notes() if isinstance(write, SessionWriter) else ():
        print(note)


def arrived_requests(settings: Export, root: Path) -> tuple[Workload, list[Request]]:
    """Return the workload and its requests with times; ValueError for a file that exists, or
    without times."""
    if Path(settings.writer.path).exists():
        raise ValueError(
            f"writer.path={settings.writer.path}: the file exists; expected a new name"
        )
    workload = build_workload(settings.workload, str(root / ".cache"))
    requests = workload.requests
    if settings.vocab_size is not None:
        requests = tuple(remap_tokens(requests, settings.vocab_size))
    arrived = build_arrivals(settings, requests, settings.seed, settings.arrivals.rate_rps)
    waiting = next((request for request in arrived if request.after), None)
    if waiting is not None and settings.writer.format not in SESSIONS:
        raise ValueError(
            f"arrivals: request {waiting.id} waits for request {waiting.after[0]}; expected arrivals with times"
        )
    return workload, arrived
