"""Fixes that raise the hit rate: each is simulated on the log, and ranked by gain and memory."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from spanlab.build import build_placer, build_policy, build_prefill_time
from spanlab.core.placement.rules import (
    PLACEMENTS,
    PROGRESS,
    ArmFacts,
    Placer,
    PrefillInfo,
    Rule,
    retention,
)
from spanlab.core.policies.block_pool import BLOCK, alignment_of, block_shape, blocks_of
from spanlab.model_spec import GIB, ModelSpec
from spanlab.offline.bound import most_reused_tokens
from spanlab.offline.forest import Ints, ServiceOrder, find_reuses
from spanlab.offline.replay import (
    CacheRules,
    Contents,
    Distances,
    Paths,
    ReplayRequests,
    ReplayResult,
    SpanReuse,
    in_cached_order,
    replay,
    span_reuse,
    stack_distances,
)
from spanlab.report.table import rounded_up
from spanlab.settings.study import Study
from spanlab.study.prepare import room_gib
from spanlab.workloads.logs.bodies import Rewrite
from spanlab.workloads.logs.log import Ids, Log
from spanlab.workloads.logs.mends import MENDS, TOGETHER, Survey, Together
from spanlab_sim.bounds import PrefillTime

# ------------------------------------------------------------------------------
# Cache rules of a study's arms, for the replay of a log.
# ------------------------------------------------------------------------------

PREFIX_POLICIES = ("tree", "blocks")
ORDERS = ("lru", "lru_whole_leaves")


@dataclass(frozen=True)
class SpanRules:
    """A cache of spans that match at any position.

    `first`  tokens of each reused span that a repair recomputes; `share` is the recomputed share of
             the other tokens
    """

    capacity_tokens: float
    first: int = 0
    share: float = 0.0


Rules = CacheRules | SpanRules | None  # None: nothing is stored


def rules_of(study: Study, name: str, longest: int) -> Rules:
    """Return an arm's rules for prompts of at most `longest` tokens; ValueError if a replay cannot
    express them."""
    arm, model = study.arms[name], study.model
    if not arm.keep:
        return None
    if arm.policy_name not in PREFIX_POLICIES:
        raise ValueError(
            f"arms.{name}.policy={arm.policy_name} with analyses=explain: expected null or a pool"
        )
    if not arm.passages.are_default:
        raise ValueError(
            f"arms.{name}.passages with analyses=explain: expected given and all; it tries cached_order"
        )
    if arm.eviction not in ORDERS:
        raise ValueError(f"arms.{name}.eviction={arm.eviction} with analyses=explain: expected lru")
    if arm.spans is not None:
        capacity = capacity_of(study)
        spans, repair = arm.spans, arm.spans.repair
        supported = (
            spans.provenance == "isolated"
            and spans.sharing == "canonical"
            and repair.kind in ("none", "first")
        )
        if not supported or model.is_hybrid:
            setting = f"arms.{name}.spans with analyses=explain and model.name={model.name}"
            raise ValueError(
                f"{setting}: expected strategy pic or lego_link, and a model of attention layers alone"
            )
        first = repair.k if repair.kind == "first" else 0
        assert first is not None, "a repair of the first tokens says how many"
        return SpanRules(capacity / model.kv_bytes_per_token, first)
    if arm.pool is None:
        return _tree(study, name, longest)
    if arm.pool.retention != 0 and (model.is_hybrid or model.has_windows):
        raise ValueError(
            f"arms.{name}.pool.retention={arm.pool.retention} with analyses=explain: expected 0"
        )
    return pool_rules(model, capacity_of(study), arm.pool.block_size)


def capacity_of(study: Study) -> int:
    """Return the bytes of the store, for KV and states together."""
    for key in ("kv_gib", "state_gib", "state_ratio", "entries"):
        value = getattr(study.store, key)
        if value is not None:
            raise ValueError(
                f"store.{key}={value} with analyses=explain: expected store.total_gib, one budget for all"
            )
    return study.store.budget.total_bytes


def pool_rules(model: ModelSpec, capacity: int, block_size: int | None) -> CacheRules:
    """Return the rules of a pool with blocks of `block_size` tokens; None: vLLM's block size for
    the model."""
    shape = block_shape(model, model.kv_bytes_per_token, block_size)
    full = [rule for rule in shape.layout if rule.kind == "full"]
    if not full:
        raise ValueError(
            f"model.name={model.name} with analyses=explain: expected a layer that reads all tokens"
        )
    capacity_bytes = shape.pool(capacity).num_blocks * shape.block_bytes
    rules = CacheRules(shape.size, len(full) * shape.block_bytes, capacity_bytes, pooled=True)
    # what a prefix needs at its end: a state of each group, or the blocks of its window
    ends = 0
    for rule in shape.layout:
        if rule.kind == "window":
            ends += blocks_of(rule.span - 1, rule.size)
        elif rule.kind == "chunk":
            ends += blocks_of(rule.span, rule.size)
        elif rule.kind == "state":
            ends += 1
    unit = alignment_of(shape.layout)
    placer = retention(facts=ArmFacts(unit, unit, 0, 0))
    return (
        replace(rules, state_bytes=ends * shape.block_bytes, unit=unit, placer=placer)
        if ends
        else rules
    )


def _tree(study: Study, name: str, longest: int) -> CacheRules:
    arm, model, capacity = study.arms[name], study.model, capacity_of(study)
    rules = CacheRules(arm.block_size, arm.block_size * model.kv_bytes_per_token, capacity)
    if not model.is_hybrid:
        return rules
    # placements of states that depend on more than lengths of prompts
    kinds = [
        kind
        for kind in (arm.placement.kind, *arm.placement.also)
        if kind in PLACEMENTS.needing(PROGRESS)
    ]
    if kinds:
        raise ValueError(
            f"arms.{name}.placement.kind={kinds[0]} with analyses=explain: expected one of prompts alone"
        )
    for key, usual in (("recovery", "recompute"), ("state_format", "native")):
        if getattr(arm, key) != usual:
            raise ValueError(
                f"arms.{name}.{key}={getattr(arm, key)} with analyses=explain: expected {usual}"
            )
    if arm.cache.states_per_path is not None:
        setting = f"arms.{name}.cache.states_per_path={arm.cache.states_per_path}"
        raise ValueError(f"{setting} with analyses=explain: expected null")
    return replace(
        rules,
        state_bytes=model.state_bytes,
        unit=max(arm.block_size, model.grid),
        placer=build_placer(model, arm, 0, longest),
        outputs=False,
        to_state=arm.cache.store_to == "state",
    )


def check_fits(study: Study, name: str, rules: Rules, tokens: int, request: int) -> None:
    """Raise ValueError where the memory of an arm is too small for the longest prompt alone."""
    if not isinstance(rules, CacheRules):
        return
    need = -(-tokens // rules.block) * rules.block_bytes + rules.state_bytes
    if need > rules.capacity_bytes:
        raise ValueError(
            f"store.total_gib={study.store.total_gib} with arms.{name}: expected at least {need / GIB:.3g} GiB, for "
            f"request {request} of the log alone has {tokens:,} tokens of {study.model.name}"
        )


# ------------------------------------------------------------------------------
# A log's paths and spans, and the tokens that each arm would reuse.
# ------------------------------------------------------------------------------

_LADDER = (1, 2, 3, 5)  # sizes of a curve: these, times the powers of ten


@dataclass(frozen=True)
class Facts:
    """A log with ids of blocks or contents, and its derived paths and spans."""

    log: Log

    @cached_property
    def contents(self) -> Contents:
        log = self.log
        return Contents(log.pieces, log.lengths, log.opens, log.free, log.starts, log.sessions)

    @cached_property
    def paths(self) -> Paths:
        return self.contents.paths()

    @cached_property
    def spans(self) -> SpanReuse:
        return span_reuse(self.contents)

    @cached_property
    def in_logged_order(self) -> ReplayRequests:
        """The requests with passages in the order of the log."""
        outputs = self.log.output_lens.astype(np.int64)
        # the end of the first span of each prompt that has several: the end of a system prompt
        log = self.log
        begins = np.append(np.flatnonzero(log.opens), len(log.opens))
        second = begins[
            np.minimum(np.searchsorted(begins, log.starts[:-1], side="right"), len(begins) - 1)
        ]
        ends, stops = np.minimum(second, log.starts[1:]).tolist(), log.starts[1:].tolist()
        first = zip(log.starts[:-1].tolist(), ends, stops, strict=True)
        first_spans = [
            (int(log.lengths[start:end].sum()),) if end < stop else () for start, end, stop in first
        ]
        return ReplayRequests(self.paths, outputs, first_spans, self.log.arrived_ns)

    @cached_property
    def reordered(self) -> ReplayRequests:
        """The requests with passages in the order in which they are cached."""
        return ReplayRequests(
            in_cached_order(self.contents).paths(),
            self.in_logged_order.output_lens,
            self.in_logged_order.boundaries,
        )

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of all requests."""
        return int(self.paths.prompt_tokens.sum())

    @property
    def names_contents(self) -> bool:
        """Whether ids name contents, so that reuse at any position can be computed."""
        return self.log.ids == Ids.CONTENT

    def reused(self, rules: Rules) -> ReplayResult:
        """Return reused tokens of an arm by request, and the causes to which the others were
        lost."""
        if rules is None:
            nothing = np.zeros(self.paths.requests, dtype=np.int64)
            return ReplayResult(nothing, {"never_stored": self.paths.prompt_tokens})
        if isinstance(rules, CacheRules):
            return replay(self.in_logged_order, rules)
        # spans at any position; tokens that an infinite cache would miss count as never seen
        spans, n = self.spans, self.paths.requests
        matched, matched_unlimited = spans.reused(rules.capacity_tokens), spans.reused(np.inf)
        reused = spans.repaired(matched, rules.first, rules.share)
        never_seen = spans.paths.prompt_tokens - matched_unlimited

        def by_request(values: Ints) -> Ints:
            return np.bincount(spans.request, values, n).astype(np.int64)

        lost = {
            "never_seen": never_seen,
            "kv_evicted": matched_unlimited - matched,
            "repair": matched - reused,
        }
        return ReplayResult(
            by_request(reused), {cause: by_request(values) for cause, values in lost.items()}
        )

    def offline_optimum(self, rules: CacheRules) -> int:
        """Return the most tokens that a cache of these blocks and memory can reuse if states take
        no memory."""
        n = self.paths.requests
        order = np.arange(n)
        reuses = find_reuses(
            self.paths.forest(rules.block),
            ServiceOrder(order, order, order, np.ones(n, dtype=np.bool_)),
        )
        capacity_tokens = (
            rules.capacity_bytes // rules.block_bytes * rules.block - reuses.prompt_tokens
        )
        return most_reused_tokens(reuses, capacity_tokens)


@dataclass(frozen=True)
class Curve:
    """Hit rates of an LRU cache by size in blocks.

    `block`     tokens per block
    `from_log`  whether these are the log's own blocks, otherwise prompts are cut into blocks
    """

    distances: Distances
    paths: Paths
    block: int
    from_log: bool

    @property
    def sizes(self) -> list[int]:
        """Round sizes, up to the size that finds all reusable blocks."""
        largest = self.distances.largest
        powers = (10**power for power in range(len(str(max(largest, 1)))))
        ladder = sorted({step * power for power in powers for step in _LADDER})
        return [*(size for size in ladder if size < largest), largest] if largest else []

    def tokens(self, size: float) -> int:
        """Return the tokens that a cache of `size` blocks reuses."""
        blocks_found = self.distances.resident_blocks(size)
        # ids match as a whole, also the last block of a prompt, which may have fewer tokens
        if self.from_log:
            complete = blocks_found == self.distances.blocks
            return int(
                np.where(
                    complete, self.paths.tokens[self.paths.nodes], blocks_found * self.block
                ).sum()
            )
        most = (self.paths.prompt_tokens - 1) // self.block * self.block
        return int(np.minimum(self.paths.per_request(blocks_found) * self.block, most).sum())


def curve_of(facts: Facts, block: int) -> Curve:
    """Return the curve over blocks of the log, or over blocks of `block` tokens where the log has
    none."""
    paths, from_log = facts.paths, facts.log.block is not None
    weights = paths.pieces if from_log else paths.blocks(block)
    private = np.zeros(paths.requests, dtype=np.int64)
    return Curve(
        stack_distances(paths, weights, private), paths, facts.log.block or block, from_log
    )


def rates(replayed: ReplayResult, prompt: Ints) -> dict[str, Any]:
    """Return hit rates by token and by request, and the causes of lost tokens.

    `token_hit_rate`       reused ÷ prompt tokens, summed over requests: a ratio of sums
    `mean_token_hit_rate`  the mean over requests of reused ÷ prompt tokens: a mean of ratios
    `request_hit_rate`     requests that reuse at least one token ÷ requests
    """
    total = int(prompt.sum())
    return {
        "token_hit_rate": int(replayed.reused.sum()) / total,
        "mean_token_hit_rate": float((replayed.reused / np.maximum(prompt, 1)).mean()),
        "request_hit_rate": float((replayed.reused > 0).mean()),
        "reused_tokens": int(replayed.reused.sum()),
        "states": replayed.states,
        "lost_by_cause": {
            cause: int(values.sum()) for cause, values in replayed.lost.items() if values.any()
        },
    }


MOST_TIMED = 1000  # prompts of which the prefill is timed
LEAST_GAIN = 0.005  # share of the prompt tokens; a fix with a smaller gain does not help
MEMORIES = (2, 4, 16, 64)  # multiples of the store
BLOCKS = (1, 16, 64, 256)
LEGO_LINK_TOKENS = 16
CACHE_BLEND_SHARE = 0.15
UNREACHED = "a bound: it needs to know future requests, so no real eviction order reaches it"
CHANGES_ORDER = "changes what a model reads"
CHANGES_ANSWERS = "changes answers: how good they are is unknown here"


@dataclass(frozen=True)
class Fix:
    """A change of the cache, and its effect.

    `gain`       increase of the token hit rate over the explained arm
    `extra_gib`  memory that it needs in addition to the store
    `says`       description of the change; `caution` describes side effects
    `is_bound`   an upper bound that no real change reaches
    `settings`   overrides of this study that make the change; empty where no setting of one device
                 does
    `fits`       whether one device holds the memory
    `saved_tokens`  prompt tokens that need no computation any more, negative where more do
    `prompt_tokens`, `reused_tokens`  of all prompts, which a mend may change
    `prefill_s`  mean prefill time of a prompt by the study's timing model; None if not only its end
                 is computed
    """

    name: str
    says: str
    token_hit_rate: float
    gain: float
    extra_gib: float = 0.0
    caution: str = ""
    is_bound: bool = False
    settings: tuple[str, ...] = ()
    fits: bool = True
    saved_tokens: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    prefill_s: float | None = None

    @property
    def helps(self) -> bool:
        """Whether the gain is at least `LEAST_GAIN`."""
        return self.gain >= LEAST_GAIN

    @property
    def gain_per_gib(self) -> float | None:
        """Gain per GiB of extra memory; None without extra memory."""
        return self.gain / self.extra_gib if self.extra_gib else None


@dataclass(frozen=True)
class ExplainedArm:
    """The arm whose hit rate is explained, and the log.

    `study`         the study, whose baseline is the arm
    `rate`          token hit rate of the arm
    `other_reused`  tokens that the study's other arms reuse of each prompt, by name
    """

    study: Study
    facts: Facts
    rules: CacheRules
    rate: float
    other_reused: Mapping[str, Ints]

    @cached_property
    def offline_optimum(self) -> int:
        """The most tokens that a cache of the arm's memory can reuse if states take no memory."""
        return self.facts.offline_optimum(self.rules)

    @cached_property
    def _prefill_steps(self) -> PrefillTime:
        return build_prefill_time(
            self.study,
            build_policy(self.study, self.study.arms[self.study.runs.baseline], 0, 1),
            self.study.batch,
        )

    def mean_prefill_s(self, prompt: Ints, reused: Ints) -> float:
        """Return the mean prefill time of prompts whose beginnings are reused, while nothing else
        runs.

        It is over `MOST_TIMED` prompts at equal distances, by the study's timing model.
        """
        timed = np.arange(0, len(prompt), max(1, len(prompt) // MOST_TIMED))[:MOST_TIMED]
        pairs = zip(reused[timed].tolist(), prompt[timed].tolist(), strict=True)
        return (
            sum(sum(self._prefill_steps(start, stop)) for start, stop in pairs if stop > start)
            * 1e-9
            / len(timed)
        )

    def fix(
        self, name: str, says: str, tokens: float, extra_bytes: float = 0, caution: str = ""
    ) -> Fix:
        """Return a fix from the tokens that it reuses."""
        total = self.facts.prompt_tokens
        rate = tokens / total
        saved = round((rate - self.rate) * total)
        gib = max(0.0, extra_bytes) / GIB
        fix = Fix(name, says, rate, rate - self.rate, gib, caution, saved_tokens=saved)
        return replace(fix, prompt_tokens=total, reused_tokens=round(tokens))

    def prefix_fix(
        self, name: str, says: str, reused: Ints, extra_bytes: float = 0, caution: str = ""
    ) -> Fix:
        """Return a fix from the beginning of each prompt that it reuses, with the prefill time of
        the rest."""
        prefill = self.mean_prefill_s(self.facts.paths.prompt_tokens, reused)
        return replace(
            self.fix(name, says, int(reused.sum()), extra_bytes, caution), prefill_s=prefill
        )

    def replayed(self, rules: CacheRules) -> Ints:
        """Return the tokens of each prompt that other rules reuse."""
        return replay(self.facts.in_logged_order, rules).reused


def ranked_fixes(explained: ExplainedArm, mends: Sequence[Fix] = ()) -> list[Fix]:
    """Return fixes and mends that help, first without memory by gain, then by gain per byte; then
    the others.

    Memory that one device does not hold follows all that it does, then bounds, then fixes that do
    not help.
    """
    generators = (_arms, _eviction, _blocks, _checkpoints, _order, _anywhere, _memory)
    return sorted(
        [*mends, *(fix for generate in generators for fix in generate(explained))], key=_rank
    )


def _rank(fix: Fix) -> tuple[bool, bool, bool, bool, float]:
    per_gib = fix.gain_per_gib
    return (
        not fix.helps,
        fix.is_bound,
        not fix.fits,
        per_gib is not None,
        -(fix.gain if per_gib is None else per_gib),
    )


def _arms(arm: ExplainedArm) -> Iterator[Fix]:
    """Yield the other arms, which have the same memory."""
    for name, reused in arm.other_reused.items():
        says, is_prefix = f"cache as {name} does", arm.study.arms[name].spans is None
        fix = (
            arm.prefix_fix(f"as_{name}", says, reused)
            if is_prefix
            else arm.fix(f"as_{name}", says, int(reused.sum()))
        )
        yield replace(fix, settings=(f"baseline={name}",))


def _memory(arm: ExplainedArm) -> Iterator[Fix]:
    """Yield larger memories: multiples, all that one device holds, and the size that holds every
    reusable block."""
    store_gib, room = arm.study.store.total_gib, room_gib(arm.study)
    if store_gib is None:
        return
    around = store_gib * GIB - arm.rules.capacity_bytes  # bytes of the store that hold no entry
    # every reusable block is found; with states, in the bytes of all blocks and states
    rules, paths = arm.rules, arm.facts.paths
    lengths = paths.prompt_tokens, arm.facts.in_logged_order.output_lens
    outputs, blocks = rules.output_blocks(*lengths), paths.blocks(rules.block)
    most = around + int(rules.transient_bytes(*lengths).max())
    if rules.placer is None:
        most += stack_distances(paths, blocks, outputs).largest * rules.block_bytes
    else:
        most += int(blocks.sum() + outputs.sum()) * rules.block_bytes
        most += 2 * paths.requests * rules.state_bytes
    sufficient = rounded_up(most / GIB)
    sizes = {
        f"times_{times}": (times * store_gib, f"{times} times the memory, ") for times in MEMORIES
    }
    if room is not None and room not in [size for size, _ in sizes.values()]:
        sizes["of_device"] = (
            room,
            f"all that one {arm.study.hardware.name} holds beside the weights, ",
        )
    smaller = {
        name: (size, says) for name, (size, says) in sizes.items() if store_gib < size < sufficient
    }
    everything = (
        {"for_all": (sufficient, "every reusable block is held, ")}
        if store_gib < sufficient
        else {}
    )
    for name, (size, says) in (smaller | everything).items():
        reused = arm.replayed(replace(arm.rules, capacity_bytes=math.ceil(size * GIB - around)))
        fix = arm.prefix_fix(
            f"memory_{name}", f"{says}{_gib(size)} GiB", reused, (size - store_gib) * GIB
        )
        if room is None or size <= room:
            yield replace(fix, settings=(f"store.total_gib={size!r}",))
        else:
            device = f"one {arm.study.hardware.name} holds {_gib(room)} GiB beside the weights"
            yield replace(fix, fits=False, caution=f"{device}, so it needs tiers or replicas")


def _gib(size: float) -> str:
    return f"{size:.5g}" if size < 1000 else f"{size:,.0f}"


def _eviction(arm: ExplainedArm) -> Iterator[Fix]:
    """Yield the optimal eviction order, which has perfect foresight."""
    tokens = arm.offline_optimum
    states = "" if arm.rules.placer is None else ", with states that take no memory"
    fix = arm.fix(
        "eviction_optimum",
        f"the best eviction order there can be{states}",
        tokens,
        caution=UNREACHED,
    )
    yield replace(fix, is_bound=True)


def _blocks(arm: ExplainedArm) -> Iterator[Fix]:
    """Yield other block sizes; a log of blocks does not determine the reuse of smaller ones."""
    least = arm.facts.log.block or 1
    if arm.rules.placer is not None:
        return
    per_token = arm.rules.block_bytes // arm.rules.block
    for size in BLOCKS:
        if size != arm.rules.block and size >= min(least, arm.rules.block):
            reused = arm.replayed(replace(arm.rules, block=size, block_bytes=size * per_token))
            yield arm.prefix_fix(
                f"block_{size}", f"blocks of {size} token{'s' * (size > 1)}", reused
            )


def _checkpoints(arm: ExplainedArm) -> Iterator[Fix]:
    """Yield other placements of recurrent states."""
    if arm.rules.placer is None:
        return
    for name, (says, rule) in _placements(arm.rules).items():
        yield arm.prefix_fix(f"states_{name}", says, arm.replayed(replace(arm.rules, placer=rule)))
    # rules with default blocks, and states at every position that the model's kernels support
    model, size = arm.study.model, min(BLOCK, arm.rules.block)
    unit = max(model.grid, size)
    finer = replace(
        arm.rules,
        block=size,
        block_bytes=size * model.kv_bytes_per_token,
        state_bytes=model.state_bytes,
        unit=unit,
    )
    if finer.unit < arm.rules.unit:
        for name, (says, rule) in _placements(finer).items():
            reused = arm.replayed(replace(finer, placer=rule))
            yield arm.prefix_fix(
                f"states_{name}_{finer.unit}", f"{says}, on a grid of {finer.unit} tokens", reused
            )


def _placements(rules: CacheRules) -> dict[str, tuple[str, Placer]]:
    unit = rules.unit

    def last(prefill: PrefillInfo) -> int:
        return (prefill.prompt - 1) // unit * unit

    def branch(prefill: PrefillInfo) -> tuple[int, ...]:
        return (min(prefill.matched, last(prefill)),) if prefill.matched > prefill.resume else ()

    every = max(unit, 2048 // unit * unit)
    return {
        "last": (
            "a state at the prompt's last boundary alone",
            Rule(lambda prefill: (last(prefill),)),
        ),
        "last_and_branch": (
            "states at the last boundary, and where prompts part once it is stored",
            retention(facts=ArmFacts(unit, unit, 0, 0)),
        ),
        "branch": ("a state where prompts part, alone", Rule(branch)),
        "seen": (
            "states at the last boundary, and where an earlier prompt parted, stored or not",
            Rule(lambda prefill: (last(prefill), min(prefill.seen, last(prefill)))),
        ),
        f"every_{every}": (
            f"a state every {every} tokens",
            Rule(lambda prefill: range(every, prefill.prompt + 1, every)),
        ),
        "boundary": (
            "a boundary mark: a state where the first span ends, beside the last boundary",
            Rule(lambda prefill: (*prefill.boundaries, last(prefill))),
        ),
    }


def _order(arm: ExplainedArm) -> Iterator[Fix]:
    """Yield the replay with passages in the order in which they are cached."""
    if not arm.facts.log.free.any():
        return
    reused = replay(arm.facts.reordered, arm.rules).reused
    says = "passages in the order in which they are cached"
    yield arm.prefix_fix(
        "cached_order", says, reused, caution="changes the order of passages that a model reads"
    )


def mends_of(arm: ExplainedArm, classes: Collection[str]) -> list[tuple[Fix, Rewrite]]:
    """Return the mends that change prompts, each with the replay of the mended log; `classes` are
    those of its breaks.

    The last one is all of `TOGETHER` that change prompts, if they are several.
    """
    log = arm.facts.log
    if log.source is None or not log.source.has_prompts:
        return []
    survey = Survey.of(log.source.prompts)
    tried = {
        name: mend
        for name, mend in MENDS.items()
        if not mend.classes or mend.classes & set(classes)
    }

    def made() -> tuple[dict[str, Rewrite], Together]:
        rewrites = {name: mend.make(survey) for name, mend in tried.items()}
        together = Together({name: rewrites[name] for name in TOGETHER if name in rewrites})
        return rewrites | {"all_mends": together}, together

    rewrites, together = made()
    changed = log.source.rewritten(log, rewrites)
    says = {
        name: f"{mend.says}; it changes {changed[name].prompts:,} prompts"
        for name, mend in tried.items()
        if name in changed
    }
    effective = [name for name in TOGETHER if name in together.effective]
    if len(effective) > 1:
        says["all_mends"] = f"all of {', '.join(effective)}"
    again, _ = made()  # a mend that remembers earlier prompts begins anew where the log is written
    return [
        (_mended(arm, name, sentence, changed.pop(name).build()), again[name])
        for name, sentence in says.items()
    ]


def _mended(arm: ExplainedArm, name: str, says: str, log: Log) -> Fix:
    """Return the replay of the log with changed prompts, which may be shorter or longer."""
    facts = Facts(log)
    reused = replay(facts.in_logged_order, arm.rules).reused
    rate, total = int(reused.sum()) / facts.prompt_tokens, arm.facts.prompt_tokens
    computed = facts.prompt_tokens - int(reused.sum())
    return Fix(
        name,
        says,
        rate,
        rate - arm.rate,
        caution=CHANGES_ORDER,
        saved_tokens=round((1 - arm.rate) * total) - computed,
        prompt_tokens=facts.prompt_tokens,
        reused_tokens=int(reused.sum()),
        prefill_s=arm.mean_prefill_s(facts.paths.prompt_tokens, reused),
    )


def _anywhere(arm: ExplainedArm) -> Iterator[Fix]:
    """Yield position-independent caching, without and with repair, in the same memory."""
    if not arm.facts.names_contents or arm.rules.placer is not None:
        return
    per_token = arm.rules.block_bytes / arm.rules.block
    capacity = arm.rules.capacity_bytes / per_token
    for name, says, rules in (
        ("pic", "spans at any position, no repair", SpanRules(capacity)),
        (
            "lego_link",
            f"spans at any position, the first {LEGO_LINK_TOKENS} tokens of each recomputed",
            SpanRules(capacity, LEGO_LINK_TOKENS),
        ),
        (
            "cache_blend",
            f"spans at any position, {CACHE_BLEND_SHARE:.0%} of their tokens recomputed",
            SpanRules(capacity, 0, CACHE_BLEND_SHARE),
        ),
    ):
        tokens = float(np.sum(arm.facts.reused(rules).reused))
        yield arm.fix(name, says, tokens, caution=CHANGES_ANSWERS)


def verdict(explained: ExplainedArm, fixes: list[Fix], prefix: float) -> str:
    """Return the best fix in one sentence, or the reason why no fix helps.

    Memory that one device does not hold comes first only where no other fix helps.
    """
    helpful = [fix for fix in fixes if fix.helps and not fix.is_bound]
    if helpful:
        first = helpful[0]
        best = max((fix for fix in helpful if fix.fits == first.fits), key=lambda fix: fix.gain)
        largest = (
            ""
            if best is first
            else f"; the most comes from {best.name}: +{100 * best.gain:.1f} points"
        )
        memory = (
            f" for {_gib(first.extra_gib)} GiB more" if first.extra_gib else " in the same memory"
        )
        beyond = max(helpful, key=lambda fix: fix.gain)
        if not first.fits:
            limit = f"; {first.caution}"
        else:
            limit = (
                ""
                if beyond.fits
                else f"; more memory gains +{100 * beyond.gain:.1f} points with tiers or replicas"
            )
        return f"first {first.says}: +{100 * first.gain:.1f} points{memory}{largest}{limit}"
    if prefix < LEAST_GAIN:
        why = f"prompts share {100 * prefix:.1f} % of their tokens as prefixes"
    else:
        why = f"{100 * explained.rate:.1f} % are reused, and a cache without limit would reuse {100 * prefix:.1f} %"
    return f"nothing will help, because {why}, and no fix computed from the log gains {100 * LEAST_GAIN:.1f} points"
