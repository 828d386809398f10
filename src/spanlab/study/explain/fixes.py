"""What would raise the hit rate: each fix simulated on the log, ranked by what it brings for its memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from spanlab.build import GIB
from spanlab.core.placement.contract import PrefillInfo, Rule
from spanlab.core.policies.named import BLOCK
from spanlab.model_spec import ModelSpec
from spanlab.offline.replay import CacheRules, replay
from spanlab.offline.stack import stack_distances
from spanlab.study.explain.facts import Facts
from spanlab.study.explain.rules import SpanRules

WORTH = 0.005  # share of the prompt tokens: what brings less is no help
MEMORIES = (2, 4, 16, 64)  # times the store
BLOCKS = (1, 16, 64, 256)
LEGO_LINK_TOKENS = 16
CACHE_BLEND_SHARE = 0.15
UNREACHED = "a bound: no order that can be built reaches it"
CHANGES_ANSWERS = "changes answers: how good they are is unknown here"


@dataclass(frozen=True)
class Fix:
    """A change, and what it brings.

    `gain`       token hit rate beyond the one that is explained
    `extra_gib`  memory that it takes beside the store
    `says`       what the change is, in words; `caution` what else it changes
    `is_bound`   no change that can be made reaches it
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
        """Whether it is worth mentioning."""
        return self.gain >= WORTH

    @property
    def gain_per_gib(self) -> float | None:
        """None where it takes no memory."""
        return self.gain / self.extra_gib if self.extra_gib else None


@dataclass(frozen=True)
class Explained:
    """The arm whose hit rate is explained, and the log.

    `memory_gib`  the study's store; None without a limit
    `others`      tokens that the study's other arms reuse, by name
    """

    facts: Facts
    rules: CacheRules
    model: ModelSpec
    rate: float
    memory_gib: float | None
    others: Mapping[str, int]

    def fix(self, name: str, says: str, tokens: float, extra_bytes: float = 0, caution: str = "") -> Fix:
        """A fix by the tokens that it reuses."""
        rate = tokens / self.facts.prompt_tokens
        return Fix(name, says, rate, rate - self.rate, max(0.0, extra_bytes) / GIB, caution)

    def replayed(self, rules: CacheRules) -> int:
        """Tokens that other rules reuse."""
        return int(replay(self.facts.asked, rules).reused.sum())


def ranked_fixes(explained: Explained) -> list[Fix]:
    """Fixes that help, first those that take no memory by gain, then by gain per byte; then bounds, then the others."""
    parts = (_arms, _eviction, _blocks, _checkpoints, _order, _anywhere, _memory)
    return sorted([fix for part in parts for fix in part(explained)], key=_rank)


def _rank(fix: Fix) -> tuple[bool, bool, bool, float]:
    per_gib = fix.gain_per_gib
    return not fix.helps, fix.is_bound, per_gib is not None, -(fix.gain if per_gib is None else per_gib)


def _arms(it: Explained) -> Iterator[Fix]:
    """What the other arms do in the same memory."""
    for name, tokens in it.others.items():
        yield it.fix(f"as_{name}", f"cache as {name} does", tokens)


def _memory(it: Explained) -> Iterator[Fix]:
    """More memory, up to what holds everything that comes again."""
    enough = _enough(it)
    if it.memory_gib is None or it.rules.capacity_bytes >= enough:
        return
    for times in MEMORIES:
        size = it.rules.capacity_bytes * times
        if size < enough:
            tokens = it.replayed(replace(it.rules, capacity_bytes=size))
            says = f"{times} times the memory, {times * it.memory_gib:.5g} GiB"
            yield it.fix(f"memory_times_{times}", says, tokens, size - it.rules.capacity_bytes)
    tokens = it.replayed(replace(it.rules, capacity_bytes=enough))
    says = f"{_gib(enough)} GiB, which hold all that comes again"
    yield it.fix("memory_for_all", says, tokens, enough - it.rules.capacity_bytes)


def _gib(size: int) -> str:
    return f"{size / GIB:.3g}" if size < 1000 * GIB else f"{size / GIB:.0f}"


def _enough(it: Explained) -> int:
    """Bytes with which everything is found that comes again; for states, bytes of everything."""
    rules, paths = it.rules, it.facts.paths
    lengths = paths.prompt_tokens, it.facts.asked.output_lens
    outputs, passing = rules.output_blocks(*lengths), int(rules.transient_bytes(*lengths).max())
    if rules.placer is None:
        return stack_distances(paths, paths.blocks(rules.block), outputs).largest * rules.block_bytes + passing
    blocks = int(paths.blocks(rules.block).sum() + outputs.sum())
    return passing + blocks * rules.block_bytes + 2 * paths.requests * rules.state_bytes


def _eviction(it: Explained) -> Iterator[Fix]:
    """The best order of eviction that there can be, which knows the future."""
    tokens = it.facts.offline_optimum(it.rules)
    states = "" if it.rules.placer is None else ", with states that take no memory"
    fix = it.fix("eviction_optimum", f"the best eviction order there can be{states}", tokens, caution=UNREACHED)
    yield replace(fix, is_bound=True)


def _blocks(it: Explained) -> Iterator[Fix]:
    """Other block sizes; a log in blocks of its own says nothing about smaller ones."""
    least = it.facts.log.block or 1
    if it.rules.placer is not None:
        return
    per_token = it.rules.block_bytes // it.rules.block
    for size in BLOCKS:
        if size != it.rules.block and size >= min(least, it.rules.block):
            tokens = it.replayed(replace(it.rules, block=size, block_bytes=size * per_token))
            yield it.fix(f"block_{size}", f"blocks of {size} token{'s' * (size > 1)}", tokens)


def _checkpoints(it: Explained) -> Iterator[Fix]:
    """Other places for recurrent states."""
    if it.rules.placer is None:
        return
    for name, (says, rule) in _placements(it.rules).items():
        yield it.fix(f"states_{name}", says, it.replayed(replace(it.rules, placer=rule)))
    fine = _fine(it)
    if fine.unit < it.rules.unit:
        for name, (says, rule) in _placements(fine).items():
            tokens = it.replayed(replace(fine, placer=rule))
            yield it.fix(f"states_{name}_{fine.unit}", f"{says}, on a grid of {fine.unit} tokens", tokens)


def _fine(it: Explained) -> CacheRules:
    """Blocks of the usual size, and states apart from them, wherever the model's kernels can leave one."""
    model, size = it.model, min(BLOCK, it.rules.block)
    unit = max(model.grid, size)
    return replace(
        it.rules, block=size, block_bytes=size * model.kv_bytes_per_token, state_bytes=model.state_bytes, unit=unit
    )


def _placements(rules: CacheRules) -> dict[str, tuple[str, Rule]]:
    unit = rules.unit

    def last(found: PrefillInfo) -> int:
        return (found.prompt - 1) // unit * unit

    def branch(found: PrefillInfo) -> tuple[int, ...]:
        return (min(found.matched, last(found)),) if found.matched > found.resume else ()

    every = max(unit, 2048 // unit * unit)
    return {
        "last": ("a state at the prompt's last boundary alone", Rule(lambda found: (last(found),))),
        "last_and_branch": (
            "states at the last boundary, and where prompts part once it is stored",
            Rule(lambda found: (last(found), *branch(found))),
        ),
        "branch": ("a state where prompts part, alone", Rule(branch)),
        "seen": (
            "states at the last boundary, and where an earlier prompt parted, stored or not",
            Rule(lambda found: (last(found), min(found.seen, last(found)))),
        ),
        f"every_{every}": (
            f"a state every {every} tokens",
            Rule(lambda found: range(every, found.prompt + 1, every)),
        ),
        "boundary": (
            "a boundary mark: a state where the first span ends, beside the last boundary",
            Rule(lambda found: (*found.boundaries, last(found))),
        ),
    }


def _order(it: Explained) -> Iterator[Fix]:
    """Passages in the order in which they are cached."""
    if not it.facts.log.free.any():
        return
    tokens = int(replay(it.facts.reordered, it.rules).reused.sum())
    says = "passages in the order in which they are cached"
    yield it.fix("cached_order", says, tokens, caution="changes the order of passages that a model reads")


def _anywhere(it: Explained) -> Iterator[Fix]:
    """Position-independent caching, without and with repair, in the same memory."""
    if not it.facts.names_contents or it.rules.placer is not None:
        return
    per_token = it.rules.block_bytes / it.rules.block
    capacity = it.rules.capacity_bytes / per_token
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
        tokens = float(np.sum(it.facts.reused(rules).reused))
        yield it.fix(name, says, tokens, caution=CHANGES_ANSWERS)


def verdict(explained: Explained, fixes: list[Fix], prefix: float) -> str:
    """What to do, in one sentence; that nothing helps is an answer too."""
    helping = [fix for fix in fixes if fix.helps and not fix.is_bound]
    if helping:
        best = max(helping, key=lambda fix: fix.gain)
        first = helping[0]
        most = "" if best is first else f"; the most comes from {best.name}: +{100 * best.gain:.1f} points"
        memory = f" for {_gib(int(first.extra_gib * GIB))} GiB" if first.extra_gib else " in the same memory"
        return f"first {first.says}: +{100 * first.gain:.1f} points{memory}{most}"
    if prefix < WORTH:
        why = f"prompts share {100 * prefix:.1f} % of their tokens as prefixes"
    else:
        why = f"{100 * explained.rate:.1f} % are reused, and a cache without limit would reuse {100 * prefix:.1f} %"
    return f"nothing will help, because {why}, and no fix that the log can tell of brings {100 * WORTH:.1f} points"
