"""What a request reuses and computes: the plan of a match, the work that it leaves, and batches
that decode."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from typing import Any, NamedTuple, Protocol

from spanlab.core.repair import Repair, ReusedSpan
from spanlab.core.request import Request
from spanlab.core.tree import CacheSpan, Node, State

# ------------------------------------------------------------------------------
# The largest memory of one request, whatever the store contains.
# ------------------------------------------------------------------------------


class Need(NamedTuple):
    """Largest memory of one request by itself: tokens, its private copies among them, and sequences
    of blocks.

    Every sequence of blocks, of a cache span or of a copy, ends in a block that may be nearly
    empty.
    """

    tokens: int
    copies: int
    sequences: int
    kv_bytes: int
    state_bytes: int


# ------------------------------------------------------------------------------
# The reuse plan of a prompt: reused and computed tokens, and the causes of missed reuse.
# ------------------------------------------------------------------------------


class Losses(NamedTuple):
    """Prompt tokens that are not reused, by cause; `records.LOSS_CAUSES` defines the causes."""

    never_seen: int
    never_stored: int
    kv_evicted: int
    state_evicted: int
    state_never_placed: int
    alignment: int
    last_token: int
    locked: int
    repair: int = 0


class Match(NamedTuple):
    """A prompt or cache span beside the contents of a cache, in tokens from its start.

    length     all its tokens
    seen       longest beginning that was ever computed under its key
    usable     of these, without a last token that is computed for its logits
    aligned    of these, whole units of reuse
    matched    longest beginning whose KV is present, at most `usable`
    present    of these, whole units of reuse, at most `aligned`
    resume     where computation starts
    tombstone  the deepest position in [resume, present] whose state was stored once; `resume`
               without one
    unit       tokens that are reused together: a block, or the grid of the recurrent kernel
    """

    length: int
    seen: int
    usable: int
    aligned: int
    matched: int
    present: int
    resume: int
    tombstone: int
    unit: int


def losses_of(match: Match, evicted: int, refused: int = 0, stranded: int = 0) -> Losses:
    """Attribute every token behind the resume position to one cause, so that reused + lost =
    length.

    `evicted`   tokens behind the matched ones that were stored and evicted since
    `refused`   tokens of the longest beginning that a store refused, because it was full of locked
                entries
    `stranded`  tokens behind the matched ones that are stored where this prompt cannot read them

    A token counts once. The causes are tried in this order, and each takes no more than the tokens
    that are left: a unit of which only a part is present; a refusal; evictions; stranded blocks;
    the rest was never stored.
    """
    partial = min(match.matched % match.unit, match.aligned - match.present)
    missing = match.aligned - match.present - partial
    locked = min(max(0, refused - match.matched), missing)
    kv_evicted = min(evicted, missing - locked)
    unreachable = min(stranded, missing - locked - kv_evicted)
    return Losses(
        never_seen=match.length - match.seen,
        never_stored=missing - locked - kv_evicted - unreachable,
        kv_evicted=kv_evicted,
        state_evicted=match.tombstone - match.resume,
        state_never_placed=match.present - match.tombstone,
        alignment=match.usable - match.aligned + partial + unreachable,
        last_token=match.seen - match.usable,
        locked=locked,
    )


class CacheSpanPlan(NamedTuple):
    """The plan of one cache span: lengths in its tokens, from its start, and the nodes that they
    are read from.

    seen <= length     longest beginning that was ever computed under its key
    matched <= seen    longest beginning whose KV is present
    resumable          longest beginning after which the stored entries allow a restart
    resume             where computation starts; the cache span's reused tokens are `[0, resume)`
    twin               the earlier equal cache span of this prompt whose KV it reads in full; None:
                       no such span
    link               node of a stored repair of its beginning, behind the same text; None: no such
                       repair
    replayed           tokens behind `resume` whose KV is read too, while a replay advances the
                       state through them
    """

    cache_span: CacheSpan
    seen: int
    matched: int
    resumable: int
    resume: int
    losses: Losses
    match_node: Node
    resume_node: Node  # the deepest one that ends within the reused tokens
    resume_state: State | None
    twin: int | None = None
    link: Node | None = None
    replayed: int = 0

    @property
    def fully_reused(self) -> bool:
        """Whether none of its tokens is computed."""
        return self.resume == self.cache_span.stop - self.cache_span.start

    def repaired_prefix(self, repair: Repair) -> int:
        """Return the tokens at a span's beginning that a repair of first tokens covers, and a map
        does not."""
        cache_span = self.cache_span
        if not cache_span.independent or repair.kind != "first":
            return 0
        return min(repair.tokens, cache_span.stop - cache_span.start)

    def recomputed_prefix(self, repair: Repair) -> int:
        """Return those of them that are recomputed: none at the beginning of a prompt."""
        return 0 if self.cache_span.exact else self.repaired_prefix(repair)

    @property
    def stored(self) -> int:
        """Tokens whose KV is read from the store."""
        return self.resume + self.replayed if self.twin is None else 0

    @property
    def root(self) -> Node:
        """The root of its tree."""
        root = self.resume_node
        while root.parent is not None:
            root = root.parent
        return root

    def repeated(self, cache_span: CacheSpan, index: int) -> CacheSpanPlan:
        """Return the plan of a later equal cache span, which reads the KV of this one, cache span
        `index`."""
        length, root = cache_span.stop - cache_span.start, self.root
        nothing = Losses(0, 0, 0, 0, 0, 0, 0, 0)
        return CacheSpanPlan(
            cache_span, length, length, length, length, nothing, root, root, None, index
        )

    @property
    def to_copy(self) -> int:
        """Tokens of a span that a request with private copies copies; in full view, only stored
        ones."""
        cache_span = self.cache_span
        if not cache_span.independent:
            return 0
        in_full_view = cache_span.context == cache_span.start and not cache_span.exact
        return self.resume if in_full_view else cache_span.stop - cache_span.start

    def without_reuse(self) -> CacheSpanPlan:
        """Return the plan of the same cache span without reuse, unless it reads an earlier equal
        one."""
        if self.twin is not None:
            return self._replace(link=None)
        root, losses = self.root, self.losses._replace(locked=self.losses.locked + self.resume)
        return CacheSpanPlan(
            self.cache_span, self.seen, self.matched, self.resumable, 0, losses, root, root, None
        )


@dataclass(slots=True, eq=False)  # not frozen: a frozen one takes longer to construct
class ReusePlan:
    """The result of `match` for a whole prompt: sums over its cache spans, in prompt tokens."""

    request: Request
    prompt: int
    cache_spans: tuple[CacheSpanPlan, ...]
    repair: Repair
    seen: int
    matched: int
    resumable: int
    resume: int  # read from the store, whether or not a repair recomputes them
    losses: Losses

    @property
    def reused(self) -> int:
        """Prompt tokens that are not computed: reused + sum(losses) = prompt."""
        return self.resume - self.losses.repair

    @property
    def rows(self) -> int:
        """Rows to compute through every layer: tokens not read from the store, and recomputed
        ones."""
        return self.prompt - self.resume + self.repair.count(self.spans)

    @property
    def repaired(self) -> int:
        """Prompt tokens that a repair recomputes, whether they were stored or have just been
        computed alone."""
        return 0 if self.repair.kind == "none" else self.repair.count(self.spans)

    def cache_span_at(self, position: int) -> CacheSpan:
        """Return the cache span of the token before a position."""
        return next(
            plan.cache_span for plan in self.cache_spans if position <= plan.cache_span.stop
        )

    @property
    def states(self) -> list[State]:
        """States and maps that it reads, by cache span; one that two equal spans read is listed
        twice."""
        return [plan.resume_state for plan in self.cache_spans if plan.resume_state is not None]

    @property
    def composed(self) -> int:
        """Number of maps of spans that it reads in full."""
        return sum(plan.cache_span.independent and plan.fully_reused for plan in self.cache_spans)

    @property
    def spans(self) -> list[ReusedSpan]:
        """Spans that a repair may recompute: their stored KV has not attended to all text before
        them."""
        return repairable_spans(self.cache_spans)

    def without_reuse(self) -> ReusePlan:
        """Return the plan that computes the whole prompt, for a request that does not fit with its
        locks."""
        return combine_plans(
            self.request,
            self.prompt,
            tuple(plan.without_reuse() for plan in self.cache_spans),
            self.repair,
        )


def repairable_spans(cache_spans: tuple[CacheSpanPlan, ...]) -> list[ReusedSpan]:
    """Return spans whose KV has not attended to all text before them; if computed in full view, the
    stored part."""
    spans = []
    for plan in cache_spans:
        cache_span = plan.cache_span
        if not cache_span.exact and plan.link is None:
            stop = (
                cache_span.stop
                if cache_span.context < cache_span.start
                else cache_span.start + plan.resume
            )
            if stop > cache_span.start:
                spans.append(ReusedSpan(cache_span.start, stop, plan.resume))
    return spans


def combine_plans(
    request: Request, prompt: int, cache_spans: tuple[CacheSpanPlan, ...], repair: Repair
) -> ReusePlan:
    """Combine the plans of a prompt's cache spans."""
    if len(cache_spans) == 1 and repair.kind == "none":
        plan = cache_spans[0]
        return ReusePlan(
            request,
            prompt,
            cache_spans,
            repair,
            plan.seen,
            plan.matched,
            plan.resumable,
            plan.resume,
            plan.losses,
        )
    seen, matched, resumable, resume = (
        sum(lengths)
        for lengths in zip(
            *((s.seen, s.matched, s.resumable, s.resume) for s in cache_spans), strict=True
        )
    )
    losses = Losses(
        *(sum(causes) for causes in zip(*(plan.losses for plan in cache_spans), strict=True))
    )
    losses = losses._replace(repair=repair.num_stored(repairable_spans(cache_spans)))
    return ReusePlan(request, prompt, cache_spans, repair, seen, matched, resumable, resume, losses)


def prefix_lengths(plan: ReusePlan) -> tuple[int, int, int, int]:
    """Return the length of the prompt, and of its stored, ever seen and reused beginnings without a
    gap."""
    if len(plan.cache_spans) == 1:
        return plan.prompt, plan.matched, plan.seen, plan.resume
    matched, seen, resume = (
        _without_gap(plan, lengths)
        for lengths in zip(*((s.matched, s.seen, s.resume) for s in plan.cache_spans), strict=True)
    )
    return plan.prompt, matched, seen, resume


def _without_gap(plan: ReusePlan, lengths: tuple[int, ...]) -> int:
    end = 0
    for span_plan, length in zip(plan.cache_spans, lengths, strict=True):
        end = span_plan.cache_span.start + length
        if end < span_plan.cache_span.stop:
            break
    return end


class Allocation(Protocol):
    """The memory and the work of an admitted request.

    `work`      computation before its next output token, in order
    `captures`  positions at which its prefill captures recurrent states
    `captured`  states stored for it so far; `captured_maps` of them are maps of spans
    `loading`   KV that it reuses is still being loaded from a lower tier, so that it cannot run
    """

    plan: ReusePlan
    work: tuple[Work, ...]
    captures: list[int]
    captured: int
    captured_maps: int
    loading: bool

    @property
    def loads_state(self) -> bool:
        """Whether its first step starts from a stored state."""
        ...


@dataclass(slots=True, eq=False)
class TreeAllocation:
    """The memory of an admitted request: locks, reserved bytes, and the checkpoints that its
    prefill captures.

    `nodes` and `stored` are indexed by cache span. A capture within an independent span is a map,
    else a checkpoint.
    """

    plan: ReusePlan
    work: tuple[Work, ...]
    nodes: list[Node]  # locked, with their ancestors; the cache span's next insertion starts there
    # the cache span's tokens on the locked path; 0 while a whole private entry is not stored yet
    stored: list[int]
    captures: list[int]  # positions in the prompt, increasing; those not yet stored
    kv_bytes: int  # reserved
    state_bytes: int  # reserved
    # of these, bytes of the map of a span being computed; 0 once the prompt is computed
    working_map: int
    # locked until read: a state at the first insertion, maps until the prompt is computed
    states: list[State]
    reserved_to: int  # KV of prompt and output up to here is reserved or stored
    captured: int = 0  # states stored so far, maps among them
    captured_maps: int = 0
    # by cache span: nodes of stored repairs, locked
    links: dict[int, Node] = field(default_factory=dict)
    loading: bool = False

    @property
    def loads_state(self) -> bool:
        """Whether the first step starts from a stored state."""
        return any(plan.resume_state is not None for plan in self.plan.cache_spans)


# ------------------------------------------------------------------------------
# The ordered list of work that follows from a reuse plan.
# ------------------------------------------------------------------------------

#: Cache span, and the prompt or output tokens `[start, stop)` of it.
CacheSpanRows = tuple[int, int, int]


@dataclass(slots=True)
class PrefillRange:
    """Prompt or output tokens `[start, stop)` of one cache span, computed in the cache span's
    context.

    `unseen`  tokens of the prompt before a row that it does not attend to: row p attends to p + 1 -
              unseen
    `copied`  tokens of spans that the request copies first
    """

    cache_span: int
    start: int
    stop: int
    unseen: int = 0
    copied: int = 0

    @property
    def shallow(self) -> int:
        """Number of rows dropped before the last layer: none."""
        return 0

    @property
    def tokens(self) -> int:
        """Rows that pass through every layer."""
        return self.stop - self.start

    @property
    def cache_spans(self) -> tuple[int, ...]:
        """Cache spans whose missing tokens are computed."""
        return (self.cache_span,)

    def covers(self, position: int) -> bool:
        """Whether the state at a position follows one of its rows."""
        return self.start < position <= self.stop

    def token_range(self, plan: ReusePlan, computed: int, take: int) -> tuple[int, int]:
        """Return the prompt tokens `[start, stop)` that rows `[computed, computed + take)` belong
        to."""
        return self.start + computed, self.start + computed + take

    def cache_span_rows(self, plan: ReusePlan, start: int, stop: int) -> list[CacheSpanRows]:
        """Return the missing tokens, by cache span, that computing `[start, stop)` yields."""
        return [(self.cache_span, start, stop)]

    def runs(self, plan: ReusePlan, start: int, stop: int) -> list[CacheSpanRows]:
        """Return the contiguous tokens, by cache span, that recurrent layers process for `[start,
        stop)`."""
        return [(self.cache_span, start, stop)]

    def captures_at(self, plan: ReusePlan, position: int) -> bool:
        """Whether this work captures the state at a position that it reaches."""
        return True

    def key(self) -> tuple[object, ...]:
        """The work as plain numbers."""
        return self.cache_span, self.start, self.stop, self.unseen, self.copied


@dataclass(slots=True)
class RepairPass:
    """Chosen tokens of the spans in `[start, stop)`, recomputed in view of the whole prompt.

    `tokens`   rows that pass through every layer
    `shallow`  further rows, of a measured repair, that pass through its first layers only
    `shallow_pair_layers`  query-key pairs of those rows, and of rows whose attention is measured,
                           times the layers
    `copied`   tokens of spans that the request copies first
    `between`  cache spans whose missing text is computed along, since it must attend to the
               repaired spans
    `first`    number of chosen tokens that earlier passes recompute
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
        """Number of earlier prompt tokens that its rows do not attend to: none."""
        return 0

    @property
    def cache_spans(self) -> tuple[int, ...]:
        """Cache spans whose missing tokens are computed."""
        return self.between

    def token_range(self, plan: ReusePlan, computed: int, take: int) -> tuple[int, int]:
        """Return the prompt tokens `[start, stop)` that rows `[computed, computed + take)` belong
        to.

        Rows go by position, so the tokens that a row reads are repaired before it. Ranges leave no
        gap between them: each ends at the next row.
        """
        if take == self.tokens:
            return self.start, self.stop
        rows = [
            row
            for row in plan.repair.rows(plan.spans, plan.request.id)
            if self.start <= row < self.stop
        ]
        for index in self.between:
            missing = _missing(plan, index)
            rows += range(missing.start, missing.stop)
        rows.sort()
        end = computed + take
        return rows[computed] if computed else self.start, rows[
            end
        ] if end < self.tokens else self.stop

    def cache_span_rows(self, plan: ReusePlan, start: int, stop: int) -> list[CacheSpanRows]:
        """Return the missing tokens, by cache span, that computing `[start, stop)` yields."""
        missing = [_missing(plan, index) for index in self.between]
        runs = [
            (prefill.cache_span, max(start, prefill.start), min(stop, prefill.stop))
            for prefill in missing
        ]
        return [run for run in runs if run[1] < run[2]]

    def runs(self, plan: ReusePlan, start: int, stop: int) -> list[CacheSpanRows]:
        """Return the contiguous tokens, by cache span, that recurrent layers process for `[start,
        stop)`.

        These are the first tokens of spans, which is all that is repaired in a model with such
        layers, and the text between.
        """
        ranges = []
        for index, span in enumerate(plan.cache_spans):
            if index in self.between:
                ranges.append((index, span.cache_span.start + span.resume, span.cache_span.stop))
            elif repaired := span.recomputed_prefix(plan.repair):
                ranges.append((index, span.cache_span.start, span.cache_span.start + repaired))
        runs = [(index, max(start, first), min(stop, last)) for index, first, last in ranges]
        return [run for run in runs if run[1] < run[2]]

    def captures_at(self, plan: ReusePlan, position: int) -> bool:
        """Whether this work captures the state at a position that it reaches; it captures no maps
        of spans."""
        return any(_missing(plan, index).covers(position) for index in self.between)

    def repaired_rows(self, plan: ReusePlan, start: int, stop: int) -> tuple[int, int]:
        """Return which chosen tokens, `[first, last)` by position, computing `[start, stop)`
        recomputes."""
        if (start, stop) == (self.start, self.stop):
            return self.first, self.first + self.tokens - sum(
                _missing(plan, index).tokens for index in self.between
            )
        rows = plan.repair.rows(plan.spans, plan.request.id)
        return bisect_left(rows, start), bisect_left(rows, stop)

    def key(self) -> tuple[object, ...]:
        """The work as plain numbers."""
        return "repair", self.start, self.stop, self.tokens, self.shallow, self.copied, self.between


Work = PrefillRange | RepairPass


def work_of(plan: ReusePlan, generated: int, copies: bool, maps: bool = False) -> tuple[Work, ...]:
    """List the work of a request before its next output token, in an order that satisfies all
    reads.

    First come the missing tokens of the cache spans, by prompt position. A repair follows when
    every span is present, and includes the text between the spans, which must attend to the
    repaired spans. With `copies`, a span is copied before the first row that reads across it.
    `generated` output tokens of a preempted request come last. With `maps`, a computed span is
    repaired before the next one is computed, since a request has one working map.
    """
    missing = [_missing(plan, index) for index in range(len(plan.cache_spans))]
    computed = [prefill for prefill in missing if prefill.tokens]
    work: list[Work] = list(computed)
    rule = plan.repair
    if rule.kind != "none" and (spans := plan.spans) and (rule.compares or rule.count(spans)):
        work = _with_repair(plan, computed, maps)
    if copies:
        work = _with_copies(plan, work)
    if generated:
        # append output tokens behind the prompt, in one range with its last text where that is
        # computed too
        last, end = len(plan.cache_spans) - 1, plan.prompt + generated
        tail = work[-1] if work else None
        if isinstance(tail, PrefillRange) and tail.cache_span == last:
            work[-1] = replace(tail, stop=end)
        else:
            work.append(PrefillRange(last, plan.prompt, end))
    return tuple(work) or (missing[-1],)


def _missing(plan: ReusePlan, index: int) -> PrefillRange:
    span = plan.cache_spans[index]
    cache_span = span.cache_span
    start, unseen = cache_span.start + span.resume, cache_span.start - cache_span.context
    return PrefillRange(index, start, cache_span.stop, unseen)


def _with_repair(plan: ReusePlan, computed: list[PrefillRange], in_turn: bool) -> list[Work]:
    spans = plan.spans
    begins = [spans[0].start]
    if in_turn:
        # at most one span of each pass has tokens to compute alone
        missing = [span.start for span in spans if span.start + span.stored < span.stop]
        begins += missing[1:]
    work: list[Work] = [prefill for prefill in computed if prefill.start < begins[0]]
    first = 0
    for begin, end in pairwise((*begins, spans[-1].stop)):
        inside = [prefill for prefill in computed if begin <= prefill.start < end]
        between = [prefill for prefill in inside if not prefill.unseen]
        chosen = plan.repair.count([span for span in spans if begin <= span.start < end])
        shallow, pairs = _shallow(
            plan, [prefill for prefill in computed if not prefill.unseen and prefill.start >= begin]
        )
        repair = RepairPass(
            begin,
            end,
            chosen + sum(prefill.tokens for prefill in between),
            shallow,
            between=tuple(prefill.cache_span for prefill in between),
            shallow_pair_layers=pairs,
        )
        work += [*(prefill for prefill in inside if prefill.unseen), replace(repair, first=first)]
        first += repair.repaired_rows(plan, begin, end)[1]
    return [*work, *(prefill for prefill in computed if prefill.start >= spans[-1].stop)]


def _shallow(plan: ReusePlan, behind: list[PrefillRange]) -> tuple[int, int]:
    """Return the shallow rows of a measured repair, and their pairs times layers.

    `behind` is the missing text from the start of the repair on. Of compared tokens, shallow rows
    are those not chosen, spread evenly over the spans. A probe runs the text up to the last
    profiled layer, whose attention it needs, and reads the keys of every profiled layer once more.
    Neighbours needs the attention of every token at the check layer, to all tokens before it and to
    all before its span.
    """
    spans, rule = plan.spans, plan.repair
    if not rule.measured:
        return 0, 0
    if rule.probes:
        assert rule.layers is not None
        pairs = sum(prefill.tokens * (prefill.start + prefill.stop + 1) // 2 for prefill in behind)
        return sum(prefill.tokens for prefill in behind), pairs * (
            rule.shallow_layers + 1 + len(rule.layers)
        )
    lengths = [span.stop - span.start for span in spans]
    shallow = sum(lengths) - rule.count(spans)
    reach = (spans[0].start + spans[-1].stop + 1) // 2  # of a row in the middle: the mean of p + 1
    pairs = shallow * rule.shallow_layers * reach
    if not rule.compares:
        pairs += sum(lengths) * reach + sum(
            span.start * length for span, length in zip(spans, lengths, strict=True)
        )
    return shallow, pairs


def _with_copies(plan: ReusePlan, work: list[Work]) -> list[Work]:
    """Add copies: a repair needs all spans that it reads, other work with full view those before
    it."""
    result: list[Work] = []
    copied = 0
    for item in work:
        # the tokens of spans that must have been copied before a work runs
        if isinstance(item, RepairPass):
            sources = [span for span in plan.cache_spans if span.cache_span.start < item.stop]
        else:
            sources = [
                span
                for span in plan.cache_spans
                if not item.unseen and span.cache_span.stop <= item.start
            ]
        required = sum(span.to_copy for span in sources)
        result.append(replace(item, copied=max(0, required - copied)))
        copied = max(copied, required)
    return result


# ------------------------------------------------------------------------------
# The sequences that decode together, and the memory that they have.
# ------------------------------------------------------------------------------


class DecodeBatch:
    """Sequences that decode a token each in every step, in order of service; others join behind
    them, or leave.

    `sequences`   of the scheduler; a new list after each change, since steps keep it
    `members`     by order of joining: allocation, and position of the next token without memory,
                  less `steps`
    `steps`       decode steps that have memory, since the batch began
    `num_joined`  sequences that ever joined
    """

    __slots__ = ("_bases", "members", "num_joined", "sequences", "steps")

    def __init__(self, sequences: Sequence[Any] = (), steps: int = 0) -> None:
        """`steps` of the sequences' tokens have memory, although they are not computed yet."""
        self.sequences: list[Any] = []
        self.members: dict[int, tuple[Any, int]] = {}
        self.num_joined = self.steps = self._bases = 0
        self.join(sequences)
        self.steps = steps

    def join(self, sequences: Sequence[Any]) -> None:
        """Add sequences at the end."""
        self.sequences = [*self.sequences, *sequences]
        for sequence in sequences:
            base = sequence.prompt + sequence.generated - 1 - self.steps
            self.members[self.num_joined] = sequence.allocation, base
            self.num_joined += 1
            self._bases += base

    def leave(self, at: int) -> None:
        """Remove the sequence at an index."""
        self.sequences = self.sequences[:at] + self.sequences[at + 1 :]
        self._bases -= self.members.pop(next(islice(self.members, at, None)))[1]

    def context(self) -> int:
        """Return the tokens with memory, of all sequences together."""
        return self._bases + self.steps * len(self.members)

    def allocations(self) -> list[Any]:
        """Return the allocations of the sequences, in order."""
        return [allocation for allocation, _ in self.members.values()]

    def starts(self) -> list[int]:
        """Return the position of each sequence's next token without memory."""
        steps = self.steps
        return [base + steps for _, base in self.members.values()]
