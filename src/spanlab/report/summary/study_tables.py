"""Every table of a study: arms, causes of tokens that were not reused, delays by load."""

from __future__ import annotations

from spanlab.records import LOSS_CAUSES
from spanlab.report import cells
from spanlab.report.data import ArmData, LoadPoint, StudyData
from spanlab.report.measures import interval
from spanlab.report.summary.arms_table import arms_table
from spanlab.report.tables import Cell, Column, Table

_CAUSE_NOTE = "reused and the causes sum to the prompt tokens of each arm"
_LOAD_NOTE = (
    "TTFT = first token − arrival; queue = admission − arrival; load ÷ capacity = time that fully batched steps need "
    "for the offered work ÷ time in which it comes; a saturated arm has no steady-state delays"
)

_LOAD_COLUMNS = (
    Column("arm", "arm", left=True),
    Column("rate_rps", "requests/s"),
    Column("requests", "requests", 3),
    Column("seeds", "seeds", 3),
    Column("verdict", "state", 1, left=True),
    Column("utilisation", "load ÷\ncapacity", 1),
    Column("busy_share", "time\nbusy", 2),
    Column("queue_mean_s", "queue\nmean"),
    Column("queue_mean_low_s", ""),
    Column("queue_mean_high_s", ""),
    Column("queue_p99_s", "queue\np99", 2),
    Column("ttft_mean_s", "TTFT\nmean"),
    Column("ttft_mean_low_s", ""),
    Column("ttft_mean_high_s", ""),
    Column("ttft_p99_s", "TTFT\np99", 2),
)


def study_tables(study: StudyData) -> tuple[Table, ...]:
    """Return the tables of a study, arms first; the table of loads only where the study has load points."""
    loads = (load_table(study),) if study.load else ()
    return arms_table(study), losses_table(study), *loads


def losses_table(study: StudyData) -> Table:
    """Return the prompt tokens of each arm: reused, or computed by cause; causes that no arm has are hidden."""
    categories = ("reused", *LOSS_CAUSES)
    columns = [Column("arm", "arm", left=True), Column("prompt_tokens", "prompt\ntokens")]
    columns += [
        Column(_name(category), _heading(category) if _occurs(study, category) else "") for category in categories
    ]
    rows = [_losses_row(arm, categories) for arm in study.arms]
    title = f"Prompt tokens by cause · {study.title}"
    return Table("losses", title, tuple(columns), tuple(rows), (_CAUSE_NOTE,))


def _losses_row(arm: ArmData, categories: tuple[str, ...]) -> tuple[Cell, ...]:
    prompt = arm.summary["tokens"]["prompt"]
    shares = [
        Cell(_tokens(arm, category), f"{100 * _tokens(arm, category) / (prompt or 1):.1f} %") for category in categories
    ]
    return cells.word(arm.name), cells.count(prompt), *shares


def _tokens(arm: ArmData, category: str) -> int:
    tokens = arm.summary["tokens"]
    return int(tokens["reused"] if category == "reused" else tokens["lost_by_cause"].get(category, 0))


def _occurs(study: StudyData, category: str) -> bool:
    return category == "reused" or any(_tokens(arm, category) for arm in study.arms)


def _name(category: str) -> str:
    """Return the field of a record that counts these tokens."""
    return "reused_tokens" if category == "reused" else f"lost_{category}"


def _heading(category: str) -> str:
    """Return a heading in two lines: `state_never_placed` as state / never placed."""
    first, _, remainder = category.replace("kv_", "KV_").partition("_")
    return f"{first}\n{remainder.replace('_', ' ')}".strip()


def load_table(study: StudyData) -> Table:
    """Delays of every arm at every offered load."""
    rows = [_load_row(point) for point in study.load]
    return Table("load", f"Delays by offered load · {study.title}", _LOAD_COLUMNS, tuple(rows), (_LOAD_NOTE,))


def _load_row(point: LoadPoint) -> tuple[Cell, ...]:
    return (
        cells.word(point.arm),
        Cell(point.rate_rps, f"{point.rate_rps:g}"),
        Cell(point.requests, f"{point.requests:,}"),
        Cell(point.seeds, str(point.seeds)),
        cells.word(point.state.verdict),
        cells.percent(point.utilisation),
        cells.percent(point.busy_fraction),
        *_delay(point.queue_s),
        *_delay(point.ttft_s),
    )


def _delay(delay: dict[str, float | None]) -> tuple[Cell, Cell, Cell, Cell]:
    """Return cells of the mean with its interval, of the ends of the interval, and of p99."""
    low, high = delay["low"], delay["high"]
    mean = cells.seconds(delay["mean"], interval((low, high)))
    return mean, cells.hidden(low), cells.hidden(high), cells.seconds(delay["p99"])
