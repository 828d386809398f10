"""Tables of the analysis `perfect_eviction`, from its entry in `summary.json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spanlab.report.cells import one_decimal, percent, ratio, ratio_interval, seconds, word
from spanlab.report.fields import Field, tabulate
from spanlab.report.sweep.data import SweepPoint
from spanlab.report.tables import Table

#: Labels of the compared arms by their keys in the summary.
ARM_LABELS = {"usual": "baseline", "best": "best without foresight", "known": "clairvoyant"}
NOTES = (
    "offline bound = token hit rate that no eviction exceeds in this order of requests; TTFT bound = mean TTFT that "
    "none goes below: each request, alone on the engine, computes what the best use of memory does not reuse",
    "gain of TTFT = mean TTFT of the baseline ÷ that of the clairvoyant, same requests; of throughput = load that "
    "fills the capacity with the clairvoyant ÷ with the baseline, offered load ÷ utilisation",
)
_ARM_FIELDS = (
    Field("place", "", word, left=True),
    Field("arm", "arm", word, left=True),
    Field("token_hit_rate", "token\nhit rate", percent),
    Field("regret_points", "regret,\npoints", one_decimal),
    Field("ttft_mean_s", "TTFT\nmean", seconds),
    Field("ttft_regret_s", "TTFT above\nits bound", seconds),
    Field("utilisation", "load ÷\ncapacity", percent, keep=1),
)
_POINT_FIELDS = (
    Field("point", "point", word, left=True),
    Field("baseline", "hit rate\nbaseline", percent, "usual.token_hit_rate"),
    Field("best_arm", "best without\nforesight", word, "best.arm", 1, left=True),
    Field("best", "its hit\nrate", percent, "best.token_hit_rate"),
    Field("known_arm", "clairvoyant", word, "known.arm", 3, left=True),
    Field("known", "its hit\nrate", percent, "known.token_hit_rate"),
    Field("bound", "offline\nbound", percent),
    Field("ttft_baseline_s", "TTFT\nbaseline", seconds, "usual.ttft_mean_s"),
    Field("ttft_best_s", "TTFT\nbest", seconds, "best.ttft_mean_s", 2),
    Field("ttft_known_s", "TTFT\nclairvoyant", seconds, "known.ttft_mean_s"),
    Field("least_ttft_s", "TTFT\nbound", seconds, "least_s"),
    Field("gain_of_ttft", "gain of\nTTFT", ratio_interval, "gain"),
    Field("gain_of_throughput", "gain of\nthroughput", ratio, "throughput"),
)


def arms_table(findings: Mapping[str, Any]) -> Table:
    """Return one row per compared arm, and one for the bounds."""
    rows = [{"place": label, **findings[key]} for key, label in ARM_LABELS.items()]
    bound = {"token_hit_rate": findings["bound"], "ttft_mean_s": findings["least_s"]}
    rows.append(dict.fromkeys(rows[0]) | {"place": "bound", "arm": ""} | bound)
    gain, throughput = ratio_interval(findings["gain"]), ratio(findings["throughput"])
    title = f"Perfect eviction: TTFT {gain.text}, throughput {throughput.text}"
    return tabulate("perfect_eviction", title, _ARM_FIELDS, rows, NOTES)


def points_table(name: str, points: Sequence[SweepPoint]) -> Table:
    """One row per point."""
    rows = [{"point": point.name, **point.findings("perfect_eviction")} for point in points]
    return tabulate(name, "Gain of perfect eviction", _POINT_FIELDS, rows, NOTES)
