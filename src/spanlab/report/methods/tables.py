"""Tables of the analysis `methods`: arms, covariates of the loss, and differences between all pairs of arms."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from spanlab.report import cells, units
from spanlab.report.methods.data import PLAIN, Entry, MethodData, budgets, ends
from spanlab.report.tables import MISSING, Cell, Column, Table

Estimate = Mapping[str, float | None] | None

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
    rows = {**data.entries, **({"floor": data.floor} if data.floor else {})}
    table = tuple((cells.word(name), *(cell(entry) for _, cell in _COLUMNS)) for name, entry in rows.items())
    columns = [Column("arm", "arm", left=True), *(column for column, _ in _COLUMNS)]
    empty = [number for number in range(1, len(columns)) if all(row[number].value is None for row in table)]
    shown = tuple(replace(column, heading="") if number in empty else column for number, column in enumerate(columns))
    return Table("methods", "Speed, bytes and answers of every method", shown, table, _notes(data))


def budgets_tables(data: MethodData) -> tuple[Table, ...]:
    """Return one row per budget of a method, by computed tokens; no table where no method has several budgets."""
    lines = budgets(data.methods).items()
    if not lines:
        return ()
    plain = [(PLAIN, "", data.methods[PLAIN])] if PLAIN in data.methods else []
    rows = plain + [(method, budget, entry) for method, line in lines for budget, entry in line]
    chosen = (_COLUMNS[-2], *_COLUMNS[:5], _COLUMNS[-1])  # times are in the table of all arms
    columns = (Column("method", "method", left=True), Column("budget", "budget"), *(column for column, _ in chosen))
    table = tuple(
        (cells.word(method), cells.word(budget), *(cell(entry) for _, cell in chosen)) for method, budget, entry in rows
    )
    budget = "budget = repaired tokens of each passage; of cache_blend and strided, percent of the prompt's tokens"
    notes = (budget, *(note for note in _notes(data) if not note.startswith("speedup")))
    return (Table("methods_budgets", "Quality over recomputed tokens", columns, table, notes),)


def buckets_table(buckets: Sequence[Mapping[str, Any]]) -> Table:
    """Return the gold loss of every arm by task, and by position and length of the gold passage."""
    columns = (
        Column("arm", "arm", left=True),
        Column("covariate", "by", left=True),
        Column("bucket", "bucket", left=True),
        Column("questions", "questions"),
        *_interval_columns("gold_loss", "gold loss"),
    )
    rows = [
        (
            *(cells.word(bucket[key]) for key in ("arm", "covariate", "bucket")),
            cells.count(bucket["questions"]),
            *_ends(bucket),
        )
        for bucket in buckets
    ]
    return Table("gold_loss_by", "Gold loss by what the question is", columns, tuple(rows))


def pairs_table(pairs: Sequence[Mapping[str, Any]]) -> Table:
    """Return the differences of gold loss between every two arms, paired by question."""
    columns = (
        Column("second", "arm", left=True),
        Column("first", "minus arm", left=True),
        *_interval_columns("change", "change of gold loss"),
        Column("shown", "shown", left=True),
    )
    rows = [
        (
            cells.word(pair["second"]),
            cells.word(pair["first"]),
            *_ends(pair),
            Cell(pair["shown"], _shown_text(pair["shown"])),
        )
        for pair in pairs
    ]
    note = "shown = the 95 % interval excludes zero, which it does by chance for one in twenty pairs of equal arms"
    return Table("method_pairs", "Which methods differ", columns, tuple(rows), (note,))


def _notes(data: MethodData) -> tuple[str, ...]:
    notes = (*_NOTES, _BENEFIT) if data.without else _NOTES
    return tuple(note.format(baseline=data.baseline, without=data.without) for note in notes)


def _shown_text(shown: bool) -> str:
    return "yes" if shown else "not shown"


def _interval_columns(name: str, heading: str) -> tuple[Column, ...]:
    return Column(name, heading), Column(f"{name}_low", ""), Column(f"{name}_high", "")


def _ends(estimate: Mapping[str, Any]) -> tuple[Cell, ...]:
    return _nats(estimate), cells.hidden(estimate["low"]), cells.hidden(estimate["high"])


def _nats(estimate: Estimate) -> Cell:
    if estimate is None or estimate["mean"] is None:
        return MISSING
    reach = ends(estimate)
    ends_text = "" if reach is None else f" [{reach[0]:.3f}, {reach[1]:.3f}]"
    return Cell(estimate["mean"], f"{estimate['mean']:.3f}{ends_text}")


def _share(estimate: Estimate) -> Cell:
    if estimate is None or estimate["mean"] is None:
        return MISSING
    return cells.percent_between(estimate["mean"], ends(estimate))


def _change(entry: Entry) -> Cell:
    cell = _nats(entry["gold_loss_change"])
    return cell if entry.get("shown") is not False else Cell(cell.value, f"{cell.text} ·")


def _cell_of(name: str, cell: Callable[[Estimate], Cell]) -> Callable[[Entry], Cell]:
    return lambda entry: cell(entry.get(name))


def _kl(estimate: Estimate) -> Cell:
    return (
        MISSING if estimate is None or estimate["mean"] is None else Cell(estimate["mean"], f"{estimate['mean']:.2g}")
    )


def _percent(estimate: Estimate) -> Cell:
    return MISSING if estimate is None else cells.percent(estimate["mean"])


def _seconds(estimate: Estimate) -> Cell:
    return MISSING if estimate is None else cells.seconds(estimate["mean"])


def _ratio(estimate: Estimate) -> Cell:
    return MISSING if estimate is None else cells.ratio(estimate["mean"], ends(estimate))


def _count(estimate: Estimate) -> Cell:
    return MISSING if estimate is None or estimate["mean"] is None else cells.count(estimate["mean"])


def _bytes(estimate: Estimate) -> Cell:
    return (
        MISSING
        if estimate is None or estimate["mean"] is None
        else Cell(estimate["mean"], units.byte_size(estimate["mean"]))
    )


_COLUMNS: tuple[tuple[Column, Callable[[Entry], Cell]], ...] = (
    (Column("gold_loss", "gold\nloss"), _cell_of("gold_loss", _nats)),
    (Column("gold_loss_change", "change"), _change),
    (Column("benefit_kept", "benefit\nkept"), _cell_of("benefit_kept", _share)),
    (Column("kl", "KL", 1), _cell_of("kl", _kl)),
    (Column("top1", "top-1", 2), _cell_of("top1", _percent)),
    (Column("exact", "exact\nmatch"), _cell_of("exact", _share)),
    (Column("f1", "token\nF1"), _cell_of("f1", _share)),
    (Column("choice", "right\nchoice"), _cell_of("choice", _share)),
    (Column("likeliest", "likeliest\noption"), _cell_of("likeliest", _share)),
    (Column("ttft_s", "TTFT\nmean"), _cell_of("ttft_s", _seconds)),
    (Column("speedup", "speedup"), _cell_of("speedup", _ratio)),
    (Column("bound", "bound", 3), lambda entry: cells.ratio(entry.get("bound"))),
    (Column("computed_tokens", "computed\ntokens"), _cell_of("computed_tokens", _count)),
    (Column("bytes", "bytes", 4), _cell_of("bytes", _bytes)),
)
