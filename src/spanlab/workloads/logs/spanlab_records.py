"""Records of finished requests of a spanlab study: lengths, times and groups, without prompt content."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from spanlab.workloads.logs.formats import LOG_FORMATS
from spanlab.workloads.logs.log import Entry, Ids
from spanlab.workloads.logs.source import LogFile, LogFormat, Row, first_row, json_lines, lengths_only

OTHER_RUNS = "records of other runs than that of the first seed and rate"


@LOG_FORMATS.register("spanlab_records")
def spanlab_records() -> LogFormat:
    """The file records/ARM.jsonl of a study, whose records are in order of completion."""
    return LogFormat(
        looks_for="JSONL with prompt_tokens, reused_tokens and arrived_s",
        recognises=lambda file: {"prompt_tokens", "reused_tokens", "arrived_s"} <= first_row(file).keys(),
        read=_read_entries,
        ids=Ids.NONE,
        fields=("prompt_tokens", "reused_tokens", "arrived_s"),
    )


def _read_entries(file: LogFile) -> Iterator[Entry]:
    """Yield the records of one run, sorted by arrival."""
    first_run: tuple[int, float | None] | None = None

    def parse(row: Row, line: int, file: LogFile) -> Entry | None:
        nonlocal first_run
        run = row.count("seed", default=0), row.number("rate_rps")
        first_run = first_run or run
        if run != first_run:
            file.set_aside(OTHER_RUNS)
            return None
        tokens, output = row.count("prompt_tokens"), row.count("output_tokens")
        entry = lengths_only(tokens, line, row.seconds("arrived_s"), output)
        return replace(entry, session=row.label("group_id"))

    yield from sorted(json_lines(parse)(file), key=lambda entry: entry.at or 0.0)
