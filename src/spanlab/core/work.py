"""From a plan to the list of what is to be computed, in order."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from itertools import pairwise

from spanlab.core.repair import Reused
from spanlab.core.reuse import ReusePlan

#: Cache span, and the prompt or output tokens `[start, stop)` of it.
CacheSpanRows = tuple[int, int, int]


@dataclass(slots=True)
class PrefillRange:
    """Prompt or output tokens `[start, stop)` of one cache span, computed in the cache span's own context.

    `unseen`  tokens of the prompt before a row that it does not see: row p sees p + 1 - unseen
    `copied`  tokens of spans that the request first copies for itself
    """

    cache_span: int
    start: int
    stop: int
    unseen: int = 0
    copied: int = 0

    @property
    def shallow(self) -> int:
        """No row leaves before the last layer."""
        return 0

    @property
    def tokens(self) -> int:
        """Rows that pass through every layer."""
        return self.stop - self.start

    @property
    def cache_spans(self) -> tuple[int, ...]:
        """Cache spans whose missing tokens it computes."""
        return (self.cache_span,)

    def holds(self, position: int) -> bool:
        """Whether a state at a position is one behind its rows."""
        return self.start < position <= self.stop

    def stretch(self, plan: ReusePlan, done: int, take: int) -> tuple[int, int]:
        """Prompt tokens `[start, stop)` that rows `[done, done + take)` belong to."""
        return self.start + done, self.start + done + take

    def cache_span_rows(self, plan: ReusePlan, start: int, stop: int) -> list[CacheSpanRows]:
        """Which missing tokens of which cache spans are computed when `[start, stop)` is."""
        return [(self.cache_span, start, stop)]

    def runs(self, plan: ReusePlan, start: int, stop: int) -> list[CacheSpanRows]:
        """Tokens without a gap that run through recurrent layers when `[start, stop)` is computed, by cache span."""
        return [(self.cache_span, start, stop)]

    def captured(self, plan: ReusePlan, position: int) -> bool:
        """Whether what is captured at a position that it reaches is captured by it."""
        return True

    def key(self) -> tuple[object, ...]:
        """What it computes as plain numbers."""
        return self.cache_span, self.start, self.stop, self.unseen, self.copied


@dataclass(slots=True)
class RepairPass:
    """Chosen tokens of the spans in `[start, stop)`, computed again in view of the whole prompt.

    `tokens`   rows that pass through every layer
    `shallow`  further rows, of a measured repair, that pass through its first layers only
    `shallow_pair_layers`  query-key pairs of those rows, and of rows whose attention is measured, times the layers
    `copied`   tokens of spans that the request first copies for itself
    `between`  cache spans whose missing text is computed along: it must see the spans repaired
    `first`    chosen tokens that passes before this one compute again
    """

    start: int
    stop: int
    tokens: int
    shallow: int = 0
    copied: int = 0
    between: tuple[int, ...] = ()
    shallow_pair_layers: int = 0
    first: int = 0

    @property
    def unseen(self) -> int:
        """Its rows see the whole prompt before them."""
        return 0

    @property
    def cache_spans(self) -> tuple[int, ...]:
        """Cache spans whose missing tokens it computes."""
        return self.between

    def stretch(self, plan: ReusePlan, done: int, take: int) -> tuple[int, int]:
        """Prompt tokens `[start, stop)` that rows `[done, done + take)` belong to.

        Rows go by position, so each finds all that it reads repaired already. Stretches leave no gap between them: one
        ends where the next row stands.
        """
        if take == self.tokens:
            return self.start, self.stop
        rows = [row for row in plan.repair.rows(plan.spans, plan.request.id) if self.start <= row < self.stop]
        for index in self.between:
            missing = _missing(plan, index)
            rows += range(missing.start, missing.stop)
        rows.sort()
        end = done + take
        return rows[done] if done else self.start, rows[end] if end < self.tokens else self.stop

    def cache_span_rows(self, plan: ReusePlan, start: int, stop: int) -> list[CacheSpanRows]:
        """Which missing tokens of which cache spans are computed when `[start, stop)` is."""
        missing = [_missing(plan, index) for index in self.between]
        cut = [(part.cache_span, max(start, part.start), min(stop, part.stop)) for part in missing]
        return [part for part in cut if part[1] < part[2]]

    def runs(self, plan: ReusePlan, start: int, stop: int) -> list[CacheSpanRows]:
        """Tokens without a gap that run through recurrent layers when `[start, stop)` is computed, by cache span.

        The first tokens of spans, which is all that is repaired of a model with such layers, and the text between them.
        """
        found = []
        for at, part in enumerate(plan.cache_spans):
            if at in self.between:
                found.append((at, part.cache_span.start + part.resume, part.cache_span.stop))
            elif part.again(plan.repair):
                found.append((at, part.cache_span.start, part.cache_span.start + part.again(plan.repair)))
        cut = [(at, max(start, first), min(stop, last)) for at, first, last in found]
        return [run for run in cut if run[1] < run[2]]

    def captured(self, plan: ReusePlan, position: int) -> bool:
        """Whether what is captured at a position that it reaches is captured by it: maps of spans are not."""
        return any(_missing(plan, index).holds(position) for index in self.between)

    def repaired_rows(self, plan: ReusePlan, start: int, stop: int) -> tuple[int, int]:
        """Which of the chosen tokens, `[first, last)` by position, are computed again when `[start, stop)` is."""
        if (start, stop) == (self.start, self.stop):
            return self.first, self.first + self.tokens - sum(_missing(plan, index).tokens for index in self.between)
        rows = plan.repair.rows(plan.spans, plan.request.id)
        return bisect_left(rows, start), bisect_left(rows, stop)

    def key(self) -> tuple[object, ...]:
        """What it computes as plain numbers."""
        return "repair", self.start, self.stop, self.tokens, self.shallow, self.copied, self.between


Work = PrefillRange | RepairPass


def work_of(plan: ReusePlan, generated: int, copies: bool, maps: bool = False) -> tuple[Work, ...]:
    """What a request computes before its next output token, in an order in which everything finds what it reads.

    The missing tokens of the cache spans by prompt position; a repair comes when every span is there, and takes along
    the text between the spans, which must see them repaired. With `copies`, a span is copied before the first row that
    reads across it. `generated` output tokens of a preempted request come last. With `maps`, a span that is computed is
    repaired before the next one is computed, for a request has one working map.
    """
    missing = [_missing(plan, index) for index in range(len(plan.cache_spans))]
    computed = [part for part in missing if part.tokens]
    work: list[Work] = list(computed)
    rule = plan.repair
    if rule.kind != "none" and (spans := plan.spans) and (rule.compares or rule.count(spans)):
        work = _with_repair(plan, computed, maps)
    if copies:
        work = _with_copies(plan, work)
    if generated:
        _append_output(plan, work, generated)
    return tuple(work) or (missing[-1],)


def _missing(plan: ReusePlan, index: int) -> PrefillRange:
    part = plan.cache_spans[index]
    cache_span = part.cache_span
    return PrefillRange(index, cache_span.start + part.resume, cache_span.stop, cache_span.start - cache_span.context)


def _with_repair(plan: ReusePlan, computed: list[PrefillRange], in_turn: bool) -> list[Work]:
    spans = plan.spans
    begins = _begins(spans) if in_turn else [spans[0].start]
    work: list[Work] = [part for part in computed if part.start < begins[0]]
    first = 0
    for begin, end in pairwise((*begins, spans[-1].stop)):
        inside = [part for part in computed if begin <= part.start < end]
        repair = _repair(plan, begin, end, computed)
        work += [*(part for part in inside if part.unseen), replace(repair, first=first)]
        first += repair.repaired_rows(plan, begin, end)[1]
    return [*work, *(part for part in computed if part.start >= spans[-1].stop)]


def _begins(spans: list[Reused]) -> list[int]:
    """Where passes begin, such that each has one span at most of which anything is computed alone."""
    missing = [span.start for span in spans if span.start + span.found < span.stop]
    return [spans[0].start, *missing[1:]]


def _repair(plan: ReusePlan, begin: int, end: int, computed: list[PrefillRange]) -> RepairPass:
    """The repair of the spans in `[begin, end)`."""
    between = [part for part in computed if not part.unseen and begin <= part.start < end]
    chosen = plan.repair.count([span for span in plan.spans if begin <= span.start < end])
    along = sum(part.tokens for part in between)
    shallow, pairs = _shallow(plan, [part for part in computed if not part.unseen and part.start >= begin])
    cache_spans = tuple(part.cache_span for part in between)
    return RepairPass(begin, end, chosen + along, shallow, between=cache_spans, shallow_pair_layers=pairs)


def _shallow(plan: ReusePlan, behind: list[PrefillRange]) -> tuple[int, int]:
    """Shallow rows of a measured repair, and their pairs times layers; `behind` is missing text from its start on.

    Of tokens that are compared, those that are not chosen, spread evenly over the spans. A probe runs the text up to
    the last profiled layer, whose attention it needs, and reads the keys of every profiled layer once more. Neighbours
    needs the attention of every token at the check layer, to all before it and to all before its span.
    """
    spans, rule = plan.spans, plan.repair
    if not rule.measured:
        return 0, 0
    if rule.probes:
        assert rule.layers is not None
        pairs = sum(part.tokens * (part.start + part.stop + 1) // 2 for part in behind)
        return sum(part.tokens for part in behind), pairs * (rule.shallow_layers + 1 + len(rule.layers))
    lengths = [span.stop - span.start for span in spans]
    shallow = sum(lengths) - rule.count(spans)
    reach = (spans[0].start + spans[-1].stop + 1) // 2  # of a row in the middle: the mean of p + 1
    pairs = shallow * rule.shallow_layers * reach
    if not rule.compares:
        pairs += sum(lengths) * reach + sum(span.start * length for span, length in zip(spans, lengths, strict=True))
    return shallow, pairs


def _with_copies(plan: ReusePlan, work: list[Work]) -> list[Work]:
    """A repair needs all spans that it looks at; any other work that sees everything, those before it."""
    placed: list[Work] = []
    copied = 0
    for part in work:
        due = _copies_before(plan, part)
        placed.append(replace(part, copied=max(0, due - copied)))
        copied = max(copied, due)
    return placed


def _copies_before(plan: ReusePlan, work: Work) -> int:
    """Tokens of spans that must have been copied before a work runs."""
    if isinstance(work, RepairPass):
        read = [part for part in plan.cache_spans if part.cache_span.start < work.stop]
    else:
        read = [part for part in plan.cache_spans if not work.unseen and part.cache_span.stop <= work.start]
    return sum(part.to_copy for part in read)


def _append_output(plan: ReusePlan, work: list[Work], generated: int) -> None:
    """Output tokens come behind the prompt, in one stretch with its last text where that is computed too."""
    last, end = len(plan.cache_spans) - 1, plan.prompt + generated
    tail = work[-1] if work else None
    if isinstance(tail, PrefillRange) and tail.cache_span == last:
        work[-1] = replace(tail, stop=end)
    else:
        work.append(PrefillRange(last, plan.prompt, end))
