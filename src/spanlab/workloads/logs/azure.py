"""Azure LLM inference traces: times and lengths, without prompt content."""

from __future__ import annotations

from spanlab.workloads.logs.csv_lines import csv_rows, has_header
from spanlab.workloads.logs.formats import LOG_FORMATS
from spanlab.workloads.logs.log import Entry, Ids
from spanlab.workloads.logs.source import LogFormat, Row, lengths_only

HEADER = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@LOG_FORMATS.register("azure")
def azure() -> LogFormat:
    """One CSV row per request; dates in local time."""
    return LogFormat(
        looks_for=f"CSV with the header {','.join(HEADER)}",
        recognises=lambda file: has_header(file, HEADER),
        read=csv_rows(_parse_row, HEADER),
        ids=Ids.NONE,
        fields=HEADER,
    )


def _parse_row(row: Row, line: int) -> Entry:
    tokens, output = row.count("ContextTokens"), row.count("GeneratedTokens")
    return lengths_only(tokens, line, row.seconds("TIMESTAMP"), output)
