"""From a plan to the list of what is to be computed, in order."""

from __future__ import annotations

from bisect import bisect_left

from spanlab.core.reuse import ReusePlan, Work


def work_of(plan: ReusePlan, generated: int, copies: bool) -> tuple[Work, ...]:
    """What a request computes before its next output token, in an order in which everything finds what it reads.

    The missing tokens of the sections by prompt position; a repair comes when every span is there, and takes along the
    text between the spans, which must see them repaired. With `copies`, a span is copied before the first row that
    reads across it. `generated` output tokens of a preempted request come last.
    """
    missing = [_missing(plan, index) for index in range(len(plan.sections))]
    work = [one for one in missing if one.tokens]
    rule = plan.repair
    if rule.kind != "none" and (spans := plan.spans) and (rule.measured or rule.count(spans)):
        work = _with_repair(plan, work)
    if copies:
        work = _with_copies(plan, work)
    if generated:
        _append_output(plan, work, generated)
    return tuple(work) or (missing[-1],)


def _missing(plan: ReusePlan, index: int) -> Work:
    part = plan.sections[index]
    section = part.section
    start = section.start + part.resume
    return Work(index, start, section.stop, section.stop - start, section.start - section.context)


def _with_repair(plan: ReusePlan, work: list[Work]) -> list[Work]:
    spans, rule = plan.spans, plan.repair
    begin, end = spans[0].start, spans[-1].stop
    between = [one for one in work if not one.unseen and begin <= one.start < end]
    chosen, along = rule.count(spans), sum(one.tokens for one in between)
    shallow = sum(span.stop - span.start for span in spans) - chosen if rule.measured else 0
    sections = tuple(one.section for one in between)
    repair = Work(-1, begin, end, chosen + along, shallow=shallow, between=sections)
    before = [one for one in work if one not in between and one.start < end]
    return [*before, repair, *(one for one in work if one.start >= end)]


def _with_copies(plan: ReusePlan, work: list[Work]) -> list[Work]:
    """A repair needs all spans that it looks at; any other work that sees everything, those before it."""
    placed, copied = [], 0
    for one in work:
        if one.section < 0:
            read = [part for part in plan.sections if part.section.start < one.stop]
        else:
            read = [part for part in plan.sections if not one.unseen and part.section.stop <= one.start]
        due = sum(part.to_copy for part in read)
        placed.append(one._replace(copied=max(0, due - copied)))
        copied = max(copied, due)
    return placed


def _append_output(plan: ReusePlan, work: list[Work], generated: int) -> None:
    """Output tokens come behind the prompt, in one stretch with its last text where that is computed too."""
    last = len(plan.sections) - 1
    if work and work[-1].section == last:
        work[-1] = work[-1]._replace(stop=plan.prompt + generated, tokens=work[-1].tokens + generated)
    else:
        work.append(Work(last, plan.prompt, plan.prompt + generated, generated))


def extents(plan: ReusePlan, work: Work, start: int, stop: int) -> list[tuple[int, int, int]]:
    """Which rows of which sections are computed when `[start, stop)` of a work is: (section, start, stop) each.

    Repaired rows are told as section -1, and counted from 0 in the order of their positions.
    """
    if work.section >= 0:
        return [(work.section, start, stop)]
    missing = [_missing(plan, index) for index in work.between]
    along = [(one.section, max(start, one.start), min(stop, one.stop)) for one in missing]
    if (start, stop) == (work.start, work.stop):
        chosen = -1, 0, work.tokens - sum(one.tokens for one in missing)
    else:
        rows = plan.repair.rows(plan.spans, plan.request.id)
        chosen = -1, bisect_left(rows, start), bisect_left(rows, stop)
    return [part for part in (*along, chosen) if part[1] < part[2]]


def stretch_of(plan: ReusePlan, work: Work, done: int, take: int) -> tuple[int, int]:
    """Prompt tokens `[start, stop)` that rows `[done, done + take)` of a work belong to.

    The rows of a repair go by position, so each finds all that it reads repaired already. Its stretches leave no gap
    between them: one ends where the next row stands.
    """
    if work.section >= 0:
        return work.start + done, work.start + done + take
    if take == work.tokens:
        return work.start, work.stop
    rows = plan.repair.rows(plan.spans, plan.request.id)
    for index in work.between:
        one = _missing(plan, index)
        rows += range(one.start, one.stop)
    rows.sort()
    end = done + take
    return rows[done] if done else work.start, rows[end] if end < work.tokens else work.stop
