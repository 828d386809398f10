"""Load and check the workload of a study before any run."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from spanlab import dense_retrieval  # noqa: F401 - registers its retriever
from spanlab.build import build_policy, build_progress, build_workload
from spanlab.core.policies.tree import TreePolicy
from spanlab.core.request import UNLIMITED, Request
from spanlab.core.token_string import Tokens
from spanlab.engine.settings import GOLD
from spanlab.model_spec import GIB, ModelSpec
from spanlab.provenance import PACKAGES_OF
from spanlab.queries.render import ChatTokenizer
from spanlab.registry import load_plugins, one_of
from spanlab.report.table import rounded_down
from spanlab.settings import arms
from spanlab.settings.analyses import ANALYSES, DESIGNED
from spanlab.settings.server import NO_ENGINE, SERVER
from spanlab.settings.study import Study
from spanlab.study.folder import print_line
from spanlab.study.jobs import build_arrivals, designed_workload
from spanlab.study.machine import EngineFacts, installed
from spanlab.study.servers.base import SERVERS
from spanlab.tracking import check_login
from spanlab.workloads.load import WorkloadSettings
from spanlab.workloads.queries import tokenizer_of
from spanlab.workloads.workload import Workload

# ------------------------------------------------------------------------------
# Checks before a study runs; each error is one sentence with the key, the value and the
# expected value.
# ------------------------------------------------------------------------------


def check_packages(study: Study) -> None:
    """Raise where a package that the study needs is not installed."""
    if study.tracking.kind == "wandb" and not installed("wandb"):
        raise ValueError(
            "tracking.kind=wandb: the package wandb is not installed here; expected the environment that "
            "`bash runall.sh` creates, or tracking=none"
        )
    if study.executor.kind == "dask" and not installed("distributed"):
        raise ValueError(
            "executor.kind=dask: the package distributed is not installed here; expected the environment that "
            "`bash runall.sh -cn ENTRY executor=dask` creates, or executor=local"
        )
    packages = (*PACKAGES_OF[study.backend], *(PACKAGES_OF["engine"] if study.runs_engine else ()))
    missing = [name for name in packages if not installed(name)]
    if missing:
        raise ValueError(
            f"backend={study.backend}: the package {missing[0]} is not installed here; expected the environment that "
            "`bash runall.sh -cn ENTRY backend=engine` creates, or backend=sim"
        )


def check_pools(study: Study) -> None:
    """Raise where the backend cannot run an arm."""
    for name in study.chosen() if study.backend == "engine" else ():
        arm = study.arms[name]
        if not isinstance(build_policy(study, arm, 0, 1), TreePolicy):
            key = "pool" if arm.pool is not None else f"policy={arm.policy}"
            raise ValueError(
                f"arms.{name}.{key} with backend=engine: expected backend=sim, or only=[...] without it; "
                "the engine stores prefixes in a tree"
            )


def check_server(study: Study) -> None:
    """Raise ValueError for a server that is not known, or that cannot serve the study."""
    if study.backend != SERVER or study.server.engine == NO_ENGINE:
        return
    one_of("server.engine", study.server.engine, (NO_ENGINE, *SERVERS))
    SERVERS.make(study.server.engine, {}, {}).check(study)


def check_boundaries(study: Study, requests: tuple[Request, ...]) -> None:
    """Raise where an arm places states at boundaries and the workload marks no boundary."""
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
    """Raise where an arm orders or selects passages and the workload marks no passages, or no gold
    passages."""
    passages = any(span.independent for request in requests for span in request.spans)
    gold = any(request.gold for request in requests)
    for name in study.chosen():
        rules = study.arms[name].passages
        if not (rules.are_default or passages):
            chosen = f"order={rules.order}, view={rules.view}"
            expected = "expected order=given and view=all, or a workload with independent spans, such as rag"
            raise ValueError(
                f"arms.{name}.passages.{chosen} with workload.kind={study.workload.kind}: {expected}"
            )
        if rules.view == "gold" and not gold:
            expected = "expected all or none, because the workload does not mark the passages that an answer needs"
            raise ValueError(
                f"arms.{name}.passages.view=gold with workload.kind={study.workload.kind}: {expected}"
            )


def check_learning(study: Study, requests: tuple[Request, ...]) -> None:
    """Raise where an arm's placement is solved once, before any request to learn from."""
    count = study.workload.popularity.requests or len(requests)
    for name in study.chosen():
        arms.check_learning(name, study.arms[name], int(study.runs.warmup_fraction * count))


def check_fit(study: Study, requests: tuple[Request, ...]) -> None:
    """Raise where one request alone, with an arm's private copies of its spans, exceeds the
    store."""
    model, budget = study.model, study.store.budget
    distinct: dict[Hashable, str] = {}
    for name in reversed(study.chosen()):
        arm = study.arms[name]
        # what decides the memory of a request: span reuse, not the placement of states
        states = build_progress(model, arm), arm.state_format
        distinct[repr(arm.spans), repr(arm.pool), arm.policy, arm.block_size, states] = name
    for name in distinct.values():
        policy = build_policy(study, study.arms[name], 0, 1)
        needs = [policy.need(request) for request in requests]
        largest = max(range(len(requests)), key=lambda index: needs[index].tokens)
        tokens, copies, _, kv, state = needs[largest]
        for key, need, limit in (
            ("kv_gib", kv, budget.kv_bytes),
            ("state_gib", state, budget.state_bytes),
            ("total_gib", kv + state, budget.total_bytes),
        ):
            if need > limit:
                detail = (
                    f", {copies:,} of them copies that arm {name} makes"
                    if copies
                    else " and a state" * bool(state)
                )
                raise ValueError(
                    f"store.{key}={getattr(study.store, key)}: expected at least {need / GIB:.3g} GiB, because request "
                    f"{requests[largest].id} alone may hold {tokens:,} tokens of {model.name}{detail}"
                )


def check_memory(study: Study) -> None:
    """Raise where budget and weights exceed the card's memory; `constant` timing has no card and is
    not checked."""
    budget = _pool_bytes(study)
    room = room_gib(study)
    if room is None or budget >= UNLIMITED:
        return
    if not room:
        raise ValueError(
            f"model.name={study.model.name}: its weights take {study.model.weight_bytes / GIB:.3g} GiB; expected less "
            f"than the {study.hardware.memory_gib:.3g} GiB of hardware.name={study.hardware.name}"
        )
    if budget / GIB > room:
        raise ValueError(
            f"store of {budget / GIB:.5g} GiB on hardware.name={study.hardware.name}: expected at most {room:g} GiB, "
            f"next to the weights of {study.model.name}"
        )


def room_gib(study: Study) -> float | None:
    """Return the largest store of one device, beside the weights; None for constant timing, which
    has no device."""
    return (
        None
        if study.timing.kind == "constant"
        else _room_gib(study.hardware.memory_gib, study.model)
    )


def _room_gib(memory_gib: float, model: ModelSpec) -> float:
    """Return the memory that the weights leave, rounded down, so that a store of the printed size
    is accepted."""
    room = memory_gib - model.weight_bytes / GIB
    return rounded_down(room) if room > 0 else 0.0


def arrival_note(study: Study, requests: tuple[Request, ...]) -> str | None:
    """Return a note where the study generates arrival times for a workload that has recorded ones;
    else None."""
    kind = study.arrivals.kind
    if kind == "as_given" or not any(request.arrived_at for request in requests):
        return None
    recorded = "arrivals=as_given arrivals.rate_rps=null load.rates_rps=[]"
    return f"arrivals.kind={kind} generates arrival times; the recorded times are not used ({recorded} uses them)"


def check_device(study: Study, facts: EngineFacts) -> None:
    """Raise where budget and weights exceed the memory of the device that the engine really runs
    on."""
    budget = _pool_bytes(study)
    room = _room_gib(facts.memory_bytes / GIB, study.model)
    if room < budget / GIB and budget < UNLIMITED:
        raise ValueError(
            f"store of {budget / GIB:.5g} GiB on {facts.device}: expected at most {room:g} GiB, "
            f"because it has {facts.memory_bytes / GIB:.3g} GiB and the weights of {study.model.name} take "
            f"{study.model.weight_bytes / GIB:.3g}"
        )


def check_context(study: Study, facts: EngineFacts, requests: tuple[Request, ...]) -> None:
    """Raise where a prompt and its answer have more tokens than the model has positions."""
    for request in requests:
        tokens = request.num_tokens + request.longest_output - 1
        if tokens <= facts.context:
            continue
        source, longest = study.workload, max(request.spans, key=lambda span: len(span.ids))
        key = (
            f"workload.kind={source.kind}"
            if source.path is None
            else f"workload.path={source.path}"
        )
        longest_text = (
            f"{len(longest.ids):,} of them in one {'passage' if longest.independent else 'span'}"
        )
        raise ValueError(
            f"{key}: expected prompts of at most {facts.context:,} tokens with their answers, the positions that "
            f"{facts.model} supports; request {request.id} has {tokens:,}, {longest_text}"
        )


def _pool_bytes(study: Study) -> int:
    """Largest number of bytes that the store may hold, KV and states together."""
    budget = study.store.budget
    limited = study.model.is_hybrid and budget.state_bytes < UNLIMITED
    return min(budget.total_bytes, budget.kv_bytes + (budget.state_bytes if limited else 0))


# ------------------------------------------------------------------------------
# Gold answers as the fixed outputs of all arms (teacher forcing).
# ------------------------------------------------------------------------------


def with_given_answers(study: Study, workload: Workload) -> Workload:
    """Return the workload with each request's first gold answer as its output, where
    `engine.teacher=gold`.

    Where scores are recorded, wrong options are added to the requests. A model with recurrent
    layers scores no options, because its state has advanced. Requests without a gold answer do not
    change. ValueError where no request has one.
    """
    if study.backend != "engine" or study.engine.teacher != GOLD:
        return workload
    if all(request.answer is None for request in workload.requests):
        setting = f"engine.teacher=gold with workload.kind={study.workload.kind}"
        raise ValueError(f"{setting}: expected a workload whose requests have gold answers")
    tokenizer = tokenizer_of(study.workload.tokenizer)
    unknown = ("",) * len(workload.requests)
    openings = workload.labels.get("opening", unknown)
    compared = study.engine.record == "scores" and not study.model.is_hybrid
    choices = workload.labels.get("choices", unknown) if compared else unknown
    requests = []
    for request, opening, choice in zip(workload.requests, openings, choices, strict=True):
        if request.answer is not None:
            tokens = gold_tokens(request.answer, str(opening), tokenizer)
            right = request.answer.split("\n")
            options = tuple(
                gold_tokens(option, str(opening), tokenizer)
                for option in str(choice).split("\n")  # one per line
                if option and option not in right
            )
            request = replace(request, output=tokens, output_len=len(tokens), options=options)
        requests.append(request)
    return replace(workload, requests=tuple(requests))


def gold_tokens(answer: str, opening: str, tokenizer: ChatTokenizer) -> Tokens:
    """Token ids (int32) of a gold answer after a prompt, without the token that ends the turn.

    `answer`   gold answers, one per line; the first is used
    `opening`  start of the answer that the prompt already contains; a space follows it, and no
               space where it is empty
    """
    first = answer.split("\n", maxsplit=1)[0]
    return tokenizer.encode_with_offsets(f" {first}" if opening else first, literal=True).tokens


LoadFunction = Callable[[WorkloadSettings, str, bool], Workload]


def check_and_load(
    study: Study, name: str, root: Path, console: Console, load: LoadFunction
) -> Workload:
    """Check packages, login and settings, and return the workload."""
    load_plugins(study.plugins)
    check_packages(study)
    check_login(study.tracking)
    return load_workload(study, name, root, console, load)


def load_workload(
    study: Study, name: str, root: Path, console: Console, load: LoadFunction = build_workload
) -> Workload:
    """Check the settings and return the workload; this needs no package of the engine."""
    check_pools(study)
    check_server(study)
    designed = study.workload.kind == DESIGNED
    cache = str(root / ".cache")
    workload = designed_workload(study) if designed else load(study.workload, cache, study.serves)
    workload = with_given_answers(study, workload)
    print_line(console, f"{name} · {workload.name} · {workload.provenance.line()}")
    if not study.serves:
        for analysis in study.chosen_analyses():
            ANALYSES[analysis].check_log(study, workload.log)
        return workload
    if (note := arrival_note(study, workload.requests)) is not None:
        print_line(console, note)
    check_memory(study)
    check_fit(study, workload.requests)
    check_boundaries(study, workload.requests)
    check_passages(study, workload.requests)
    for analysis in study.chosen_analyses():
        ANALYSES[analysis].check_requests(study, workload.requests)
    check_learning(study, workload.requests)
    if not designed:
        build_arrivals(study, workload.requests, study.runs.seeds[0], study.arrivals.rate_rps)
    return workload
