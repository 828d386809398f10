"""The entry `export`: write a workload's requests with their arrival times to a file, one line each."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import orjson

from spanlab.build import build_arrivals, build_workload
from spanlab.core.request import Request
from spanlab.engine.settings import remap_tokens
from spanlab.settings.entries import Export
from spanlab.workloads import Workload
from spanlab.workloads.writers import WRITERS


def run_export(settings: Export, root: Path) -> str:
    """Write the file and return one line that describes it; `root` is the folder of outputs."""
    path, writer = Path(settings.writer.path), settings.writer
    workload, arrived = arrived_requests(settings, root)
    write = WRITERS.make(writer.format, writer.keys, writer.options)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        for line in write(arrived):
            file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY))
    partial.rename(path)
    tokens = sum(request.num_tokens for request in arrived)
    return f"{path}: {len(arrived):,} requests, {tokens:,} prompt tokens · {workload.provenance.line()}"


def arrived_requests(settings: Export, root: Path) -> tuple[Workload, list[Request]]:
    """Return the workload and its requests with times; ValueError for a file that exists, or without times."""
    if Path(settings.writer.path).exists():
        raise ValueError(f"writer.path={settings.writer.path}: the file exists; expected a new name")
    workload = build_workload(settings.workload, str(root / ".cache"))
    requests = workload.requests
    if settings.vocab_size is not None:
        requests = tuple(remap_tokens(requests, settings.vocab_size))
    arrived = build_arrivals(settings, requests, settings.seed, settings.arrivals.rate_rps)
    _check_times(arrived)
    return workload, arrived


def _check_times(requests: Iterable[Request]) -> None:
    """Raise where the arrival of a request depends on the end of another."""
    waiting = next((request for request in requests if request.after), None)
    if waiting is not None:
        raise ValueError(
            f"arrivals: request {waiting.id} waits for request {waiting.after[0]}; expected arrivals with times"
        )
