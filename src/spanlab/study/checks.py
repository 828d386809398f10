"""What is refused before a study runs: each in one sentence that names the key, the value and what was expected."""

from __future__ import annotations

from collections.abc import Hashable

from spanlab import build
from spanlab.build import GIB
from spanlab.core.budget import UNLIMITED
from spanlab.core.policies.tree import TreePolicy
from spanlab.core.request import Request
from spanlab.model_spec import ModelSpec
from spanlab.settings import Strategy, Study, arms
from spanlab.settings.decay import DECAY
from spanlab.study.analyses.decay import streams_of
from spanlab.study.machine.device import EngineFacts, installed
from spanlab.study.output.provenance import PACKAGES_OF


def check_packages(study: Study) -> None:
    """Refuse what this environment has no package for."""
    if study.tracking.kind == "wandb" and not installed("wandb"):
        raise ValueError(
            "tracking.kind=wandb: the package wandb is not installed here; expected the environment that "
            "`bash runall.sh` brings, or tracking=none"
        )
    if study.executor.kind == "dask" and not installed("distributed"):
        raise ValueError(
            "executor.kind=dask: the package distributed is not installed here; expected the environment that "
            "`bash runall.sh -cn ENTRY executor=dask` brings, or executor=local"
        )
    missing = [name for name in PACKAGES_OF[study.backend] if not installed(name)]
    if missing:
        raise ValueError(
            f"backend={study.backend}: the package {missing[0]} is not installed here; expected the environment that "
            "`bash runall.sh -cn ENTRY backend=engine` brings, or backend=sim"
        )


def check_pools(study: Study) -> None:
    """Refuse arms that the backend cannot run."""
    for name in study.chosen() if study.backend == "engine" else ():
        arm = study.arms[name]
        if not isinstance(build.build_policy(study, arm, 0, 1), TreePolicy):
            what = "pool" if arm.pool is not None else f"policy={arm.policy}"
            raise ValueError(
                f"arms.{name}.{what} with backend=engine: expected backend=sim, or only=[...] without it; "
                "the engine keeps prefixes in a tree"
            )


def check_marks(study: Study, requests: tuple[Request, ...]) -> None:
    """Refuse an arm that places states at boundaries where the workload marks none."""
    if any(request.boundaries for request in requests):
        return
    for name in study.chosen():
        placement = study.arms[name].placement
        if "boundary" in (placement.kind, *placement.also):
            raise ValueError(
                f"arms.{name}.placement.kind={placement.kind}: workload {study.workload.kind} marks no boundary; "
                "expected arms=unmarked, or only=[...] without it"
            )


def check_passages(study: Study, requests: tuple[Request, ...]) -> None:
    """Refuse an arm that chooses among passages where the workload has none, or does not say which it needs."""
    passages = any(span.independent for request in requests for span in request.spans)
    gold = any(request.gold for request in requests)
    for name in study.chosen():
        rules = study.arms[name].passages
        if not (rules.are_usual or passages):
            chosen = f"order={rules.order}, view={rules.view}"
            expected = "expected given and all, or a workload of independent spans, as rag"
            raise ValueError(f"arms.{name}.passages.{chosen} with workload.kind={study.workload.kind}: {expected}")
        if rules.view == "gold" and not gold:
            expected = "expected all or none, for it does not say which passages an answer needs"
            raise ValueError(f"arms.{name}.passages.view=gold with workload.kind={study.workload.kind}: {expected}")


def check_streams(study: Study, requests: tuple[Request, ...]) -> None:
    """Refuse a stream with too few novel requests, or too few known ones among them."""
    if DECAY in study.chosen_analyses():
        streams_of(study, requests)


def check_learning(study: Study, requests: tuple[Request, ...]) -> None:
    """Refuse an arm whose placement solves once and has nothing to learn from by then."""
    count = study.workload.popularity.requests or len(requests)
    for name in study.chosen():
        arms.check_learning(name, study.arms[name], int(study.warmup_fraction * count))


def check_fit(study: Study, requests: tuple[Request, ...]) -> None:
    """Refuse a request that the store could not hold even alone, with the copies that an arm may make of its spans."""
    model, budget = study.model, build.build_budget(study.store)
    alike = {_held(study.arms[name], model): name for name in reversed(study.chosen())}
    for name in alike.values():
        policy = build.build_policy(study, study.arms[name], 0, 1)
        needs = [policy.need(request) for request in requests]
        largest = max(range(len(requests)), key=lambda at: needs[at].tokens)
        tokens, copies, _, kv, state = needs[largest]
        for key, need, limit in (
            ("kv_gib", kv, budget.kv_bytes),
            ("state_gib", state, budget.state_bytes),
            ("total_gib", kv + state, budget.total_bytes),
        ):
            if need > limit:
                own = f", {copies:,} of them copies that arm {name} makes" if copies else " and a state" * bool(state)
                raise ValueError(
                    f"store.{key}={getattr(study.store, key)}: expected at least {need / GIB:.3g} GiB, for request "
                    f"{requests[largest].id} alone may hold {tokens:,} tokens of {model.name}{own}"
                )


def _held(arm: Strategy, model: ModelSpec) -> Hashable:
    """What the needs of an arm's requests depend on: how spans are reused, not where states of prompts go."""
    states = build.build_progress(model, arm), arm.state_format
    return repr(arm.spans), repr(arm.pool), arm.policy, arm.block_size, states


def check_memory(study: Study) -> None:
    """Refuse a budget that the card's memory does not leave beside the weights; `constant` timing knows no card."""
    budget = _pool_bytes(study)
    if study.timing.kind == "constant" or budget >= UNLIMITED:
        return
    weights = study.model.weight_bytes / GIB
    room = study.hardware.memory_gib - weights
    if room <= 0:
        raise ValueError(
            f"model.name={study.model.name}: its weights take {weights:.3g} GiB; expected less than the "
            f"{study.hardware.memory_gib:.3g} GiB of hardware.name={study.hardware.name}"
        )
    if budget / GIB > room:
        raise ValueError(
            f"store of {budget / GIB:.3g} GiB on hardware.name={study.hardware.name}: expected at most {room:.3g} GiB, "
            f"beside {study.model.name}"
        )


def note_on_times(study: Study, requests: tuple[Request, ...]) -> str | None:
    """A sentence where a workload brings arrival times and the study draws others."""
    kind = study.arrivals.kind
    if kind == "as_given" or not any(request.arrived_at for request in requests):
        return None
    recorded = "arrivals=as_given arrivals.rate_rps=null load.rates_rps=[]"
    return f"arrivals.kind={kind} draws the arrival times; the recorded ones are not used ({recorded} uses them)"


def check_device(study: Study, facts: EngineFacts) -> None:
    """Refuse a budget that the engine's real device, whatever its name here, does not leave beside the weights."""
    budget = _pool_bytes(study)
    room = max(0, facts.memory_bytes - study.model.weight_bytes)
    if room < budget < UNLIMITED:
        raise ValueError(
            f"store of {budget / GIB:.3g} GiB on {facts.device}: expected at most {room / GIB:.3g} GiB, "
            f"for it has {facts.memory_bytes / GIB:.3g} GiB and {study.model.name} takes "
            f"{study.model.weight_bytes / GIB:.3g}"
        )


def check_context(study: Study, facts: EngineFacts, requests: tuple[Request, ...]) -> None:
    """Refuse a prompt that has more tokens, its answer included, than the model has positions."""
    for request in requests:
        tokens = request.num_tokens + request.longest_output - 1
        if tokens <= facts.context:
            continue
        source, longest = study.workload, max(request.spans, key=lambda span: len(span.tokens))
        where = f"workload.kind={source.kind}" if source.path is None else f"workload.path={source.path}"
        what = f"{len(longest.tokens):,} of them in one {'passage' if longest.independent else 'span'}"
        raise ValueError(
            f"{where}: expected prompts of at most {facts.context:,} tokens with their answers, the positions that "
            f"{facts.model} was made for; request {request.id} has {tokens:,}, {what}"
        )


def _pool_bytes(study: Study) -> int:
    """The most that a store may hold, KV and states together, as far as it is limited."""
    budget = build.build_budget(study.store)
    limited = study.model.is_hybrid and budget.state_bytes < UNLIMITED
    return min(budget.total_bytes, budget.kv_bytes + (budget.state_bytes if limited else 0))
