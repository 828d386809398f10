"""Formats of logs by name, in the order in which they are tried; each is registered by a file of its own."""

from __future__ import annotations

from pathlib import Path

from spanlab.registry import Registry
from spanlab.workloads.logs.source import LogFile, LogFormat

#: A registered function takes nothing and returns the format.
LOG_FORMATS: Registry[LogFormat] = Registry("log format")
_FOLDER = __package__

for _name in (
    "ragpulse",
    "parquet",
    "azure",
    "burstgpt",
    "tracelab",
    "agent_sessions",
    "lmcache",
    "mooncake",
    "sglang",
    "openai",
    "vllm_bench",
    "spanlab_records",
    "vllm_events",
):
    LOG_FORMATS.later(_name, f"{_FOLDER}.{_name}")


def recognised(file: LogFile) -> tuple[str, LogFormat]:
    """The first format that a file has, with its name; ValueError that lists what was looked for."""
    for name in LOG_FORMATS:
        made = LOG_FORMATS.make(name, {}, {})
        if made.recognises(file):
            return name, made
    raise ValueError(f"log={file.path}: expected a log of a known format: {looked_for()}")


def looked_for() -> str:
    """Every format and what it is recognised by."""
    return "; ".join(f"{name} ({LOG_FORMATS.make(name, {}, {}).looks_for})" for name in LOG_FORMATS)


def existing(path: Path) -> Path:
    """The path, if it is there; ValueError otherwise."""
    if not path.exists():
        raise ValueError(f"log={path}: no such file; expected a log, or a folder of the RAGPulse trace")
    return path
