"""The table of the analysis `bars`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spanlab.analysis.bars import Verdict, verdict_of
from spanlab.report.cells import hidden, number, word
from spanlab.report.fields import Field, tabulate
from spanlab.report.tables import Cell, Table


def _outcome(verdict: Verdict) -> Cell:
    return word(("clears" if verdict.holds else "misses") if verdict.judged else "")


_FIELDS = (
    Field("point", "point", word, left=True),
    Field("arm", "arm", word, "verdict.arm", left=True),
    Field("what", "number", word, "verdict.what", left=True),
    Field("value", "measured", number(".4g"), "verdict.value"),
    Field("bar", "bar", word, "verdict.limits"),
    Field("verdict", "verdict", _outcome, left=True),
    Field("name", "", hidden, "verdict.bar", left=True),
)


def bars_table(points: Sequence[tuple[str, Sequence[Mapping[str, Any]]]]) -> Table:
    """Return a row per number of every point; the title counts the bars that are cleared."""
    rows: list[dict[str, Any]] = [
        {"point": point, "verdict": verdict_of(entry)} for point, entries in points for entry in entries
    ]
    decided = [row["verdict"] for row in rows if row["verdict"].judged]
    title = f"Bars: {sum(verdict.holds for verdict in decided)} of {len(decided)} are cleared"
    return tabulate("bars", title, _FIELDS, rows, ("each bar is judged alone, without a correction for their number",))
