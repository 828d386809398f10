"""The entry `export`: a workload's requests with their arrival times, as lines of a file."""

from __future__ import annotations

from pathlib import Path

import orjson

from spanlab import build
from spanlab.engine.remap_tokens import remap_tokens
from spanlab.settings.export import Export
from spanlab.workloads.writers.formats import WRITERS


def run_export(settings: Export, root: Path) -> str:
    """Write the file and say what it holds; `root` is where outputs go."""
    path, writer = Path(settings.writer.path), settings.writer
    if path.exists():
        raise ValueError(f"writer.path={path}: the file exists; expected a new name")
    write = WRITERS.make(writer.format, writer.keys, writer.options)
    workload = build.build_workload(settings.workload, str(root / ".cache"))
    requests = workload.requests
    if settings.vocab_size is not None:
        requests = tuple(remap_tokens(requests, settings.vocab_size))
    arrived = build.build_arrivals(settings, requests, settings.seed, settings.arrivals.rate_rps)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        for line in write(arrived):
            file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
    partial.rename(path)
    tokens = sum(request.num_tokens for request in arrived)
    return f"{path}: {len(arrived):,} requests, {tokens:,} prompt tokens · {workload.provenance.line()}"
