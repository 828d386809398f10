"""Fixes that raise the hit rate: each is simulated on the log, and ranked by gain and memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from spanlab.build import GIB
from spanlab.core.placement.contract import PrefillInfo, Rule
from spanlab.core.policies.named import BLOCK
from spanlab.model_spec import ModelSpec
from spanlab.offline.replay import CacheRules, replay
from spanlab.offline.stack import stack_distances
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
    """

    name: str
    says: str
    token_hit_rate: float
    gain: float
    extra_gib: float = 0.0
    caution: str = ""
    is_bound: bool = False

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

    `rate`          token hit rate of the arm
    `memory_gib`    the study's store; None without a limit
    `other_tokens`  tokens that the study's other arms reuse, by name
    """

    facts: Facts
    rules: CacheRules
    model: ModelSpec
    rate: float
    memory_gib: float | None
    other_tokens: Mapping[str, int]

    def fix(self, name: str, says: str, tokens: float, extra_bytes: float = 0, caution: str = "") -> Fix:
        """Return a fix from the tokens that it reuses."""
        rate = tokens / self.facts.prompt_tokens
        return Fix(name, says, rate, rate - self.rate, max(0.0, extra_bytes) / GIB, caution)

    def replayed(self, rules: CacheRules) -> int:
        """Return the tokens that other rules reuse."""
        return int(replay(self.facts.in_logged_order, rules).reused.sum())


def ranked_fixes(explained: ExplainedArm) -> list[Fix]:
    """Return fixes that help, first without memory by gain, then by gain per byte; then bounds, then the others."""
    generators = (_arms, _eviction, _blocks, _checkpoints, _order, _reorders, _anywhere, _memory)
    return sorted([fix for generate in generators for fix in generate(explained)], key=_rank)


def _rank(fix: Fix) -> tuple[bool, bool, bool, float]:
    per_gib = fix.gain_per_gib
    return not fix.helps, fix.is_bound, per_gib is not None, -(fix.gain if per_gib is None else per_gib)


def _arms(arm: ExplainedArm) -> Iterator[Fix]:
    """Yield the other arms, which have the same memory."""
    for name, tokens in arm.other_tokens.items():
        yield arm.fix(f"as_{name}", f"cache as {name} does", tokens)


def _memory(arm: ExplainedArm) -> Iterator[Fix]:
    """Yield larger memories, up to the size that holds every reusable block."""
    sufficient = _sufficient_bytes(arm)
    if arm.memory_gib is None or arm.rules.capacity_bytes >= sufficient:
        return
    for times in MEMORIES:
        size = arm.rules.capacity_bytes * times
        if size < sufficient:
            tokens = arm.replayed(replace(arm.rules, capacity_bytes=size))
            says = f"{times} times the memory, {times * arm.memory_gib:.5g} GiB"
            yield arm.fix(f"memory_times_{times}", says, tokens, size - arm.rules.capacity_bytes)
    tokens = arm.replayed(replace(arm.rules, capacity_bytes=sufficient))
    says = f"{_gib(sufficient)} GiB, which hold every reusable block"
    yield arm.fix("memory_for_all", says, tokens, sufficient - arm.rules.capacity_bytes)


def _gib(size: int) -> str:
    return f"{size / GIB:.3g}" if size < 1000 * GIB else f"{size / GIB:.0f}"


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
    model, size = arm.model, min(BLOCK, arm.rules.block)
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
    """Return the best fix in one sentence, or the reason why no fix helps."""
    helpful = [fix for fix in fixes if fix.helps and not fix.is_bound]
    if helpful:
        best = max(helpful, key=lambda fix: fix.gain)
        first = helpful[0]
        largest = "" if best is first else f"; the most comes from {best.name}: +{100 * best.gain:.1f} points"
        memory = f" for {_gib(int(first.extra_gib * GIB))} GiB" if first.extra_gib else " in the same memory"
        return f"first {first.says}: +{100 * first.gain:.1f} points{memory}{largest}"
    if prefix < LEAST_GAIN:
        why = f"prompts share {100 * prefix:.1f} % of their tokens as prefixes"
    else:
        why = f"{100 * explained.rate:.1f} % are reused, and a cache without limit would reuse {100 * prefix:.1f} %"
    return f"nothing will help, because {why}, and no fix computed from the log gains {100 * LEAST_GAIN:.1f} points"
