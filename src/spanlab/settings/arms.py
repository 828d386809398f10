"""Settings of an arm. `Study` checks them, because an error names the arm."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any, TypeVar

import yaml

from spanlab.compiled import CONF
from spanlab.core.admission import ADMISSIONS, AdmissionFacts
from spanlab.core.eviction.orders import (
    EVICTION_ORDERS,
    FUTURE,
    EvictionFacts,
    EvictionRules,
    Future,
)
from spanlab.core.placement.dynamic_program import Dp
from spanlab.core.placement.planner import Departures
from spanlab.core.placement.rules import PLACEMENTS, PROGRESS
from spanlab.core.policies.named import POLICIES
from spanlab.core.protocol import PassageRules
from spanlab.core.repair import SpanSettings
from spanlab.core.request import Budget, Request
from spanlab.core.rules import RECOVERIES, STATE_FORMATS, CacheRules, ReuseRules, StorageRules
from spanlab.core.tiers import LOAD_WHEN
from spanlab.core.tree import Layout, PrefixTree, shared_name, without_tails
from spanlab.model_spec import COST, COSTS, CostOf, ModelSpec
from spanlab.registry import Registry, check_keys, one_of, positive
from spanlab.registry import field as declared
from spanlab.settings.analyses import short_key

# ------------------------------------------------------------------------------
# Settings of the placement of recurrent states.
# ------------------------------------------------------------------------------


@dataclass
class PlacementSettings:
    """Positions at which recurrent states are stored: the union of `kind` and of the placements in
    `also`.

    `also`      further placements, which need no option
    `dp`        how dp learns; dp only
    `options`   options of a placement that are no keys here, by name
    """

    kind: str = declared("none", PLACEMENTS, "the placement; docs/methods.md describes each")
    interval: int | None = declared(
        None, None, "tokens between two states, for placements that take it"
    )
    count: int | None = declared(None, None, "states per prompt, for placements that take it")
    offset: int | None = declared(
        None,
        None,
        "tokens from the prompt's end to the first state of tail; null: the model's grid",
    )
    also: list[str] = field(default_factory=list)
    dp: Dp | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def check(self, arm: str) -> None:
        """Raise ValueError for invalid settings, naming the arm."""
        path = f"{arm}.placement"
        check_keys(self, lambda key: f"{path}.{key}", path)
        for extra in self.also:
            one_of(
                f"{path}.also",
                extra,
                [name for name in PLACEMENTS if not PLACEMENTS.needs_options(name)],
            )
        PLACEMENTS.check(
            f"{path}.options", self.kind, f"{path}.kind={self.kind}", self.options, self.keys
        )
        if self.dp is not None:
            self.dp.check(f"{path}.dp")

    @property
    def keys(self) -> dict[str, Any]:
        """Options that are keys of this schema."""
        return {
            "interval": self.interval,
            "count": self.count,
            "offset": self.offset,
            "dp": self.dp,
        }

    @property
    def foresees(self) -> str:
        """The setting by which the placement reads future requests; empty for an online
        placement."""
        clairvoyant = [
            name for name in (self.kind, *self.also) if name in PLACEMENTS.needing(FUTURE)
        ]
        return f"placement.kind={clairvoyant[0]}" if clairvoyant else ""

    @property
    def compares(self) -> bool:
        """Whether the placement compares positions by `cost`; the published solver always counts
        tokens."""
        solver = "optimal" if self.dp is None else self.dp.solver
        return solver != "published" and any(
            name in PLACEMENTS.needing(COST) for name in (self.kind, *self.also)
        )

    @property
    def places(self) -> bool:
        """Whether the placement stores states."""
        return self.kind != "none" or bool(self.also)


# ------------------------------------------------------------------------------
# Settings of a pool of hashed blocks for KV and states.
# ------------------------------------------------------------------------------


@dataclass
class PoolSettings:
    """One pool of hashed blocks for KV and, in hybrid models, for states; see `BlockRules`.

    `block_size`  tokens per block; null: 16, or in hybrid models the least multiple of 16 whose KV
                  is no smaller than a layer's state
    `retention`   states to store; null: every state that is written; 0: the state at the prompt's
                  last block boundary, and one where a shared prefix has none yet; n: also one per n
                  tokens
    `junctions`   whether a state is stored at the end of a shared prefix that has none
    `cut`         whether prefill chunks end at each multiple of `retention`, so that a state exists
                  there
    `inner_states`  whether the last chunk of a prompt also stores the state at its last block
                    boundary; blocks are
                  then multiples of 64 tokens; null: for KDA, and for GatedDeltaNet on Hopper from vLLM 0.33 on
    `release`     release of vLLM whose rules hold: vllm_0_32, vllm_0_33
    """

    block_size: int | None = None
    retention: int | None = 0
    junctions: bool = True
    cut: bool = False
    inner_states: bool | None = None
    release: str = "vllm_0_32"
    load_when: str | None = declared(
        None,
        LOAD_WHEN,
        "when blocks of `store.tiers` are loaded: break_even, where loading is faster than recomputing; always; never, "
        "and no block is written to the tiers; null: break_even; with `store.tiers` only",
    )

    def check(self, arm: str) -> None:
        """Raise ValueError for invalid settings, naming the arm."""
        POLICIES.check(f"{arm}.pool", "blocks", f"{arm}.pool", self.options)
        check_keys(self, lambda key: f"{arm}.pool.{key}", f"{arm}.pool")
        if self.block_size and self.retention and self.retention % self.block_size:
            expected = f"expected 0 or a multiple of block_size={self.block_size}"
            raise ValueError(f"{arm}.pool.retention={self.retention}: {expected}")
        if self.cut and not self.retention:
            raise ValueError(
                f"{arm}.pool.cut=True with retention={self.retention}: expected a retention in tokens"
            )

    @property
    def options(self) -> dict[str, int | bool | str | None]:
        """Options of the policy `blocks`."""
        return {
            key: getattr(self, key)
            for key in ("block_size", "retention", "junctions", "cut", "inner_states", "release")
        }


# ------------------------------------------------------------------------------
# Checks of the eviction order, the admission rule and the cost that an arm names.
# ------------------------------------------------------------------------------

T = TypeVar("T")


def _check_choice(registry: Registry[Any], arm: str, key: str, roles: Strategy) -> str:
    """Raise ValueError for invalid options of the name that a key has; return KEY=NAME."""
    name, options = getattr(roles, key), getattr(roles, f"{key}_options")
    registry.check(f"{arm}.{key}_options", name, f"{arm}.{key}={name}", options)
    return f"{arm}.{key}={name}"


def check_eviction(arm: str, roles: Strategy) -> None:
    """Raise ValueError for an invalid eviction order, naming the arm."""
    chosen = _check_choice(EVICTION_ORDERS, arm, "eviction", roles)
    if roles.foresees and roles.sharing == "private":
        raise ValueError(f"{arm}.{roles.foresees} with sharing=private: expected sharing=shared")
    if roles.foresees and roles.policy_name == "exact_hash":
        raise ValueError(
            f"{arm}.{roles.foresees} with policy=exact_hash: expected a policy that shares prefixes"
        )
    if roles.eviction in EVICTION_ORDERS.needing(FUTURE):
        return
    facts = EvictionFacts(PrefixTree(), Budget(), 1, EvictionRules())
    order = _tried(
        arm, lambda: EVICTION_ORDERS.make(roles.eviction, {}, roles.eviction_options, facts=facts)
    )
    if order.pins is not None and roles.policy_name != "tree":
        raise ValueError(
            f"{chosen} with policy={roles.policy_name}: expected policy=tree, which pins"
        )


def check_admission(arm: str, roles: Strategy) -> None:
    """Raise ValueError for an invalid admission rule, naming the arm."""
    chosen, facts = _check_choice(ADMISSIONS, arm, "admission", roles), AdmissionFacts(Budget(), 1)
    _tried(arm, lambda: ADMISSIONS.make(roles.admission, {}, roles.admission_options, facts=facts))
    if roles.admission != "always" and not POLICIES.takes(roles.policy_name, "admission"):
        raise ValueError(
            f"{chosen} with policy={roles.policy_name}: expected admission=always or policy=tree"
        )


def check_cost(arm: str, roles: Strategy, model: ModelSpec) -> None:
    """Raise ValueError for an invalid cost, or one that no rule of the arm reads, naming the
    arm."""
    if roles.cost is None:
        for key in roles.cost_options:
            raise ValueError(
                f"{arm}.cost_options.{key} with {arm}.cost=null: expected a cost, one of {', '.join(COSTS)}"
            )
        return
    chosen = _check_choice(COSTS, arm, "cost", roles)
    _tried(arm, lambda: COSTS.make(str(roles.cost), {}, roles.cost_options, model=model))
    if roles.eviction not in EVICTION_ORDERS.needing(COST) and not roles.placement.compares:
        orders = ", ".join(EVICTION_ORDERS.needing(COST))
        raise ValueError(
            f"{chosen} with eviction={roles.eviction}: expected null, for no rule of this arm reads it; "
            f"it goes with eviction={orders}, and with placements that choose by it"
        )


def _tried(arm: str, make: Callable[[], T]) -> T:
    """Return `make()`; a ValueError gets the name of the arm."""
    try:
        return make()
    except ValueError as error:
        raise ValueError(f"{arm}.{error}") from error


# ------------------------------------------------------------------------------
# Checks of an arm's rules for recurrent states: against each other, the model, the backend and
# the timing model.
# ------------------------------------------------------------------------------


def check_states(name: str, arm: Strategy, model: ModelSpec) -> None:
    """Raise ValueError for rules that would have no effect."""
    path = f"arms.{name}"
    for kind in (arm.placement.kind, *arm.placement.also):
        if kind in PLACEMENTS.needing(PROGRESS):
            _check_whole_prompts(f"{path}.placement.kind={kind}", path, arm)
    if arm.cache.states_per_path is not None and not arm.placement.places:
        setting = f"{path}.cache.states_per_path={arm.cache.states_per_path}"
        raise ValueError(
            f"{setting} with {path}.placement.kind=none: expected null, for there are no states"
        )
    chosen = _check_choice(RECOVERIES, path, "recovery", arm)
    if arm.recovery != "recompute":
        if not model.is_hybrid:
            raise ValueError(
                f"{chosen} with model.name={model.name}: expected recompute, for it has no "
                "recurrent state"
            )
        if not arm.keep or arm.policy_name != "tree":
            setting = f"keep={str(arm.keep).lower()}, policy={arm.policy_name}"
            raise ValueError(f"{chosen} with {setting}: expected true and tree")
        _check_whole_prompts(chosen, path, arm)
    if arm.state_format == "native":
        return
    setting = f"{path}.state_format={arm.state_format}"
    if not arm.placement.places:
        raise ValueError(
            f"{setting} with {path}.placement.kind=none: expected native, for there are no states"
        )
    if arm.spans is not None:
        raise ValueError(
            f"{setting} with {path}.spans: expected native; {path}.spans.maps.dtype is the type of maps"
        )
    if STATE_FORMATS.make(arm.state_format, {}, {}, model=model).num_bytes >= model.state_bytes:
        raise ValueError(
            f"{setting} with model.state_itemsize={model.state_itemsize}: expected native, which is no larger"
        )


def _check_whole_prompts(setting: str, path: str, arm: Strategy) -> None:
    """Raise ValueError for arms that do not compute prompts as one prefix."""
    if arm.sharing == "private":
        raise ValueError(f"{setting} with {path}.sharing=private: expected shared")
    if arm.spans is not None:
        raise ValueError(f"{setting} with {path}.spans: expected null, for states of whole prompts")


# ------------------------------------------------------------------------------
# Settings that differ between several runs.
# ------------------------------------------------------------------------------

ABSENT = "–"


def differing(configs: Sequence[Mapping[str, Any]]) -> dict[str, tuple[str, ...]]:
    """Return each setting that differs between runs, by its full key, with its value in each run.

    An arm that some runs lack is one setting, `arms.NAME`, with the values present and –.
    """
    arms = [config.get("arms", {}) for config in configs]
    shared = set.intersection(*(set(run_arms) for run_arms in arms))
    names = dict.fromkeys(name for run_arms in arms for name in run_arms if name not in shared)
    presence = {
        f"arms.{name}": tuple("present" if name in run_arms else ABSENT for run_arms in arms)
        for name in names
    }
    settings = []
    for config, run_arms in zip(configs, arms, strict=True):
        shared_arms = {name: run_arms[name] for name in run_arms if name in shared}
        # an earlier version stored short names
        named = leaves({**config, "arms": shared_arms})
        settings.append({short_key(key): value for key, value in named})
    keys = dict.fromkeys(key for run_settings in settings for key in run_settings)
    values = {
        key: tuple(str(run_settings.get(key, ABSENT)) for run_settings in settings) for key in keys
    }
    return {key: by_run for key, by_run in (values | presence).items() if len(set(by_run)) > 1}


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings that are not mappings, with their full key."""
    if not isinstance(value, dict):
        yield key, value
        return
    for name, inner in value.items():
        yield from leaves(inner, f"{key}.{name}" if key else name)


POLICIES_OF_POOLS = ("chunks", "unshared")  #: beside `blocks`, which has keys of its own
POLICIES_OF_SEQUENCES = ("sequences", "slots")  #: no key of the tree has a meaning for them either


@dataclass
class Strategy:
    """One arm: prefix matching, sharing, placement of states, admission and eviction.

    `family`      legend and colour of the arm in figures; empty: the placement's kind
    `keep`        whether anything is cached
    `placement`   positions of stored recurrent states; hybrid models only
    `eviction_options`  options of the eviction order, by name
    `admission_options`  options of the admission rule, by name
    `cost_options`  options of the cost, by name
    `cache`       uses that renew an entry's age, and entries that a running request locks
    `spans`       null: prefix caching; else independent spans are reused at any position
    `recovery_options`  options of the recovery, by name
    `passages`    choice and order of the independent spans in the prompt
    `pool`        null: a prefix tree; else one pool of hashed blocks, for which keys of the tree
                  cannot be set
    `options`     options of the policy, by name
    """

    family: str = ""
    keep: bool = True
    match: str = declared(
        "radix",
        ("radix", "block_hash"),
        "radix (token level, edges split) or block_hash (full blocks of `block_size` tokens)",
    )
    block_size: int = declared(1, positive, "tokens per block, the unit of matching and sharing")
    placement: PlacementSettings = field(default_factory=PlacementSettings)
    eviction: str = declared(
        "lru", EVICTION_ORDERS, "eviction order; docs/methods.md describes each"
    )
    eviction_options: dict[str, Any] = field(default_factory=dict)
    admission: str = declared(
        "always",
        ADMISSIONS,
        "admission rule, which selects the tokens that are cached; docs/methods.md describes each",
    )
    admission_options: dict[str, Any] = field(default_factory=dict)
    cost: str | None = declared(
        None,
        COSTS,
        "unit of the work that reuse saves, for placement and eviction; null: the default of each",
    )
    cost_options: dict[str, Any] = field(default_factory=dict)
    cache: CacheRules = field(default_factory=CacheRules)
    sharing: str = declared(
        "shared",
        ("shared", "private"),
        "shared, or private: one whole entry per request, as in the published study",
    )
    last_token: str = declared(
        "recompute",
        ("recompute", "reuse"),
        "the last prompt token after a full match: recompute, or reuse as in the published study",
    )
    spans: SpanSettings | None = None
    state_format: str = declared(
        "native",
        STATE_FORMATS,
        "storage format of recurrent states; docs/methods.md describes each",
    )
    recovery: str = declared(
        "recompute",
        RECOVERIES,
        "how a hybrid resumes where KV reaches deeper than a state; docs/methods.md describes each",
    )
    recovery_options: dict[str, Any] = field(default_factory=dict)
    passages: PassageRules = field(default_factory=PassageRules)
    pool: PoolSettings | None = None
    policy: str | None = declared(
        None,
        POLICIES,
        "null: tree; blocks where `pool` is set; published_study where `sharing` is private. second_touch: a tree with "
        "that admission. kept_repairs: a tree that also stores repaired first tokens. exact_hash: a tree that matches "
        "whole prompts only. chunks: a pool of chunks that stores prompts only. sequences, slots: whole sequences, as "
        "in mistral.rs and llama.cpp. Others come from a plugin",
    )
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def policy_name(self) -> str:
        """The registered name of the policy."""
        usual = (
            "blocks"
            if self.pool is not None
            else "published_study"
            if self.sharing == "private"
            else "tree"
        )
        return self.policy or usual

    @property
    def foresees(self) -> str:
        """The setting by which the arm reads future requests; empty for an online arm."""
        if self.eviction in EVICTION_ORDERS.needing(FUTURE):
            return f"eviction={self.eviction}"
        return self.placement.foresees

    def check(self, arm: str) -> None:
        """Raise ValueError for invalid or contradictory settings, naming the arm."""
        check_keys(self, lambda key: f"{arm}.{key}", arm)
        check_eviction(arm, self)
        check_admission(arm, self)
        POLICIES.check(
            f"{arm}.options", self.policy_name, f"{arm}.policy={self.policy_name}", self.options
        )
        if self.match == "block_hash" and self.block_size < 2:
            raise ValueError(
                f"{arm}.block_size={self.block_size} with match=block_hash: expected a block of two tokens or more"
            )
        if not self.keep and self.placement.places:
            raise ValueError(
                f"{arm}.placement.kind={self.placement.kind} with keep=false: nothing is kept"
            )
        self.placement.check(arm)
        self.passages.check(f"{arm}.passages")
        if not self.keep and self.passages.order == "cached":
            raise ValueError(
                f"{arm}.passages.order=cached with keep=false: nothing is kept; expected given"
            )
        self.cache.check(f"{arm}.cache")
        if self.spans is not None:
            self._check_spans(arm, self.spans)
        if self.pool is not None:
            self.pool.check(arm)
            self._check_unread(arm, f"{arm}.pool", Strategy(pool=self.pool))
        elif self.policy in (*POLICIES_OF_POOLS, *POLICIES_OF_SEQUENCES):
            self._check_unread(
                arm, f"policy={self.policy}", Strategy(policy=self.policy, options=self.options)
            )

    def _check_unread(self, arm: str, chosen: str, usual: Strategy) -> None:
        """Raise ValueError for a key that the policy does not read and that differs from
        `usual`."""
        expected = dict(leaves(asdict(usual)))
        for key, value in leaves(asdict(self)):
            if (
                key.partition(".")[0] not in ("family", "passages")
                and (key, value) not in expected.items()
            ):
                what = (
                    "a cache of whole sequences"
                    if self.policy in POLICIES_OF_SEQUENCES
                    else "a pool of blocks"
                )
                raise ValueError(f"{arm}.{key}={value} with {chosen}: {what} has no such choice")

    def _check_spans(self, arm: str, spans: SpanSettings) -> None:
        spans.check(f"{arm}.spans")
        if self.sharing != "shared" or self.last_token != "recompute":
            raise ValueError(
                f"{arm}.spans with sharing={self.sharing}, last_token={self.last_token}: expected shared and recompute"
            )
        if spans.maps is not None:
            usual = CacheRules()  # the other rules assume one state per request
            for key in ("touch", "store_to", "hold_state", "states_per_path"):
                value, expected = getattr(self.cache, key), getattr(usual, key)
                if value != expected:
                    raise ValueError(
                        f"{arm}.cache.{key}={value} with {arm}.spans.maps: expected {expected}"
                    )
            if (spans.maps.interval or 0) % self.block_size:
                raise ValueError(
                    f"{arm}.spans.maps.interval={spans.maps.interval}: "
                    f"expected a multiple of {arm}.block_size={self.block_size}, for maps stand at ends of blocks"
                )


@cache
def packaged_arms() -> frozenset[str]:
    """Return the names of the arms in all choices of conf/arms."""
    names: set[str] = set()
    for path in (CONF / "arms").glob("*.yaml"):
        arms = yaml.safe_load(path.read_bytes())
        names.update(arms)
        names.update(
            key.partition("@")[2]
            for item in arms.get("defaults", ())
            if isinstance(item, dict)
            for key in item
        )
    return frozenset(names)


def check_names(key: str, names: Iterable[str], arms: Iterable[str], is_read: bool) -> None:
    """Raise ValueError for a name of no arm of the study; an arm of other choices of conf/arms
    passes if unread.

    An entry's own lists thus need no change where `arms=` replaces its arms and nothing reads the
    list.
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
    interval, unit = arm.placement.interval, max(arm.block_size, model.grid)
    if interval is not None and interval % unit:
        raise ValueError(
            f"arms.{name}.placement.interval={interval}: expected a multiple of {unit}, "
            f"for states stand at multiples of it (model.grid={model.grid}, block_size={arm.block_size})"
        )


def check_learning(name: str, arm: Strategy, warmup: int) -> None:
    """Raise ValueError for a frozen placement that is solved before it observes any of `warmup`
    requests."""
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
    maps = spans.maps
    if model.is_hybrid and maps is None:
        raise ValueError(
            f"arms.{name}.spans with model.name={model.name}: its recurrent layers remember all that came before; "
            "expected spans.maps, or a model of attention layers alone"
        )
    if maps is not None and not model.is_hybrid:
        raise ValueError(
            f"arms.{name}.spans.maps.form={maps.form} with model.name={model.name}: expected null, or a hybrid model"
        )
    if maps is not None and (maps.rank or 0) > model.recurrent_key_dim:
        raise ValueError(
            f"arms.{name}.spans.maps.rank={maps.rank}: expected at most {model.recurrent_key_dim}, "
            "the key channels of a head"
        )
    if model.has_latents:
        reason = "how latents are read at other positions is not modelled"
        raise ValueError(
            f"arms.{name}.spans with model.name={model.name}: expected keys and values, for {reason}"
        )
    path, repair = f"arms.{name}.spans.repair", spans.repair
    checked, last = repair.check_layer, repair.last_check_layer(model.attention_layers)
    if repair.rewrites and checked > last:
        raise ValueError(
            f"{path}.check_layer={checked}: expected at most layer {last} of {model.name}"
        )
    if repair.layers and repair.layers[-1] >= model.attention_layers:
        last = model.attention_layers - 1
        raise ValueError(
            f"{path}.layers={repair.layers}: expected at most layer {last} of {model.name}"
        )


# ------------------------------------------------------------------------------
# Future requests, in the form that clairvoyant eviction orders and placements read.
# ------------------------------------------------------------------------------


def eviction_rules(
    strategy: Strategy, cost: CostOf, rules: ReuseRules, future: Sequence[Request]
) -> EvictionRules:
    """Return the inputs of an arm's eviction order, with the future requests if it reads them."""
    if strategy.eviction not in EVICTION_ORDERS.needing(FUTURE):
        continued = frozenset(earlier for request in future for earlier in request.after)
        return EvictionRules(strategy.eviction_options, cost, continued=continued)
    requests = Future(future, _stored(rules), shared_name, strategy.block_size)
    return EvictionRules(strategy.eviction_options, cost, requests)


def departures(
    strategy: Strategy, model: ModelSpec, rules: ReuseRules, future: Sequence[Request]
) -> Departures | None:
    """Return where each future request departs from earlier ones, in units of stored states; None
    if online."""
    if not strategy.placement.foresees:
        return None
    unit = max(strategy.block_size, model.grid)
    return Departures(future, StorageRules(_stored(rules), shared_name, unit, rules.last_token))


def _stored(rules: ReuseRules) -> Layout:
    """Return the layout of the cache spans that a tree stores."""
    return rules.layout if rules.repair.by_span else without_tails(rules.layout)
