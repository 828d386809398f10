"""Fixes that raise the hit rate: each is simulated on the log, and ranked by gain and memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from spanlab.build import GIB
from spanlab.core.placement.contract import PrefillInfo, Rule
from spanlab.core.policies.named import BLOCK
from spanlab.offline.replay import CacheRules, replay
from spanlab.offline.stack import stack_distances
from spanlab.report.units import rounded_up
from spanlab.settings import Study
from spanlab.study.checks import room_gib
from spanlab.study.explain.facts import Facts
from spanlab.study.explain.rules import SpanRules
from spanlab.workloads.logs.bodies import Prompt
from spanlab.workloads.logs.reorder import Reorder, Survey

LEAST_GAIN = 0.005  # share of the prompt tokens; a fix with a smaller gain does not help
MEMORIES = (2, 4, 16, 64)  # multiples of the store
BLOCKS = (1, 16, 64, 256)
LEGO_LINK_TOKENS = 16
CACHE_BLEND_SHARE = 0.15
UNREACHED = "a bound: it needs to know future requests, so no real eviction order reaches it"
CHANGES_ORDER = "changes the order of what a model reads"
#: Fixes that put a log's prompts in another order: what each does, and the fields of its `Reorder`.
REORDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "volatile_last": (
        "lines and images that change between requests moved to the end of their message",
        {"volatile": "message"},
    ),
    "volatile_at_end": (
        "lines of the system prompt that change between requests moved to the end of the last message",
        {"volatile": "prompt"},
    ),
    "tools_sorted": ("tools in one order, those of most requests first", {"tools": True}),
    "all_orders": (
        "tools in one order, and changing lines and images at the end of their message",
        {"volatile": "message", "tools": True},
    ),
}
CHANGES_ANSWERS = "changes answers: how good they are is unknown here"


@dataclass(frozen=True)
class Fix:
    """A change of the cache, and its effect.

    `gain`       increase of the token hit rate over the explained arm
    `extra_gib`  memory that it needs in addition to the store
    `says`       description of the change; `caution` describes side effects
    `is_bound`   an upper bound that no real change reaches
    `settings`   overrides of this study that make the change; empty where no setting of one device does
    `fits`       whether one device holds the memory
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
    `other_tokens`  tokens that the study's other arms reuse, by name
    """

    study: Study
    facts: Facts
    rules: CacheRules
    rate: float
    other_tokens: Mapping[str, int]

    def fix(self, name: str, says: str, tokens: float, extra_bytes: float = 0, caution: str = "") -> Fix:
        """Return a fix from the tokens that it reuses."""
        rate = tokens / self.facts.prompt_tokens
        return Fix(name, says, rate, rate - self.rate, max(0.0, extra_bytes) / GIB, caution)

    def replayed(self, rules: CacheRules) -> int:
        """Return the tokens that other rules reuse."""
        return int(replay(self.facts.in_logged_order, rules).reused.sum())


def ranked_fixes(explained: ExplainedArm) -> list[Fix]:
    """Return fixes that help, first without memory by gain, then by gain per byte; then the others.

    Memory that one device does not hold follows all that it does, then bounds, then fixes that do not help.
    """
    generators = (_arms, _eviction, _blocks, _checkpoints, _order, _reorders, _anywhere, _memory)
    return sorted([fix for generate in generators for fix in generate(explained)], key=_rank)


def _rank(fix: Fix) -> tuple[bool, bool, bool, bool, float]:
    per_gib = fix.gain_per_gib
    return not fix.helps, fix.is_bound, not fix.fits, per_gib is not None, -(fix.gain if per_gib is None else per_gib)


def _arms(arm: ExplainedArm) -> Iterator[Fix]:
    """Yield the other arms, which have the same memory."""
    for name, tokens in arm.other_tokens.items():
        fix = arm.fix(f"as_{name}", f"cache as {name} does", tokens)
        yield replace(fix, settings=(f"baseline={name}",))


def _memory(arm: ExplainedArm) -> Iterator[Fix]:
    """Yield larger memories: multiples, all that one device holds, and the size that holds every reusable block."""
    store_gib, room = arm.study.store.total_gib, room_gib(arm.study)
    if store_gib is None:
        return
    around = store_gib * GIB - arm.rules.capacity_bytes  # bytes of the store that hold no entry
    sufficient = rounded_up((_sufficient_bytes(arm) + around) / GIB)
    sizes = {f"times_{times}": (times * store_gib, f"{times} times the memory, ") for times in MEMORIES}
    if room is not None and room not in [size for size, _ in sizes.values()]:
        sizes["of_device"] = room, f"all that one {arm.study.hardware.name} holds beside the weights, "
    smaller = {name: (size, says) for name, (size, says) in sizes.items() if store_gib < size < sufficient}
    everything = {"for_all": (sufficient, "every reusable block is held, ")} if store_gib < sufficient else {}
    for name, (size, says) in (smaller | everything).items():
        tokens = arm.replayed(replace(arm.rules, capacity_bytes=math.ceil(size * GIB - around)))
        fix = arm.fix(f"memory_{name}", f"{says}{_gib(size)} GiB", tokens, (size - store_gib) * GIB)
        if room is None or size <= room:
            yield replace(fix, settings=(f"store.total_gib={size!r}",))
        else:
            yield replace(fix, fits=False, caution=_beyond(arm, room))


def _beyond(arm: ExplainedArm, room: float) -> str:
    """Return that memory needs more than one device."""
    return f"one {arm.study.hardware.name} holds {_gib(room)} GiB beside the weights, so it needs tiers or replicas"


def _gib(size: float) -> str:
    return f"{size:.5g}" if size < 1000 else f"{size:,.0f}"


def _sufficient_bytes(arm: ExplainedArm) -> int:
    """Return the bytes with which every reusable block is found; with states, bytes of all blocks and states."""
    rules, paths = arm.rules, arm.facts.paths
    lengths = paths.prompt_tokens, arm.facts.in_logged_order.output_lens
    outputs, passing = rules.output_blocks(*lengths), int(rules.transient_bytes(*lengths).max())
    if rules.placer is None:
        return stack_distances(paths, paths.blocks(rules.block), outputs).largest * rules.block_bytes + passing
    blocks = int(paths.blocks(rules.block).sum() + outputs.sum())
    return passing + blocks * rules.block_bytes + 2 * paths.requests * rules.state_bytes


def _eviction(arm: ExplainedArm) -> Iterator[Fix]:
    """Yield the optimal eviction order, which has perfect foresight."""
    tokens = arm.facts.offline_optimum(arm.rules)
    states = "" if arm.rules.placer is None else ", with states that take no memory"
    fix = arm.fix("eviction_optimum", f"the best eviction order there can be{states}", tokens, caution=UNREACHED)
    yield replace(fix, is_bound=True)


def _blocks(arm: ExplainedArm) -> Iterator[Fix]:
    """Yield other block sizes; a log of blocks does not determine the reuse of smaller ones."""
    least = arm.facts.log.block or 1
    if arm.rules.placer is not None:
        return
    per_token = arm.rules.block_bytes // arm.rules.block
    for size in BLOCKS:
        if size != arm.rules.block and size >= min(least, arm.rules.block):
            tokens = arm.replayed(replace(arm.rules, block=size, block_bytes=size * per_token))
            yield arm.fix(f"block_{size}", f"blocks of {size} token{'s' * (size > 1)}", tokens)


def _checkpoints(arm: ExplainedArm) -> Iterator[Fix]:
    """Yield other placements of recurrent states."""
    if arm.rules.placer is None:
        return
    for name, (says, rule) in _placements(arm.rules).items():
        yield arm.fix(f"states_{name}", says, arm.replayed(replace(arm.rules, placer=rule)))
    finer = _fine_grained(arm)
    if finer.unit < arm.rules.unit:
        for name, (says, rule) in _placements(finer).items():
            tokens = arm.replayed(replace(finer, placer=rule))
            yield arm.fix(f"states_{name}_{finer.unit}", f"{says}, on a grid of {finer.unit} tokens", tokens)


def _fine_grained(arm: ExplainedArm) -> CacheRules:
    """Return rules with default blocks, and states at every position that the model's kernels support."""
    model, size = arm.study.model, min(BLOCK, arm.rules.block)
    unit = max(model.grid, size)
    return replace(
        arm.rules, block=size, block_bytes=size * model.kv_bytes_per_token, state_bytes=model.state_bytes, unit=unit
    )


def _placements(rules: CacheRules) -> dict[str, tuple[str, Rule]]:
    unit = rules.unit

    def last(prefill: PrefillInfo) -> int:
        return (prefill.prompt - 1) // unit * unit

    def branch(prefill: PrefillInfo) -> tuple[int, ...]:
        return (min(prefill.matched, last(prefill)),) if prefill.matched > prefill.resume else ()

    every = max(unit, 2048 // unit * unit)
    return {
        "last": ("a state at the prompt's last boundary alone", Rule(lambda prefill: (last(prefill),))),
        "last_and_branch": (
            "states at the last boundary, and where prompts part once it is stored",
            Rule(lambda prefill: (last(prefill), *branch(prefill))),
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
    tokens = int(replay(arm.facts.reordered, arm.rules).reused.sum())
    says = "passages in the order in which they are cached"
    yield arm.fix("cached_order", says, tokens, caution="changes the order of passages that a model reads")


def _reorders(arm: ExplainedArm) -> Iterator[Fix]:
    """Yield the replay of the log with volatile text behind text that recurs, and with tools in one order."""
    log = arm.facts.log
    if log.source is None or log.lines is None:
        return
    survey = Survey(frozenset(log.lines.tolist()))
    log.source.visit(survey.add)
    orders = {name: Reorder(survey, **how) for name, (_, how) in REORDERS.items()} if survey.requests else {}
    changed = dict.fromkeys(orders, 0)

    def count_changes(line: int, prompt: Prompt) -> None:
        for name, reorder in orders.items():
            changed[name] += line in survey.lines and reorder(line, prompt) is not prompt

    if orders:
        log.source.visit(count_changes)
    for name, reorder in orders.items():
        if changed[name] and (name != "all_orders" or (changed["volatile_last"] and changed["tools_sorted"])):
            facts = Facts(log.source.rewritten(reorder))
            rate = int(replay(facts.in_logged_order, arm.rules).reused.sum()) / facts.prompt_tokens
            says = f"{REORDERS[name][0]}; it changes {changed[name]:,} prompts"
            yield Fix(name, says, rate, rate - arm.rate, caution=CHANGES_ORDER)


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
        largest = "" if best is first else f"; the most comes from {best.name}: +{100 * best.gain:.1f} points"
        memory = f" for {_gib(first.extra_gib)} GiB more" if first.extra_gib else " in the same memory"
        beyond = max(helpful, key=lambda fix: fix.gain)
        if not first.fits:
            limit = f"; {first.caution}"
        else:
            limit = "" if beyond.fits else f"; more memory gains +{100 * beyond.gain:.1f} points with tiers or replicas"
        return f"first {first.says}: +{100 * first.gain:.1f} points{memory}{largest}{limit}"
    if prefix < LEAST_GAIN:
        why = f"prompts share {100 * prefix:.1f} % of their tokens as prefixes"
    else:
        why = f"{100 * explained.rate:.1f} % are reused, and a cache without limit would reuse {100 * prefix:.1f} %"
    return f"nothing will help, because {why}, and no fix computed from the log gains {100 * LEAST_GAIN:.1f} points"
