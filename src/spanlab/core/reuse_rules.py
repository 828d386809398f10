"""The plain facts that a policy obeys."""

from __future__ import annotations

from dataclasses import dataclass, field

from spanlab.core.repair import Repair
from spanlab.core.sections import Layout, whole


@dataclass(frozen=True, slots=True)
class CacheRules:
    """What counts as a use of stored tokens, and what a running request keeps and holds.

    `touch`       what a hit refreshes: "match", all that was found, or "resume", what is read of it
    `age_by`      "release": the end of a request is a use as well, and so is its preemption; "finish": its end only;
                  "access": hits and insertions alone
    `store_to`    "computed": all computed KV is stored; "state": KV up to the newest state only
    `share_step`  KV can be found as soon as it is scheduled, by requests of the same step
    `hold_state`  the newest state of a running request cannot leave; else only until it has been read
    """

    touch: str = "match"
    age_by: str = "release"
    store_to: str = "computed"
    share_step: bool = True
    hold_state: bool = False


@dataclass(frozen=True, slots=True)
class ReuseRules:
    """The plain facts a policy obeys.

    `keeps`         False keeps nothing: the cold baseline
    `needs_states`  the model has recurrent layers: KV without a state saves nothing
    `grid`          states stand at multiples of it
    `last_token`    False: a fully known prompt still computes one token, for its logits
    `layout`        how a prompt is cut into what is stored; states go with one section only
    `repair`        which tokens of spans found elsewhere are computed again
    `copies`        a request reads its own copies of the spans that it reuses, not the stored ones
    `cache`         what counts as a use, and what a request keeps and holds
    """

    keeps: bool = True
    needs_states: bool = False
    grid: int = 1
    last_token: bool = False
    layout: Layout = whole
    repair: Repair = field(default_factory=Repair)
    copies: bool = False
    cache: CacheRules = field(default_factory=CacheRules)

    def __post_init__(self) -> None:
        alone = self.layout is whole
        assert alone or not self.needs_states, "states belong to a prompt of one section"
        assert not self.repair.measured or self.copies, "a measured repair writes to every span it looks at"
