"""The analysis `methods`: speed, bytes and answers of every arm against full recompute, paired by
question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from spanlab.analyses.answers import answer_text, best_score, exact_match, token_f1
from spanlab.analyses.base import Findings, Finished, footer
from spanlab.analyses.method_data import (
    UNREPAIRED,
    ArmAnswers,
    MethodData,
    MethodEntry,
    References,
    budgets,
    ends,
    floor_entry,
    loss_by,
    method_entry,
    pair_changes,
)
from spanlab.core.request import Request
from spanlab.records import delays_of
from spanlab.registry import one_of
from spanlab.report import style
from spanlab.report.style import Label, place_labels
from spanlab.report.table import (
    Cell,
    Field,
    Table,
    byte_size,
    count,
    nats_interval,
    number_format,
    percent,
    percent_interval,
    ratio,
    ratio_interval,
    seconds,
    tabulate,
    whole,
    with_ends,
    word,
)
from spanlab.settings.analyses import (
    ANALYSES,
    FLOOR,
    LABELS,
    MEASURED,
    PLAIN,
    REPEAT,
    Analysis,
    MethodSettings,
)
from spanlab.settings.study import Study
from spanlab.stats import Floats, Groups, describe_few
from spanlab.study.bounds import ArmFailure, family
from spanlab.study.jobs import run_cells
from spanlab.study.machine import NAME, floor_files
from spanlab.study.numbers import (
    ArmFiles,
    at_rate,
    read_options,
    read_outputs,
    read_records,
    read_scores,
    select,
)
from spanlab.workloads.queries import tokenizer_of
from spanlab.workloads.workload import Workload

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# ------------------------------------------------------------------------------
# Inputs of the scores: records, scores and generated answers of a study, by question.
# ------------------------------------------------------------------------------

SCORES = ("nll", "kl", "top1")


def read_answers(
    finished: Finished, questions: Sequence[Request], arm: str, files: ArmFiles
) -> ArmAnswers:
    """Return one arm's answers to the requests `questions`, under the study's first seed."""
    study = finished.study
    cell, columns = run_cells(study, arm)[0], _records(study, questions, arm, files)
    (run,) = [
        run
        for run in files.finished()
        if run["seed"] == cell.seed and run["rate_rps"] == cell.rate_rps
    ]
    outputs_path = files.outputs(arm, cell)
    scores: dict[str, Floats] = {}
    if study.engine.record == "scores":
        by_request = read_scores(outputs_path)
        scores = {
            name: np.array([by_request[request.id][name] for request in questions])
            for name in SCORES
        }
        options = read_options(outputs_path)
        wrong = [min(options.get(request.id, ()), default=np.nan) for request in questions]
        right = {"likeliest": np.where(np.isnan(wrong), np.nan, scores["nll"] < wrong)}
    else:
        # each answer against its best gold answer
        outputs, tokenizer = read_outputs(outputs_path), tokenizer_of(study.workload.tokenizer)
        texts = [answer_text(outputs, request, tokenizer) for request in questions]
        golds = [(request.answer or "").split("\n") for request in questions]
        choices = finished.workload.labels.get("choices", ("",) * len(finished.workload.requests))
        text_golds = list(zip(texts, golds, strict=True))
        right = {
            "exact": np.array([best_score(exact_match, text, gold) for text, gold in text_golds]),
            "f1": np.array([best_score(token_f1, text, gold) for text, gold in text_golds]),
            "choice": np.array(
                [
                    choice_score(text, gold[0], str(choices[request.id]).split("\n"))
                    for request, (text, gold) in zip(questions, text_golds, strict=True)
                ]
            ),
        }
    return ArmAnswers(
        arm=arm,
        family=family(study.arms[arm]),
        ttft_s=delays_of(columns)["ttft_s"],
        prompt=columns["prompt_tokens"],
        computed=columns["computed_tokens"],
        peak_bytes=run["kv_resident_peak_bytes"] + run["state_resident_peak_bytes"],
        scores=scores,
        right=right,
    )


def _records(
    study: Study, questions: Sequence[Request], arm: str, files: ArmFiles
) -> dict[str, NDArray[Any]]:
    """Return the records of the questions in their order, under the study's first seed."""
    cell, columns = run_cells(study, arm)[0], read_records(files.records)
    columns = select(columns, at_rate(columns, cell.rate_rps) & (columns["seed"] == cell.seed))
    row_of = {number: index for index, number in enumerate(columns["request_id"].tolist())}
    rows = np.array([row_of[request.id] for request in questions], np.int64)
    return select(columns, rows)


def covariates(workload: Workload, questions: Sequence[Request]) -> dict[str, NDArray[np.str_]]:
    """Return buckets of the questions by covariate: task, place of the gold passage, thirds of its
    length."""
    ids = [request.id for request in questions]
    labels = {name: np.array(values)[ids] for name, values in workload.labels.items()}
    buckets = {}
    if "task" in labels:
        buckets["task"] = labels["task"].astype(str)
    if "gold_position" in labels:
        positions = labels["gold_position"].astype(int)
        buckets["place of the gold passage"] = np.array(
            ["not there" if position < 0 else f"{position + 1}" for position in positions]
        )
    if "gold_tokens" in labels:
        # the third of each length, named by its range
        lengths = labels["gold_tokens"].astype(int)
        ends = np.unique(np.quantile(lengths, (1 / 3, 2 / 3)).astype(int))
        third = np.searchsorted(ends, lengths)
        members = [lengths[third == number] for number in range(len(ends) + 1)]
        names = np.array(
            [f"{values.min():,} to {values.max():,}" if len(values) else "" for values in members]
        )
        buckets["tokens of the gold passage"] = names[third]
    return buckets


def choice_score(text: str, gold: str, options: Sequence[str]) -> float:
    """Return 1 where the right option alone has the highest token F1 with the answer, else 0; NaN
    without options."""
    if len(options) < 2:
        return float("nan")
    scores = {option: token_f1(text, option) for option in options}
    return float(all(scores[gold] > score for option, score in scores.items() if option != gold))


# ------------------------------------------------------------------------------
# Tables of the analysis `methods`: arms, covariates of the loss, and differences between all
# pairs of arms.
# ------------------------------------------------------------------------------

_NOTES = (
    "gold loss = −log p of the gold answer's tokens, nats, mean over tokens, then over questions; change = the same "
    "minus that of {baseline} on the same question, · = the interval holds zero: a difference is not shown",
    "KL = KL({baseline} ‖ arm), nats, and top-1 = same likeliest token, both after the gold answer's tokens; the row "
    "floor is {baseline} once more with its prompts in other chunks",
    "speedup = summed TTFT of {baseline} ÷ that of the arm; bound = the same of the prompt tokens they computed; bytes "
    "= most that the cache held",
    "[a, b] = 95 % interval, bootstrap over documents",
)
_OF_PLAIN = (
    "TTFT in transformers = the prompts of {baseline} without a cache and without our engine: one forward each, with "
    "torch's fused attention, between the runs of the arms; for arms with prompts of the same lengths"
)
_BENEFIT = "benefit kept = (loss of {without} − loss of the arm) ÷ (loss of {without} − loss of {baseline})"


def methods_table(data: MethodData) -> Table:
    """Return one row per arm, and the floor below; columns without any value are in CSV and the
    tracker only."""
    unmeasured = dict.fromkeys(data.entries[data.baseline])
    entries = {**data.entries, **({"floor": {**unmeasured, **data.floor}} if data.floor else {})}
    rows = [{"arm": name, **entry} for name, entry in entries.items()]
    fields = (
        Field("arm", "arm", word, left=True),
        *(replace(field, empty=(None,)) for field in _FIELDS),
    )
    return tabulate(
        "methods", "Speed, bytes and answers of every method", fields, rows, _notes(data)
    )


def budgets_tables(data: MethodData) -> tuple[Table, ...]:
    """Return one row per budget of a method, by computed tokens; no table where no method has
    several budgets."""
    lines = budgets(data.methods).items()
    if not lines:
        return ()
    plain = (
        [{"method": UNREPAIRED, "budget": "", **data.methods[UNREPAIRED]}]
        if UNREPAIRED in data.methods
        else []
    )
    rows = plain + [
        {"method": method, "budget": budget, **entry}
        for method, line in lines
        for budget, entry in line
    ]
    chosen = (_FIELDS[-2], *_FIELDS[:5], _FIELDS[-1])  # times are in the table of all arms
    fields = (Field("method", "method", word, left=True), Field("budget", "budget", word), *chosen)
    budget = "budget = repaired tokens of each passage; of cache_blend and strided, percent of the prompt's tokens"
    notes = (budget, *(note for note in _notes(data) if not note.startswith(("speedup", "TTFT"))))
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
        Field(
            "shown", "shown", lambda shown: Cell(shown, "yes" if shown else "not shown"), left=True
        ),
    )
    note = "shown = the 95 % interval excludes zero, which it does by chance for one in twenty pairs of equal arms"
    return tabulate("method_pairs", "Which methods differ", fields, pairs, (note,))


def _notes(data: MethodData) -> tuple[str, ...]:
    notes = [*_NOTES]
    notes += [_OF_PLAIN] if data.entries[data.baseline]["plain_s"] else []
    notes += [_BENEFIT] if data.without else []
    return tuple(note.format(baseline=data.baseline, without=data.without) for note in notes)


def _change(entry: MethodEntry) -> Cell:
    cell = nats_interval(entry["gold_loss_change"])
    return cell if entry.get("shown") is not False else Cell(cell.value, f"{cell.text} ·")


_FIELDS = (
    Field("gold_loss", "gold\nloss", nats_interval),
    Field("gold_loss_change", "change", _change, whole),
    Field("benefit_kept", "benefit\nkept", percent_interval),
    Field("kl", "KL", number_format(".2g"), "kl.mean", 1),
    Field("top1", "top-1", percent, "top1.mean", 2),
    Field("exact", "exact\nmatch", percent_interval),
    Field("f1", "token\nF1", percent_interval),
    Field("choice", "right\nchoice", percent_interval),
    Field("likeliest", "likeliest\noption", percent_interval),
    Field("ttft_s", "TTFT\nmean", seconds, "ttft_s.mean"),
    Field("speedup", "speedup", ratio_interval),
    Field("plain_s", "TTFT in\ntransformers", seconds, "plain_s.mean"),
    Field("over_plain", "speedup\nover it", ratio_interval),
    Field("bound", "bound", ratio, keep=3),
    Field("computed_tokens", "computed\ntokens", count, "computed_tokens.mean"),
    Field("bytes", "bytes", byte_size, "bytes.mean", 4),
)


# ------------------------------------------------------------------------------
# Quality over time to first token: one point per method, between the floor and the ceiling of
# the answers.
# ------------------------------------------------------------------------------


def draw_benefit(data: MethodData) -> Figure | None:
    """Draw the share of the context's benefit that each method keeps over mean TTFT; without
    shares, gold loss."""
    key = (
        "benefit_kept"
        if all(entry["benefit_kept"] for entry in data.entries.values())
        else "gold_loss"
    )
    factor, name = (
        (100.0, "benefit of the context kept (%)")
        if key == "benefit_kept"
        else (1.0, "gold loss (nats)")
    )
    direction = "more is better" if key == "benefit_kept" else "less is better"
    figure, [[ax]] = style.framed_with(
        data.footer, "Answer quality and TTFT of reuse methods", margins=style.Margins(right=1.5)
    )
    drawn = {**data.methods, data.baseline: data.entries[data.baseline]}
    unit = style.time_unit(max(entry["ttft_s"]["mean"] for entry in drawn.values()))
    strokes = style.strokes((name, entry["family"]) for name, entry in drawn.items())
    labels, bars = [], []  # labels should not cover error bars
    for method, entry in drawn.items():
        colour, marker = strokes[method].colour, strokes[method].marker
        x, y = unit.factor * entry["ttft_s"]["mean"], factor * entry[key]["mean"]
        x_reach, y_reach = _reach(entry["ttft_s"], unit.factor), _reach(entry[key], factor)
        ax.errorbar(x, y, y_reach, x_reach, fmt=marker, color=colour, markersize=6, elinewidth=0.9)
        labels.append(Label(x, y, method, colour))
        if x_ends := ends(entry["ttft_s"]):
            bars.append([(unit.factor * end, y) for end in x_ends])
        if y_ends := ends(entry[key]):
            bars.append([(x, factor * end) for end in y_ends])
    for arm, text in (
        (data.baseline, "full recompute"),
        (data.without, "no passages"),
        (data.gold_only, "gold alone"),
    ):
        if arm is None or arm not in data.entries:
            continue
        # a level with its interval as a band, and its name in the right margin
        level, reach = factor * data.entries[arm][key]["mean"], ends(data.entries[arm][key])
        ax.axhline(level, color="#777777", linewidth=0.9, linestyle=(0, (4, 2)))
        if reach is not None and reach[0] < reach[1]:
            edges = factor * reach[0], factor * reach[1]
            ax.axhspan(*edges, color="#777777", alpha=0.08, linewidth=0)
        ax.annotate(
            text,
            (1, level),
            (6, 0),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            va="center",
            fontsize=style.TICK_PT,
            color=style.INK,
            annotation_clip=False,
        )
    means = [entry["ttft_s"]["mean"] for entry in drawn.values()]
    low, high = (edge * unit.factor for edge in (min(means), max(means)))
    style.log_scale(ax.xaxis, low, high)
    ax.set_xlim(low / 1.25, high * 1.25)
    style.label(ax, f"mean time to first token ({unit.name})", f"{name}; {direction}")
    place_labels(ax, labels, bars)
    return figure


def _reach(estimate: MethodEntry, factor: float) -> list[list[float]] | None:
    """Return the distances of the ends of an interval below and above its mean."""
    reach = ends(estimate)
    if reach is None:
        return None
    return [[factor * (estimate["mean"] - reach[0])], [factor * (reach[1] - estimate["mean"])]]


# ------------------------------------------------------------------------------
# Quality over tokens that repair recomputes: one line per method, through its budgets.
# ------------------------------------------------------------------------------

_MEASURES = (
    ("gold_loss_change", "gold loss minus that of full recompute (nats)"),
    ("kl", "KL to full recompute (nats)"),
)


def draw_budgets(data: MethodData) -> Figure | None:
    """Draw the change of gold loss, and KL, of methods that ran with several budgets; None without
    any."""
    lines = budgets(data.methods)
    if not lines:
        return None
    names = [*lines, UNREPAIRED, "full recompute", "floor"]
    figure, [axes] = style.framed_with(
        data.footer,
        "Quality over recomputed tokens",
        cols=2,
        margins=style.margins_for(names),
        wspace=0.32,
    )
    strokes = style.strokes((name, line[0][1]["family"]) for name, line in lines.items())
    for ax, (key, label) in zip(axes, _MEASURES, strict=True):
        for name, line in lines.items():
            computed = [entry["computed_tokens"]["mean"] for _, entry in line]
            means = [entry[key]["mean"] for _, entry in line]
            ax.plot(computed, means, markersize=5, label=name, **strokes[name].options)
            reach = [ends(entry[key]) for _, entry in line]
            if all(reach):
                low, high = zip(*[interval for interval in reach if interval], strict=True)
                ax.fill_between(
                    computed, low, high, color=strokes[name].colour, alpha=0.12, linewidth=0
                )
        if UNREPAIRED in data.methods:
            entry = data.methods[UNREPAIRED]
            colour, marker = style.family_style(entry["family"])
            ax.plot(
                entry["computed_tokens"]["mean"],
                entry[key]["mean"],
                marker,
                color=colour,
                markersize=6,
                label=UNREPAIRED,
            )
        ax.axhline(0, color="#777777", linewidth=0.8, linestyle=(0, (4, 2)), label="full recompute")
        floor = abs(data.floor[key]["mean"])
        ax.axhline(floor, color=style.INK, linewidth=0.8, linestyle=(0, (1, 1.5)), label="floor")
        style.count_ticks(ax.xaxis)
        style.label(ax, "computed prompt tokens, mean", label)
    style.legend_right(axes[1])
    return figure


FIGURES = {"methods_benefit": draw_benefit, "methods_budgets": draw_budgets}


def compare_methods(finished: Finished) -> Findings:
    """Return each arm's gold loss, benefit kept, agreement, time and bytes, with intervals over
    documents."""
    study, baseline = finished.study, finished.study.runs.baseline
    questions = [request for request in finished.workload.requests if request.answer is not None]
    if baseline not in finished.files:
        return Findings(
            {"methods": {}}, caveats=(f"no answers are compared, for {baseline} failed",)
        )
    read_arm = partial(read_answers, finished, questions)
    arms = {arm: read_arm(arm, files) for arm, files in finished.files.items()}
    floor = read_arm(baseline, floor_files(finished.folder, baseline))
    without = arms.get(study.analyses.methods.without_context or "")
    groups = np.array([request.group_id for request in questions], np.int64)
    plain = finished.plain
    plain_s = (
        delays_of(_records(study, questions, baseline, plain))["ttft_s"]
        if isinstance(plain, ArmFiles)
        else None
    )
    references = References(arms[baseline], without, floor, groups, plain_s)
    noise = finished.noise_sentence("speedups")
    withheld = {"speedup": None, "over_plain": None} if noise else {}
    entries = {name: method_entry(arm, references) | withheld for name, arm in arms.items()}
    lowest = floor_entry(references)
    scored = bool(arms[baseline].scores)
    buckets = _buckets(finished, questions, arms, references.groups) if scored else []
    pairs = pair_changes(list(arms.values()), references) if scored else []
    views = study.analyses.methods.without_context, study.analyses.methods.gold_only
    data = MethodData(
        entries,
        lowest,
        baseline,
        *views,
        " · ".join(filter(None, (finished.name, footer(finished), noise))),
    )
    return Findings(
        summary={
            "methods": entries,
            NAME: lowest,
            "gold_loss_by": buckets,
            "documents": len(np.unique(references.groups)),
        },
        tables=(methods_table(data),),
        further=(*budgets_tables(data), buckets_table(buckets), pairs_table(pairs))
        if scored
        else (),
        figures={name: partial(drawing, data) for name, drawing in FIGURES.items()}
        if scored
        else {},
        caveats=_caveats(finished, entries, len(np.unique(references.groups))),
    )


def _buckets(
    finished: Finished, questions: Sequence[Request], arms: dict[str, ArmAnswers], groups: Groups
) -> list[dict[str, Any]]:
    """Return gold loss by covariate: one entry per arm, covariate and bucket."""
    return [
        {
            "arm": name,
            "covariate": covariate,
            "bucket": bucket,
            "questions": int((values == bucket).sum()),
            **loss,
        }
        for covariate, values in covariates(finished.workload, questions).items()
        for name, arm in arms.items()
        for bucket, loss in loss_by(arm, values, groups).items()
    ]


def _caveats(finished: Finished, entries: dict[str, Any], documents: int) -> tuple[str, ...]:
    """Return caveats: differences that the questions do not show, noise, lost times of transformers,
    and intervals that may be too narrow."""
    not_shown = [name for name, entry in entries.items() if entry["shown"] is False]
    noise, plain = finished.noise_sentence("speedups"), finished.plain
    caveats = [noise] if noise else []
    if isinstance(plain, ArmFailure):
        caveats.append(f"no times of plain transformers: {plain.sentence}")
    if not_shown:
        caveats.append(
            f"not shown by these questions: a gold loss other than the baseline's of {', '.join(not_shown)}"
        )
    return (*caveats, *filter(None, [describe_few(1, documents)]))


def _check(study: Study) -> None:
    """Raise ValueError for arms that do not run, and for a study that records neither scores nor
    answers."""
    settings = study.analyses.methods
    for key in ("without_context", "gold_only"):
        arm = getattr(settings, key)
        if arm is not None:
            one_of(f"methods.{key}", arm, study.arms)
    if study.engine.record not in ("scores", "tokens"):
        raise ValueError(
            f"analyses=methods with engine.record={study.engine.record}: expected scores or tokens"
        )
    if study.engine.record == "tokens" and (
        study.engine.teacher or study.engine.weights == "random"
    ):
        answers = f"engine.teacher={study.engine.teacher}, engine.weights={study.engine.weights}"
        raise ValueError(
            f"engine.record=tokens with {answers}: expected engine.teacher=null and trained weights"
        )
    if study.runs.baseline not in study.chosen():
        raise ValueError(
            f"baseline={study.runs.baseline} with analyses=methods: expected one of the arms that run"
        )
    if study.arrivals.clients != 1:
        clients = f"arrivals.clients={study.arrivals.clients}"
        raise ValueError(f"analyses=methods with {clients}: expected arrivals=closed_loop with 1")
    if settings.floor_tokens >= study.batch.max_num_batched_tokens:
        most = f"batch.max_num_batched_tokens={study.batch.max_num_batched_tokens}"
        raise ValueError(
            f"methods.floor_tokens={settings.floor_tokens} with {most}: expected fewer"
        )


ANALYSES.add(
    Analysis(
        "methods",
        compare_methods,
        needs=(MEASURED, REPEAT, LABELS, FLOOR, PLAIN),
        options=MethodSettings,
        check=_check,
    )
)
