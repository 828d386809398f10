"""The reuse plan of a prompt: reused and computed tokens, and the causes of missed reuse."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from spanlab.core.cache_spans import CacheSpan
from spanlab.core.repair import Repair, ReusedSpan
from spanlab.core.request import Request
from spanlab.core.tree import Node, State

if TYPE_CHECKING:
    from spanlab.core.work import Work  # which reads plans


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


class CacheSpanPlan(NamedTuple):
    """The plan of one cache span: lengths in its tokens, from its start, and the nodes that they are read from.

    seen <= length     longest beginning that was ever computed under its key
    matched <= seen    longest beginning whose KV is present
    resumable          longest beginning after which the stored entries allow a restart
    resume             where computation starts; the cache span's reused tokens are `[0, resume)`
    twin               the earlier equal cache span of this prompt whose KV it reads in full; None: no such span
    link               node of a stored repair of its beginning, behind the same text; None: no such repair
    replayed           tokens behind `resume` whose KV is read too, while a replay advances the state through them
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
        """Return the tokens at a span's beginning that a repair of first tokens covers, and a map does not."""
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
        """Return the plan of a later equal cache span, which reads the KV of this one, cache span `index`."""
        length, root = cache_span.stop - cache_span.start, self.root
        nothing = Losses(0, 0, 0, 0, 0, 0, 0, 0)
        return CacheSpanPlan(cache_span, length, length, length, length, nothing, root, root, None, index)

    @property
    def to_copy(self) -> int:
        """Tokens of a span that a request with private copies copies; in full view, only stored ones."""
        cache_span = self.cache_span
        if not cache_span.independent:
            return 0
        in_full_view = cache_span.context == cache_span.start and not cache_span.exact
        return self.resume if in_full_view else cache_span.stop - cache_span.start

    def without_reuse(self) -> CacheSpanPlan:
        """Return the plan of the same cache span without reuse, unless it reads an earlier equal one."""
        if self.twin is not None:
            return self._replace(link=None)
        root, losses = self.root, self.losses._replace(locked=self.losses.locked + self.resume)
        return CacheSpanPlan(self.cache_span, self.seen, self.matched, self.resumable, 0, losses, root, root, None)


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
        """Rows to compute through every layer: tokens not read from the store, and recomputed ones."""
        return self.prompt - self.resume + self.repair.count(self.spans)

    @property
    def repaired(self) -> int:
        """Prompt tokens that a repair recomputes, whether they were stored or have just been computed alone."""
        return 0 if self.repair.kind == "none" else self.repair.count(self.spans)

    def cache_span_at(self, position: int) -> CacheSpan:
        """Return the cache span of the token before a position."""
        return next(plan.cache_span for plan in self.cache_spans if position <= plan.cache_span.stop)

    @property
    def states(self) -> list[State]:
        """States and maps that it reads, by cache span; one that two equal spans read is listed twice."""
        return [plan.resume_state for plan in self.cache_spans if plan.resume_state is not None]

    @property
    def composed(self) -> int:
        """Number of maps of spans that it reads in full."""
        return sum(plan.cache_span.independent and plan.fully_reused for plan in self.cache_spans)

    @property
    def spans(self) -> list[ReusedSpan]:
        """Spans that a repair may recompute: their stored KV has not attended to all text before them."""
        return repairable_spans(self.cache_spans)

    def without_reuse(self) -> ReusePlan:
        """Return the plan that computes the whole prompt, for a request that does not fit with its locks."""
        return combine_plans(
            self.request, self.prompt, tuple(plan.without_reuse() for plan in self.cache_spans), self.repair
        )


def repairable_spans(cache_spans: tuple[CacheSpanPlan, ...]) -> list[ReusedSpan]:
    """Return spans whose KV has not attended to all text before them; if computed in full view, the stored part."""
    spans = []
    for plan in cache_spans:
        cache_span = plan.cache_span
        if not cache_span.exact and plan.link is None:
            stop = cache_span.stop if cache_span.context < cache_span.start else cache_span.start + plan.resume
            if stop > cache_span.start:
                spans.append(ReusedSpan(cache_span.start, stop, plan.resume))
    return spans


def combine_plans(request: Request, prompt: int, cache_spans: tuple[CacheSpanPlan, ...], repair: Repair) -> ReusePlan:
    """Combine the plans of a prompt's cache spans."""
    if len(cache_spans) == 1 and repair.kind == "none":
        plan = cache_spans[0]
        return ReusePlan(
            request, prompt, cache_spans, repair, plan.seen, plan.matched, plan.resumable, plan.resume, plan.losses
        )
    seen, matched, resumable, resume = (
        sum(lengths) for lengths in zip(*((s.seen, s.matched, s.resumable, s.resume) for s in cache_spans), strict=True)
    )
    losses = Losses(*(sum(causes) for causes in zip(*(plan.losses for plan in cache_spans), strict=True)))
    losses = losses._replace(repair=repair.num_stored(repairable_spans(cache_spans)))
    return ReusePlan(request, prompt, cache_spans, repair, seen, matched, resumable, resume, losses)


def prefix_lengths(plan: ReusePlan) -> tuple[int, int, int, int]:
    """Return the length of the prompt, and of its stored, ever seen and reused beginnings without a gap."""
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


@dataclass(slots=True, eq=False)
class TreeAllocation:
    """The memory of an admitted request: locks, reserved bytes, and the checkpoints that its prefill captures.

    `nodes` and `stored` are indexed by cache span. A capture within an independent span is a map, else a checkpoint.
    """

    plan: ReusePlan
    work: tuple[Work, ...]
    nodes: list[Node]  # locked, with their ancestors; the cache span's next insertion starts there
    stored: list[int]  # the cache span's tokens on the locked path; 0 while a whole private entry is not stored yet
    captures: list[int]  # positions in the prompt, increasing; those not yet stored
    kv_bytes: int  # reserved
    state_bytes: int  # reserved
    working_map: int  # of these, bytes of the map of a span being computed; 0 once the prompt is computed
    states: list[State]  # locked until read: a state at the first insertion, maps until the prompt is computed
    reserved_to: int  # KV of prompt and output up to here is reserved or stored
    captured: int = 0  # states stored so far, maps among them
    captured_maps: int = 0
    links: dict[int, Node] = field(default_factory=dict)  # by cache span: nodes of stored repairs, locked
    loading: bool = False

    @property
    def loads_state(self) -> bool:
        """Whether the first step starts from a stored state."""
        return any(plan.resume_state is not None for plan in self.plan.cache_spans)
