"""Settings of the analysis `plan`, and the checks of a study with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from spanlab.checks import one_of, positive, require
from spanlab.registry import Registry

if TYPE_CHECKING:
    from spanlab.settings.study import Study
    from spanlab.study.plan.search_result import SearchResult

PLAN = "plan"
#: Functions of a planner (`spanlab.study.plan.planner`); each returns the result of one search.
SEARCHES: Registry[SearchResult] = Registry("plan.search", given=("planner",))
SEARCHES.later("memory", "spanlab.study.plan.memory")
SEARCHES.later("load", "spanlab.study.plan.load")
SEARCHES.later("tier", "spanlab.study.plan.tier")
SEARCHES.later("replicas", "spanlab.study.plan.replicas")
SEARCHES.later("ratio", "spanlab.study.plan.ratio")
SEARCHES.later("interval", "spanlab.study.plan.interval")
SEARCHES.later("block", "spanlab.study.plan.block")


@dataclass
class PlanSettings:
    """Search for settings that meet the targets of `slo`.

    `search`      memory: least store; load: most requests per second; tier: least size of the last tier; replicas:
                  fewest; ratio: of states to KV; interval: between states; block: tokens per block; null: memory and
                  load
    `resolution`  smallest distance of two tried values, relative to the value
    `points`      values over the whole range that are tried first, before the search narrows
    `shakes`      runs of recorded arrivals; all but the first shift each arrival by a small random time
    """

    search: list[str] | None = None
    resolution: float = 0.05
    points: int = 5
    shakes: int = 3

    def __post_init__(self) -> None:
        for name in self.search or ():
            one_of("plan.search", name, SEARCHES)
        if self.search == [] or len(set(self.search or ())) < len(self.search or ()):
            raise ValueError(f"plan.search={self.search}: expected one or more of {', '.join(SEARCHES)}, each once")
        if not 0.001 <= self.resolution <= 1:
            raise ValueError(f"plan.resolution={self.resolution}: expected a share from 0.001 to 1")
        if not 2 <= self.points <= 100:
            raise ValueError(f"plan.points={self.points}: expected 2 to 100")
        positive("plan.shakes", self.shakes)

    @property
    def searches(self) -> list[str]:
        """Names of the searches, in order."""
        return ["memory", "load"] if self.search is None else self.search


def check_plan(study: Study) -> None:
    """Raise ValueError for settings that `plan` does not read, and for its keys in other studies."""
    analyses, targets = study.chosen_analyses(), study.slo.targets
    if PLAN not in analyses:
        if targets:
            raise ValueError(f"slo.{targets[0].key}={targets[0].limit_s} with analyses={analyses}: expected [plan]")
        if study.plan != PlanSettings():
            raise ValueError(f"plan.search={study.plan.search} with analyses={analyses}: expected analyses=[plan]")
        return
    if not targets:
        raise ValueError("slo is empty with analyses=plan: expected a target, as in slo.ttft_p95_s=0.5")
    require(
        "analyses=plan",
        ("analyses", analyses, [PLAN]),
        ("backend", study.backend, "sim"),
        ("load.rates_rps", study.load.rates_rps, []),
        ("sweep", study.sweep, []),
        ("only", study.chosen(), [study.baseline]),
        *(
            (f"store.{key}", getattr(study.store, key), None)
            for key in ("kv_gib", "state_gib", "state_ratio", "entries")
        ),
    )
    for name in study.plan.searches:
        _check_search(study, name)


def _check_search(study: Study, name: str) -> None:
    """Raise ValueError for a search without the store, router, model or arm that it changes."""
    hybrid, pool = study.model.is_hybrid, study.arms[study.baseline].pool is not None
    arm = f"model.name={study.model.name} and baseline={study.baseline}"
    tree = (arm, "a hybrid model and an arm that keeps a tree")
    needs = {
        "tier": [(bool(study.store.tiers), "store.tiers={}", "a tier, as in +tier@store.tiers.host=dram")],
        "replicas": [(study.replicas.routing is not None, "replicas.routing=null", "a routing, as least_loaded")],
        "interval": [(hybrid and not pool, *tree)],
        "ratio": [
            (hybrid and not pool, *tree),
            (study.store.total_gib is not None, "store.total_gib=null", "the memory that is split"),
        ],
        "block": [(not (hybrid and pool), arm, "an arm whose blocks need not hold a state")],
    }
    for met, given, expected in needs.get(name, ()):
        if not met:
            raise ValueError(f"{given} with plan.search={name}: expected {expected}")
