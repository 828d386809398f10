"""Rules that a policy follows."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from spanlab.checks import one_of, positive
from spanlab.core.cache_spans import CacheSpan, Layout, whole
from spanlab.core.maps import MapRules
from spanlab.core.progress import Progress
from spanlab.core.recovery import Replay
from spanlab.core.repair import Repair
from spanlab.core.request import Request
from spanlab.core.state_formats import StateFormat


@dataclass
class CacheRules:
    """What counts as a use of what is stored, and what a running request keeps.

    `touch`       what a match refreshes: match, all that was found; resume, the part that is read
    `age_by`      events that count as a use besides a match: release, the end and a preemption; finish, the end;
                  access, insertions alone
    `store_to`    computed: all computed KV is stored; state: KV up to the newest state only
    `share_step`  requests of one step find KV that is scheduled in that step
    `hold_state`  the newest state of a running request cannot be evicted; else only until it has been read
    `states_per_path`  beyond so many states on the path of an insertion, its shallowest leave; null: no such limit.
                  Their KV stays, as do the path's last state, states in use, at forks and at leaves (SGLang #31230)
    """

    touch: str = "match"
    age_by: str = "release"
    store_to: str = "computed"
    share_step: bool = True
    hold_state: bool = False
    states_per_path: int | None = None

    def check(self, path: str) -> None:
        """Raise ValueError for invalid settings; `path` is their key."""
        one_of(f"{path}.touch", self.touch, ("match", "resume"))
        one_of(f"{path}.age_by", self.age_by, ("release", "finish", "access"))
        one_of(f"{path}.store_to", self.store_to, ("computed", "state"))
        positive(f"{path}.states_per_path", self.states_per_path)


@dataclass(frozen=True, slots=True)
class ReuseRules:
    """Rules that a policy follows.

    `keeps`         False: nothing is stored (the cold baseline)
    `needs_states`  the model has recurrent layers: KV without a state saves nothing
    `grid`          states stand at multiples of it
    `last_token`    False: a fully stored prompt still computes one token, for its logits
    `layout`        how a prompt is cut into cache spans
    `repair`        which tokens of spans that were computed elsewhere are recomputed
    `copies`        a request reads private copies of the spans that it reuses
    `cache`         what counts as a use, and what a running request stores and locks
    `maps`          how recurrent layers store spans; None without such layers, or for prompts of one cache span
    `map_bytes`     of one map as it is stored
    `working_map_bytes`  of the map of a span that a running request computes
    `progress`      states that are captured while tokens are computed; None: none
    `replay`        advances a state through tokens whose KV is stored; None: they are computed
    `backfills`     states are loaded back from lower tiers
    `state_format`  format of stored states; None: that of running requests
    `state_bytes_saved`  bytes that the format saves per state
    `drops_last`    the last block of a match is recomputed, since a drafter's keys and values at its end depend on
                    the token after it
    """

    keeps: bool = True
    needs_states: bool = False
    grid: int = 1
    last_token: bool = False
    layout: Layout = whole
    repair: Repair = field(default_factory=Repair)
    copies: bool = False
    cache: CacheRules = field(default_factory=CacheRules)
    maps: MapRules | None = None
    map_bytes: int = 0
    working_map_bytes: int = 0
    progress: Progress | None = None
    replay: Replay | None = None
    backfills: bool = False
    state_format: StateFormat | None = None
    state_bytes_saved: int = 0
    drops_last: bool = False

    def __post_init__(self) -> None:
        composed = self.needs_states and self.layout is not whole
        assert composed == (self.maps is not None), "recurrent layers need maps where a prompt has several cache spans"
        assert not (composed and self.copies), "spans with maps are read as stored"
        assert not composed or self.repair.kind in ("none", "first"), "a map covers the tokens behind a repair"
        follows = self.progress is not None or self.replay is not None
        assert not follows or (self.needs_states and not composed), "positions are those of the prompt"
        assert not (self.drops_last and self.needs_states), "drafts need a model without recurrent layers"
        assert not self.repair.rewrites or self.copies, "a measured repair writes to every span it looks at"


@dataclass(frozen=True)
class StorageRules:
    """Rules by which a family of caches divides prompts into stored units.

    `layout`      cache spans of a prompt; each one is a separate prefix
    `key`         cache spans with equal keys may share
    `unit`        tokens per unit; reuse and storage are whole units from the cache span's start
    `last_token`  True: the last prompt token may be reused too
    `outputs`     True: output tokens that the workload contains are stored behind the prompt
    """

    layout: Layout
    key: Callable[[Request, CacheSpan], Hashable]
    unit: int = 1
    last_token: bool = False
    outputs: bool = False
