"""Registry of log formats, in the order in which they are tried; each format is registered by its module."""

from __future__ import annotations

import re

from spanlab.registry import Registry
from spanlab.workloads.logs.source import LogFile, LogFormat, Row, head_rows

#: A registered function has no parameters and returns the format.
LOG_FORMATS: Registry[LogFormat] = Registry("log format")

LOG_FORMATS.later("ragpulse", "spanlab.workloads.logs.ragpulse")
LOG_FORMATS.later("parquet", "spanlab.workloads.logs.parquet")
LOG_FORMATS.later("azure", "spanlab.workloads.logs.azure")
LOG_FORMATS.later("burstgpt", "spanlab.workloads.logs.burstgpt")
LOG_FORMATS.later("tracelab", "spanlab.workloads.logs.tracelab")
LOG_FORMATS.later("agent_sessions", "spanlab.workloads.logs.agent_sessions")
LOG_FORMATS.later("lmcache", "spanlab.workloads.logs.lmcache")
LOG_FORMATS.later("mooncake", "spanlab.workloads.logs.mooncake")
LOG_FORMATS.later("sglang", "spanlab.workloads.logs.sglang")
LOG_FORMATS.later("openai", "spanlab.workloads.logs.openai")
LOG_FORMATS.later("vllm_bench", "spanlab.workloads.logs.vllm_bench")
LOG_FORMATS.later("spanlab_records", "spanlab.workloads.logs.spanlab_records")
LOG_FORMATS.later("vllm_events", "spanlab.workloads.logs.vllm_events")

#: Formats that are not read: what they are called, and the fields by which their rows are known.
_UNREAD: dict[str, tuple[str, ...]] = {
    "a ShareGPT file (conversations)": ("conversations",),
    "a Langfuse export (input.messages)": ("input.messages",),
    "a GuideLLM report (benchmarks)": ("benchmarks",),
    "AIPerf's records (metrics.input_sequence_length)": ("metadata", "metrics"),
    "a session of Claude Code (sessionId, message)": ("sessionId", "message"),
    "a session of Codex (payload)": ("payload", "type"),
    "OpenTelemetry spans (resourceSpans)": ("resourceSpans",),
    "an OpenTelemetry span (attributes)": ("attributes",),
    "a SWE-agent trajectory (trajectory)": ("trajectory",),
    "SageMaker's data capture (captureData)": ("captureData",),
}
#: The same for text.
_UNREAD_TEXT: dict[str, re.Pattern[bytes]] = {
    "a console log of vLLM": re.compile(rb"Received request |Avg prompt throughput"),
    "a console log of SGLang without token ids": re.compile(rb"Prefill batch|Decode batch|Receive: obj="),
    "a console log of LMCache": re.compile(rb"LMCache.*hit tokens"),
    "a scrape of /metrics": re.compile(rb"^# (HELP|TYPE) ", re.MULTILINE),
    "a zip archive, which has to be unpacked": re.compile(rb"\APK\x03\x04"),
    "a text in UTF-16, which has to be UTF-8": re.compile(rb"\A(\xff\xfe|\xfe\xff)"),
}


def detect_format(file: LogFile) -> tuple[str, LogFormat]:
    """Return the first format that matches a file, with its name; ValueError names the nearest one if none matches."""
    for name in LOG_FORMATS:
        log_format = LOG_FORMATS.make(name, {}, {})
        if log_format.recognises(file):
            return name, log_format
    raise ValueError(
        f"log={file.path}: expected a log of a known format; {_nearest(file)}; docs/logs.md describes all formats"
    )


def _nearest(file: LogFile) -> str:
    """Describe the format that a file of unknown format resembles most, and what it lacks."""
    rows = list(map(Row, head_rows(file)[:50]))
    for name, fields in _UNREAD.items():
        if any(all(row.get(field) is not None for field in fields) for row in rows):
            return f"this looks like {name}, which is not read"
    for name, pattern in _UNREAD_TEXT.items():
        if pattern.search(file.head):
            return f"this looks like {name}, which is not read"
    header = file.head.partition(b"\n")[0].decode(errors="replace").strip()
    columns = {key for row in rows for key in row.fields} or set(header.split(","))
    formats = {name: fields for name in LOG_FORMATS if (fields := LOG_FORMATS.make(name, {}, {}).fields)}
    shares = {name: sum(field in columns for field in fields) / len(fields) for name, fields in formats.items()}
    name = max(shares, key=lambda name: shares[name])
    if shares[name]:
        missing = [field for field in formats[name] if field not in columns]
        lacks = f"whose {' and '.join(missing)} is missing" if missing else "whose fields have other content"
        return f"the nearest is {name}, {lacks}"
    if not rows:
        kind = "binary data" if b"\0" in file.head else "text that is neither JSON nor a known table"
        return f"the file begins with {kind}"
    return f"no format has rows with the fields {', '.join(sorted(columns)[:5])[:80]}"
