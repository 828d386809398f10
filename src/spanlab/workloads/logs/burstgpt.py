"""BurstGPT: times and lengths of requests to one deployment, without prompt content."""

from __future__ import annotations

from dataclasses import replace

from spanlab.workloads.logs.csv_lines import csv_rows, has_header
from spanlab.workloads.logs.formats import LOG_FORMATS
from spanlab.workloads.logs.log import Entry, Ids
from spanlab.workloads.logs.source import LogFormat, Row, lengths_only

HEADER = ("Timestamp", "Request tokens", "Response tokens")


@LOG_FORMATS.register("burstgpt")
def burstgpt() -> LogFormat:
    """One CSV row per request; seconds since the start of the trace."""
    return LogFormat(
        looks_for=f"CSV with the columns {', '.join(HEADER)}",
        recognises=lambda file: has_header(file, HEADER),
        read=csv_rows(_parse_row, HEADER),
        ids=Ids.NONE,
        fields=HEADER,
    )


def _parse_row(row: Row, line: int) -> Entry:
    tokens, output = row.count("Request tokens"), row.count("Response tokens")
    entry = lengths_only(tokens, line, row.seconds("Timestamp"), output)
    return replace(entry, session=row.label("Session ID"), tenant=row.label("Model"))
