"""Registry of log formats, in the order in which they are tried; each format is registered by its module."""

from __future__ import annotations

from pathlib import Path

from spanlab.registry import Registry
from spanlab.workloads.logs.source import LogFile, LogFormat

#: A registered function has no parameters and returns the format.
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


def detect_format(file: LogFile) -> tuple[str, LogFormat]:
    """Return the first format that matches a file, with its name; ValueError lists all formats if none matches."""
    for name in LOG_FORMATS:
        log_format = LOG_FORMATS.make(name, {}, {})
        if log_format.recognises(file):
            return name, log_format
    raise ValueError(f"log={file.path}: expected a log of a known format: {describe_formats()}")


def describe_formats() -> str:
    """Describe every format and how it is recognised."""
    return "; ".join(f"{name} ({LOG_FORMATS.make(name, {}, {}).looks_for})" for name in LOG_FORMATS)


def existing_path(path: Path) -> Path:
    """Return the path; ValueError if it does not exist."""
    if not path.exists():
        raise ValueError(f"log={path}: no such file; expected a log, or a folder of the RAGPulse trace")
    return path
