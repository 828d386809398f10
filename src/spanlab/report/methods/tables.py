"""Tables of the analysis `methods`: arms, covariates of the loss, and differences between all pairs of arms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from spanlab.report.cells import (
    byte_size,
    count,
    nats_interval,
    number,
    percent,
    percent_interval,
    ratio,
    ratio_interval,
    seconds,
    word,
)
from spanlab.report.fields import Field, tabulate, whole, with_ends
from spanlab.report.methods.data import PLAIN, Entry, MethodData, budgets
from spanlab.report.tables import Cell, Table

_NOTES = (
    "gold loss = −log p of the gold answer's tokens, nats, mean over tokens, then over questions; change = the same "
    "minus that of {baseline} on the same question, · = the interval holds zero: a difference is not shown",
    "KL = KL({baseline} ‖ arm), nats, and top-1 = same likeliest token, both after the gold answer's tokens; the row "
    "floor is {baseline} once more with its prompts in other chunks",
    "speedup = summed TTFT of {baseline} ÷ that of the arm; bound = the same of the prompt tokens they computed; bytes "
    "= most that the cache held",
    "[a, b] = 95 % interval, bootstrap over documents",
)
_BENEFIT = "benefit kept = (loss of {without} − loss of the arm) ÷ (loss of {without} − loss of {baseline})"


def methods_table(data: MethodData) -> Table:
    """Return one row per arm, and the floor below; columns without any value are in CSV and the tracker only."""
    unmeasured = dict.fromkeys(data.entries[data.baseline])
    entries = {**data.entries, **({"floor": {**unmeasured, **data.floor}} if data.floor else {})}
    rows = [{"arm": name, **entry} for name, entry in entries.items()]
    fields = (Field("arm", "arm", word, left=True), *(replace(field, empty=(None,)) for field in _FIELDS))
    return tabulate("methods", "Speed, bytes and answers of every method", fields, rows, _notes(data))


def budgets_tables(data: MethodData) -> tuple[Table, ...]:
    """Return one row per budget of a method, by computed tokens; no table where no method has several budgets."""
    lines = budgets(data.methods).items()
    if not lines:
        return ()
    plain = [{"method": PLAIN, "budget": "", **data.methods[PLAIN]}] if PLAIN in data.methods else []
    rows = plain + [{"method": method, "budget": budget, **entry} for method, line in lines for budget, entry in line]
    chosen = (_FIELDS[-2], *_FIELDS[:5], _FIELDS[-1])  # times are in the table of all arms
    fields = (
        Field("method", "method", word, left=True),
        Field("budget", "budget", word),
        *chosen,
    )
    budget = "budget = repaired tokens of each passage; of cache_blend and strided, percent of the prompt's tokens"
    notes = (budget, *(note for note in _notes(data) if not note.startswith("speedup")))
    return (tabulate("methods_budgets", "Quality over recomputed tokens", fields, rows, notes),)


def buckets_table(buckets: Sequence[Mapping[str, Any]]) -> Table:
    """Return the gold loss of every arm by task, and by position and length of the gold passage."""
    fields = (
        Field("arm", "arm", word, left=True),
        Field("covariate", "by", word, left=True),
        Field("bucket", "bucket", word, left=True),
        Field("questions", "questions", count),
        *with_ends(Field("gold_loss", "gold loss", nats_interval, whole)),
    )
    return tabulate("gold_loss_by", "Gold loss by what the question is", fields, buckets)


def pairs_table(pairs: Sequence[Mapping[str, Any]]) -> Table:
    """Return the differences of gold loss between every two arms, paired by question."""
    fields = (
        Field("second", "arm", word, left=True),
        Field("first", "minus arm", word, left=True),
        *with_ends(Field("change", "change of gold loss", nats_interval, whole)),
        Field("shown", "shown", lambda shown: Cell(shown, "yes" if shown else "not shown"), left=True),
    )
    note = "shown = the 95 % interval excludes zero, which it does by chance for one in twenty pairs of equal arms"
    return tabulate("method_pairs", "Which methods differ", fields, pairs, (note,))


def _notes(data: MethodData) -> tuple[str, ...]:
    notes = (*_NOTES, _BENEFIT) if data.without else _NOTES
    return tuple(note.format(baseline=data.baseline, without=data.without) for note in notes)


def _change(entry: Entry) -> Cell:
    cell = nats_interval(entry["gold_loss_change"])
    return cell if entry.get("shown") is not False else Cell(cell.value, f"{cell.text} ·")


_FIELDS = (
    Field("gold_loss", "gold\nloss", nats_interval),
    Field("gold_loss_change", "change", _change, whole),
    Field("benefit_kept", "benefit\nkept", percent_interval),
    Field("kl", "KL", number(".2g"), "kl.mean", 1),
    Field("top1", "top-1", percent, "top1.mean", 2),
    Field("exact", "exact\nmatch", percent_interval),
    Field("f1", "token\nF1", percent_interval),
    Field("choice", "right\nchoice", percent_interval),
    Field("likeliest", "likeliest\noption", percent_interval),
    Field("ttft_s", "TTFT\nmean", seconds, "ttft_s.mean"),
    Field("speedup", "speedup", ratio_interval),
    Field("bound", "bound", ratio, keep=3),
    Field("computed_tokens", "computed\ntokens", count, "computed_tokens.mean"),
    Field("bytes", "bytes", byte_size, "bytes.mean", 4),
)
