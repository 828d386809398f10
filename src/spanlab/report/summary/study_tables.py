"""Every table of a study: arms, causes of tokens that were not reused, delays by load."""

from __future__ import annotations

from spanlab.records import LOSS_CAUSES
from spanlab.report import units
from spanlab.report.cells import count, number, percent, seconds, seconds_interval, word
from spanlab.report.data import ArmData, StudyData
from spanlab.report.fields import Field, tabulate, whole, with_ends
from spanlab.report.measures import category_tokens
from spanlab.report.summary.arms_table import LOAD_NOTE, arms_table
from spanlab.report.tables import Cell, Table

_CAUSE_NOTE = "reused and the causes sum to the prompt tokens of each arm"
_LOAD_NOTE = (
    f"TTFT = first token − arrival; queue = admission − arrival; {LOAD_NOTE}; a saturated arm has no steady-state "
    "delays"
)

_LOAD_FIELDS = (
    Field("arm", "arm", word, left=True),
    Field("rate_rps", "requests/s", number("g")),
    Field("requests", "requests", number(","), keep=3),
    Field("seeds", "seeds", number("d"), keep=3),
    Field("verdict", "state", word, "state.verdict", 1, left=True),
    Field("utilisation", "load ÷\ncapacity", percent, keep=1),
    Field("busy_share", "time\nbusy", percent, "busy_fraction", 2),
    *with_ends(Field("queue_mean_s", "queue\nmean", seconds_interval, "queue_s"), "queue_mean_{}_s"),
    Field("queue_p99_s", "queue\np99", seconds, "queue_s.p99", 2),
    *with_ends(Field("ttft_mean_s", "TTFT\nmean", seconds_interval, "ttft_s"), "ttft_mean_{}_s"),
    Field("ttft_p99_s", "TTFT\np99", seconds, "ttft_s.p99", 2),
)


def study_tables(study: StudyData) -> tuple[Table, ...]:
    """Return the tables of a study, arms first; the table of loads only where the study has load points."""
    loads = (load_table(study),) if study.load else ()
    return arms_table(study), losses_table(study), *loads


def losses_table(study: StudyData) -> Table:
    """Return the prompt tokens of each arm: reused, or computed by cause; causes that no arm has are hidden."""
    categories = ("reused", *LOSS_CAUSES)
    fields = (
        Field("arm", "arm", word, "name", left=True),
        Field("prompt_tokens", "prompt\ntokens", count, "summary.tokens.prompt"),
        *(_category(study, category) for category in categories),
    )
    return tabulate("losses", f"Prompt tokens by cause · {study.title}", fields, study.arms, (_CAUSE_NOTE,))


def _category(study: StudyData, category: str) -> Field:
    """Return the field of one category of tokens, by the name that it has in a record."""

    def tokens(arm: ArmData) -> Cell:
        number = category_tokens(arm.summary["tokens"], category)
        return Cell(number, units.percent(number / (arm.summary["tokens"]["prompt"] or 1)))

    if category == "reused":
        return Field("reused_tokens", "reused", tokens, whole)
    occurs = any(category_tokens(arm.summary["tokens"], category) for arm in study.arms)
    return Field(f"lost_{category}", _heading(category) if occurs else "", tokens, whole)


def _heading(category: str) -> str:
    """Return a heading in two lines: `state_never_placed` as state / never placed."""
    first, _, remainder = category.replace("kv_", "KV_").partition("_")
    return f"{first}\n{remainder.replace('_', ' ')}".strip()


def load_table(study: StudyData) -> Table:
    """Delays of every arm at every offered load."""
    return tabulate("load", f"Delays by offered load · {study.title}", _LOAD_FIELDS, study.load, (_LOAD_NOTE,))
