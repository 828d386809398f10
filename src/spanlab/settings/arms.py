"""Settings of an arm. `Study` checks them, because an error names the arm."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

import yaml

from spanlab.analysis.settings_difference import leaves
from spanlab.checks import one_of, positive
from spanlab.compiled import CONF
from spanlab.core.eviction import EVICTION_ORDERS, FUTURE
from spanlab.core.maps import MapRules
from spanlab.core.passages import PassageRules
from spanlab.core.policies.named import POLICIES
from spanlab.core.repair import Repair
from spanlab.core.reuse_rules import CacheRules
from spanlab.core.spans import SpanSettings
from spanlab.model_spec import ModelSpec
from spanlab.settings.placement import PlacementSettings
from spanlab.settings.pool import PoolSettings
from spanlab.settings.roles import check_admission, check_cost, check_eviction
from spanlab.settings.states import check_states

POLICIES_OF_POOLS = ("chunks", "unshared")  #: beside `blocks`, which has keys of its own


@dataclass
class Strategy:
    """One arm: prefix matching, sharing, placement of states, admission and eviction.

    `family`      legend and colour of the arm in figures; empty: the placement's kind
    `keep`        whether anything is cached
    `match`       radix (token level, edges split) or block_hash (full blocks of `block_size` tokens)
    `block_size`  tokens per block, the unit of matching and sharing
    `placement`   positions of stored recurrent states; hybrid models only
    `eviction`    eviction order; docs/methods.md describes each
    `eviction_options`  options of the eviction order, by name
    `admission`   admission rule, which selects the tokens that are cached; docs/methods.md describes each
    `admission_options`  options of the admission rule, by name
    `cost`        unit of the work that reuse saves, for placement and eviction: tokens, flops or seconds; null: the
                  default of each
    `cost_options`  options of the cost, by name
    `sharing`     shared, or private: one whole entry per request, as in the published study
    `last_token`  the last prompt token after a full match: recompute, or reuse as in the published study
    `cache`       uses that renew an entry's age, and entries that a running request locks
    `spans`       null: prefix caching; else independent spans are reused at any position
    `state_format`  storage format of recurrent states; docs/methods.md describes each
    `recovery`    how a hybrid resumes where KV reaches deeper than a state; docs/methods.md describes each
    `recovery_options`  options of the recovery, by name
    `passages`    choice and order of the independent spans in the prompt
    `pool`        null: a prefix tree; else one pool of hashed blocks, for which keys of the tree cannot be set
    `policy`      null: tree; blocks where `pool` is set; published_study where `sharing` is private. second_touch: a
                  tree with that admission. kept_repairs: a tree that also stores repaired first tokens. exact_hash: a
                  tree that matches whole prompts only. chunks: a pool of chunks that stores prompts only. Others come
                  from a plugin
    `options`     options of the policy, by name
    """

    family: str = ""
    keep: bool = True
    match: str = "radix"
    block_size: int = 1
    placement: PlacementSettings = field(default_factory=PlacementSettings)
    eviction: str = "lru"
    eviction_options: dict[str, Any] = field(default_factory=dict)
    admission: str = "always"
    admission_options: dict[str, Any] = field(default_factory=dict)
    cost: str | None = None
    cost_options: dict[str, Any] = field(default_factory=dict)
    cache: CacheRules = field(default_factory=CacheRules)
    sharing: str = "shared"
    last_token: str = "recompute"
    spans: SpanSettings | None = None
    state_format: str = "native"
    recovery: str = "recompute"
    recovery_options: dict[str, Any] = field(default_factory=dict)
    passages: PassageRules = field(default_factory=PassageRules)
    pool: PoolSettings | None = None
    policy: str | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def policy_name(self) -> str:
        """The registered name of the policy."""
        usual = "blocks" if self.pool is not None else "published_study" if self.sharing == "private" else "tree"
        return self.policy or usual

    @property
    def foresees(self) -> str:
        """The setting by which the arm reads future requests; empty for an online arm."""
        if self.eviction in EVICTION_ORDERS.needing(FUTURE):
            return f"eviction={self.eviction}"
        return self.placement.foresees

    def check(self, arm: str) -> None:
        """Raise ValueError for invalid or contradictory settings, naming the arm."""
        one_of(f"{arm}.match", self.match, ("radix", "block_hash"))
        one_of(f"{arm}.policy", self.policy_name, POLICIES)
        check_eviction(arm, self)
        check_admission(arm, self)
        POLICIES.check(arm, self.policy_name, {}, self.options, f"policy={self.policy_name}")
        one_of(f"{arm}.sharing", self.sharing, ("shared", "private"))
        one_of(f"{arm}.last_token", self.last_token, ("recompute", "reuse"))
        positive(f"{arm}.block_size", self.block_size)
        if self.match == "block_hash" and self.block_size < 2:
            raise ValueError(
                f"{arm}.block_size={self.block_size} with match=block_hash: expected a block of two tokens or more"
            )
        if not self.keep and self.placement.places:
            raise ValueError(f"{arm}.placement.kind={self.placement.kind} with keep=false: nothing is kept")
        self.placement.check(arm)
        self.passages.check(f"{arm}.passages")
        if not self.keep and self.passages.order == "cached":
            raise ValueError(f"{arm}.passages.order=cached with keep=false: nothing is kept; expected given")
        self.cache.check(f"{arm}.cache")
        if self.spans is not None:
            self._check_spans(arm, self.spans)
        if self.pool is not None:
            self._check_pool(arm, self.pool)
        elif self.policy in POLICIES_OF_POOLS:
            self._check_unread(arm, f"policy={self.policy}", Strategy(policy=self.policy, options=self.options))

    def _check_pool(self, arm: str, pool: PoolSettings) -> None:
        pool.check(arm)
        self._check_unread(arm, f"{arm}.pool", Strategy(pool=pool))

    def _check_unread(self, arm: str, chosen: str, usual: Strategy) -> None:
        """Raise ValueError for a key that a pool of blocks does not read and that differs from `usual`."""
        expected = dict(leaves(asdict(usual)))
        for key, value in leaves(asdict(self)):
            if key.partition(".")[0] not in ("family", "passages") and (key, value) not in expected.items():
                raise ValueError(f"{arm}.{key}={value} with {chosen}: a pool of blocks has no such choice")

    def _check_spans(self, arm: str, spans: SpanSettings) -> None:
        spans.check(f"{arm}.spans")
        if self.sharing != "shared" or self.last_token != "recompute":
            raise ValueError(
                f"{arm}.spans with sharing={self.sharing}, last_token={self.last_token}: expected shared and recompute"
            )
        if spans.maps is not None:
            self._check_cache(arm)
            if (spans.maps.interval or 0) % self.block_size:
                raise ValueError(
                    f"{arm}.spans.maps.interval={spans.maps.interval}: "
                    f"expected a multiple of {arm}.block_size={self.block_size}, for maps stand at ends of blocks"
                )

    def _check_cache(self, arm: str) -> None:
        """Raise ValueError for cache rules that assume one state per request."""
        usual = CacheRules()
        for key in ("touch", "store_to", "hold_state", "states_per_path"):
            value, expected = getattr(self.cache, key), getattr(usual, key)
            if value != expected:
                raise ValueError(f"{arm}.cache.{key}={value} with {arm}.spans.maps: expected {expected}")


@cache
def packaged_arms() -> frozenset[str]:
    """Return the names of the arms in all choices of conf/arms."""
    names: set[str] = set()
    for path in (CONF / "arms").glob("*.yaml"):
        arms = yaml.safe_load(path.read_bytes())
        names.update(arms)
        names.update(
            key.partition("@")[2] for item in arms.get("defaults", ()) if isinstance(item, dict) for key in item
        )
    return frozenset(names)


def check_names(key: str, names: Iterable[str], arms: Iterable[str], is_read: bool) -> None:
    """Raise ValueError for a name of no arm of the study; an arm of other choices of conf/arms passes if unread.

    An entry's own lists thus need no change where `arms=` replaces its arms and nothing reads the list.
    """
    for name in names:
        if is_read or name not in packaged_arms():
            one_of(key, name, arms)


def check_arm(name: str, arm: Strategy, model: ModelSpec) -> None:
    """Raise ValueError for an arm that is invalid, or invalid with this model."""
    arm.check(f"arms.{name}")
    check_cost(f"arms.{name}", arm, model)
    if arm.spans is not None:
        _check_spans(name, arm.spans, model)
    check_states(name, arm, model)
    if arm.placement.places and not model.is_hybrid:
        raise ValueError(
            f"arms.{name}.placement.kind={arm.placement.kind} with model.name={model.name}: "
            "it has no recurrent state to place; expected a hybrid model, or arms=attention"
        )
    if arm.placement.places and arm.block_size % model.grid and model.grid % arm.block_size:
        raise ValueError(
            f"arms.{name}.block_size={arm.block_size}: expected a divisor or a multiple of model.grid={model.grid}"
        )
    _check_interval(name, arm, model)


def _check_interval(name: str, arm: Strategy, model: ModelSpec) -> None:
    """Raise ValueError for an interval that rounding to blocks and to the model's grid would change."""
    interval, unit = arm.placement.interval, max(arm.block_size, model.grid)
    if interval is not None and interval % unit:
        raise ValueError(
            f"arms.{name}.placement.interval={interval}: expected a multiple of {unit}, "
            f"for states stand at multiples of it (model.grid={model.grid}, block_size={arm.block_size})"
        )


def check_learning(name: str, arm: Strategy, warmup: int) -> None:
    """Raise ValueError for a frozen placement that is solved before it observes any of `warmup` requests."""
    dp = arm.placement.dp
    if dp is None or dp.update != "frozen" or dp.smoothing:
        return
    observed = warmup if dp.warmup is None else dp.warmup
    if not observed:
        value = "null" if dp.warmup is None else dp.warmup
        raise ValueError(
            f"arms.{name}.placement.dp.warmup={value} with dp.update=frozen: "
            "expected the number of requests to learn from, 1 or more, or a warmup_fraction that holds one"
        )


def _check_spans(name: str, spans: SpanSettings, model: ModelSpec) -> None:
    _check_maps(name, spans.maps, model)
    _check_layers(f"arms.{name}.spans.repair", spans.repair, model)


def _check_layers(path: str, repair: Repair, model: ModelSpec) -> None:
    """Raise ValueError for layers that the model lacks, or behind which no token is skipped."""
    checked, last = repair.check_layer, repair.last_check_layer(model.attention_layers)
    if repair.rewrites and checked > last:
        raise ValueError(f"{path}.check_layer={checked}: expected at most layer {last} of {model.name}")
    if repair.layers and repair.layers[-1] >= model.attention_layers:
        last = model.attention_layers - 1
        raise ValueError(f"{path}.layers={repair.layers}: expected at most layer {last} of {model.name}")


def _check_maps(name: str, maps: MapRules | None, model: ModelSpec) -> None:
    """Raise ValueError for a hybrid model with spans but no maps, and for maps of other models."""
    path = f"arms.{name}.spans.maps"
    if model.is_hybrid and maps is None:
        raise ValueError(
            f"arms.{name}.spans with model.name={model.name}: its recurrent layers remember all that came before; "
            "expected spans.maps, or a model of attention layers alone"
        )
    if maps is not None and not model.is_hybrid:
        raise ValueError(f"{path}.form={maps.form} with model.name={model.name}: expected null, or a hybrid model")
    if maps is not None and (maps.rank or 0) > model.recurrent_key_dim:
        raise ValueError(
            f"{path}.rank={maps.rank}: expected at most {model.recurrent_key_dim}, the key channels of a head"
        )
