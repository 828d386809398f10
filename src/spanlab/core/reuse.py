"""What a policy decides about one prompt: which tokens are reused, which computed, and why not more."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from spanlab.core.cache_spans import CacheSpan
from spanlab.core.repair import Repair, Reused
from spanlab.core.request import Request
from spanlab.core.tree import Node, State

if TYPE_CHECKING:
    from spanlab.core.work import Work  # which reads plans


class Losses(NamedTuple):
    """Prompt tokens not reused, by cause; `records.LOSS_CAUSES` says what each means."""

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
    """The answer for one cache span: lengths in its own tokens, from its start, and the nodes they were read from.

    seen <= length     longest beginning that was ever computed under its key
    matched <= seen    longest beginning whose KV is present
    resumable          longest beginning from which the store's contents allow to restart
    resume             where computation starts; the cache span's reused tokens are `[0, resume)`
    twin               the earlier cache span of this prompt whose KV it reads, all of it; None: it has its own
    link               what a repair has left of its beginning behind the same text, and is kept; None: nothing
    replayed           tokens behind `resume` whose KV is read too, while a replay takes the state through them
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
    def whole(self) -> bool:
        """Whether nothing of it is computed."""
        return self.resume == self.cache_span.stop - self.cache_span.start

    def first(self, repair: Repair) -> int:
        """Tokens at the beginning of a span that a repair of first tokens is of, and a map is not."""
        cache_span = self.cache_span
        if not cache_span.independent or repair.kind != "first":
            return 0
        return min(repair.tokens, cache_span.stop - cache_span.start)

    def again(self, repair: Repair) -> int:
        """The same where they are computed again: not at the beginning of a prompt."""
        return 0 if self.cache_span.exact else self.first(repair)

    @property
    def stored(self) -> int:
        """Tokens whose KV is read from the store itself."""
        return self.resume + self.replayed if self.twin is None else 0

    @property
    def root(self) -> Node:
        """The root of the tree that its key leads to."""
        root = self.resume_node
        while root.parent is not None:
            root = root.parent
        return root

    def repeated(self, cache_span: CacheSpan, at: int) -> CacheSpanPlan:
        """The plan of an equal span behind this one, cache span `at`: it reads what this one finds and computes."""
        length, root = cache_span.stop - cache_span.start, self.root
        nothing = Losses(0, 0, 0, 0, 0, 0, 0, 0)
        return CacheSpanPlan(cache_span, length, length, length, length, nothing, root, root, None, at)

    @property
    def to_copy(self) -> int:
        """Tokens of a span that a request with own copies must copy; where computed in full view, what was found."""
        cache_span = self.cache_span
        if not cache_span.independent:
            return 0
        in_full_view = cache_span.context == cache_span.start and not cache_span.exact
        return self.resume if in_full_view else cache_span.stop - cache_span.start

    def without_reuse(self) -> CacheSpanPlan:
        """The same cache span computed whole, unless it reads what an earlier one computes."""
        if self.twin is not None:
            return self._replace(link=None)
        root, losses = self.root, self.losses._replace(locked=self.losses.locked + self.resume)
        return CacheSpanPlan(self.cache_span, self.seen, self.matched, self.resumable, 0, losses, root, root, None)


@dataclass(slots=True, eq=False)  # not frozen: that would cost more to make than all that it holds
class ReusePlan:
    """The answer to `match` for a whole prompt; sums over its cache spans, in prompt tokens."""

    request: Request
    prompt: int
    cache_spans: tuple[CacheSpanPlan, ...]
    repair: Repair
    seen: int
    matched: int
    resumable: int
    resume: int  # read from the store, whether or not a repair computes them again
    losses: Losses

    @property
    def reused(self) -> int:
        """Prompt tokens that are not computed: reused + sum(losses) = prompt."""
        return self.resume - self.losses.repair

    @property
    def rows(self) -> int:
        """Rows to compute through every layer: what is not read, and what a repair computes, be it a second time."""
        return self.prompt - self.resume + self.repair.count(self.spans)

    @property
    def repaired(self) -> int:
        """Prompt tokens that a repair computes again, whether they were found or have just been computed alone."""
        return 0 if self.repair.kind == "none" else self.repair.count(self.spans)

    def cache_span_at(self, position: int) -> CacheSpan:
        """The cache span that the token before a position belongs to."""
        return next(part.cache_span for part in self.cache_spans if position <= part.cache_span.stop)

    @property
    def states(self) -> list[State]:
        """States and maps that it reads, by cache span; one that two equal spans read comes twice."""
        return [part.resume_state for part in self.cache_spans if part.resume_state is not None]

    @property
    def composed(self) -> int:
        """Maps of spans that it reads whole."""
        return sum(part.cache_span.independent and part.whole for part in self.cache_spans)

    @property
    def spans(self) -> list[Reused]:
        """What a repair may choose from: spans whose stored KV has not seen all that stands before them."""
        return repairable(self.cache_spans)

    def without_reuse(self) -> ReusePlan:
        """The same prompt computed whole, for where holding on to what it reuses would leave it no room."""
        return gather(self.request, self.prompt, tuple(plan.without_reuse() for plan in self.cache_spans), self.repair)


def repairable(cache_spans: tuple[CacheSpanPlan, ...]) -> list[Reused]:
    """Spans whose KV has not seen all that stands before them; of those computed in full view, what was found."""
    spans = []
    for plan in cache_spans:
        cache_span = plan.cache_span
        if not cache_span.exact and plan.link is None:
            stop = cache_span.stop if cache_span.context < cache_span.start else cache_span.start + plan.resume
            if stop > cache_span.start:
                spans.append(Reused(cache_span.start, stop, plan.resume))
    return spans


def gather(request: Request, prompt: int, cache_spans: tuple[CacheSpanPlan, ...], repair: Repair) -> ReusePlan:
    """A prompt's plan out of its cache spans'."""
    if len(cache_spans) == 1 and repair.kind == "none":
        one = cache_spans[0]
        return ReusePlan(
            request, prompt, cache_spans, repair, one.seen, one.matched, one.resumable, one.resume, one.losses
        )
    seen, matched, resumable, resume = (
        sum(lengths) for lengths in zip(*((s.seen, s.matched, s.resumable, s.resume) for s in cache_spans), strict=True)
    )
    losses = Losses(*(sum(causes) for causes in zip(*(plan.losses for plan in cache_spans), strict=True)))
    losses = losses._replace(repair=repair.lost(repairable(cache_spans)))
    return ReusePlan(request, prompt, cache_spans, repair, seen, matched, resumable, resume, losses)


def prefix_lengths(plan: ReusePlan) -> tuple[int, int, int, int]:
    """Lengths of the prompt and of its beginnings that are stored, were ever seen, and are reused without a gap."""
    if len(plan.cache_spans) == 1:
        return plan.prompt, plan.matched, plan.seen, plan.resume
    matched, seen, resume = (
        _without_gap(plan, lengths)
        for lengths in zip(*((s.matched, s.seen, s.resume) for s in plan.cache_spans), strict=True)
    )
    return plan.prompt, matched, seen, resume


def _without_gap(plan: ReusePlan, lengths: tuple[int, ...]) -> int:
    end = 0
    for part, length in zip(plan.cache_spans, lengths, strict=True):
        end = part.cache_span.start + length
        if end < part.cache_span.stop:
            break
    return end


@dataclass(slots=True, eq=False)
class TreeAllocation:
    """What an admitted request holds: locks, reserved bytes, and the checkpoints that its prefill will leave.

    `nodes` and `stored` go by cache span. A capture within an independent span is a map, any other a checkpoint.
    """

    plan: ReusePlan
    work: tuple[Work, ...]
    nodes: list[Node]  # locked, with their ancestors; the cache span's next insertion starts there
    stored: list[int]  # the cache span's tokens on the locked path; 0 while a whole private entry is not stored yet
    captures: list[int]  # positions in the prompt, increasing; those not yet stored
    kv_bytes: int  # reserved
    state_bytes: int  # reserved
    working_map: int  # of these, bytes of the map of a span that is computed; none once the prompt is
    states: list[State]  # locked until they have been read: one by the first insertion, maps until the prompt is there
    reserved_to: int  # KV of prompt and output up to here is reserved or stored
    captured: int = 0  # states stored so far, maps among them
    captured_maps: int = 0
    links: dict[int, Node] = field(default_factory=dict)  # by cache span: what is kept of repairs, locked
    loading: bool = False

    @property
    def loads_state(self) -> bool:
        """Whether the first step starts from a stored state."""
        return any(part.resume_state is not None for part in self.plan.cache_spans)
