"""Every file of every group can be chosen, and becomes objects that serve requests."""

from functools import cache
from itertools import zip_longest
from pathlib import Path

import pytest

from spanlab.analyses.fit_profile import store_profile
from spanlab.build import build_policy, build_tiered, build_timing, build_workload
from spanlab.cli import compose, described, groups
from spanlab.compiled import CONF
from spanlab.core.step import StepFeatures
from spanlab.provenance import machine
from spanlab.settings import Study
from spanlab.study.jobs import build_arrivals
from spanlab_sim.run import simulate
from spanlab_sim.timings import TERMS, Profile

from .conftest import TOY

CHOICES: dict[str, list[str]] = {name: list(described(name)) for name in groups()}
PRICES = dict.fromkeys(TERMS, 0.0) | {"step": 1e6}
HULL = dict.fromkeys(StepFeatures._fields, (0, 1))
UNTIMED = ("as_given", "closed_loop", "interleaved_legacy", "saturating")
# As large as their own options say.
MADE = ("alias_questions", "forked_sequence", "repeated_documents")
BY_ARM = ("workload", "designed_shapes")  # its requests go by arms; run by tests/study/fidelity/test_fit_profile.py
PLUGIN = ("workload", "plugin")  # names nothing by itself; run by tests/docs/test_extending.py
# Files of these groups are independent of each other, so one study can choose from all of them: the first file of each,
# then the second of each, and so on.
FITTED = ("timing", "fitted")  # needs a profile of its own model and device; run by tests/study/test_twin.py
NOVEL = ("arrivals", "novel_stream")  # needs novel requests; run by tests/study/analyses/test_decay.py
ELSEWHERE = (FITTED, NOVEL, BY_ARM, PLUGIN)
FREE = ("arrivals", "batch", "hardware", "preamble", "store", "timing", "tracking")
BESIDE = ("model", "workload", "executor", "device")


def rounds(groups: tuple[str, ...]) -> list[dict[str, str]]:
    """A file of each group, until each file was chosen once."""
    choices = [[name for name in CHOICES[group] if (group, name) not in ELSEWHERE] for group in groups]
    return [
        {group: name for group, name in zip(groups, names, strict=True) if name is not None}
        for names in zip_longest(*choices)
    ]


OF_ANSWERS = "answers"  # sizes of pic_answers, whose arms need gold passages; composed by tests/docs
OF_FIRST_LIGHT = "stages"  # of an entry that is no study; composed by tests/study/test_first_light.py
_APART = (*FREE, *BESIDE, "strategy", OF_ANSWERS, OF_FIRST_LIGHT)
BOUND = [(group, name) for group in CHOICES for name in CHOICES[group] if group not in _APART]
for _choice in (("arms", "answers"), ("arms", "repair_budgets")):
    BOUND.remove(_choice)
# Strategies that reuse spans, and studies of them, go with models of attention layers alone, but for those with maps.
OF_MAPS = ["pic_exact"]
OF_SPANS = [path.stem for path in sorted(CONF.glob("strategy/*.yaml")) if "\nspans:" in path.read_text()]
OF_SPANS = [name for name in OF_SPANS if name not in OF_MAPS]
ATTENTION = {"attention": "qwen3-8b", "pic": "llama-3.2-1b", "methods": "llama-3.1-8b", "pic_bench": "llama-3.2-1b"}
ATTENTION |= dict.fromkeys(("families_transformer", "break_even", "presets"), "llama-3.1-8b")
ATTENTION_MODELS = ("llama", "qwen2", "qwen3-", "smollm2", "tiny", "gpt", "gemma", "deepseek")
OF_ATTENTION = [*OF_SPANS, "lmcache", "mistralrs_0_9", "llama_cpp"]


def overrides(group: str, name: str, parquet: Path) -> list[str]:
    """How a user would choose this file in the smoke entry."""
    chosen = [f"{group}={name}"]
    if (group, name) == ("workload", "tokenised"):
        chosen.append(f"workload.path={parquet}")
    if group == "workload" and name in MADE:
        chosen += ["workload.documents=null", "workload.questions_per_document=null"]
    if (group, name) == ("workload", "queries"):
        asked = parquet.with_name("toy.spnl")
        asked.write_text('(seq (plus (user "a") (user "b")) (user "why?")) (user "how?")', encoding="utf-8")
        chosen.append(f"workload.path={asked}")
    if group == "arrivals" and name in UNTIMED:
        chosen.append("arrivals.rate_rps=null")
    if (group, name) == ("arrivals", "sessions"):
        chosen.append("arrivals.think_s=1")
    if group == "model" and name.startswith(ATTENTION_MODELS):
        chosen += ["arms=attention", "store.total_gib=16"]
    if group == "arms" and name in ATTENTION:
        chosen.append(f"model={ATTENTION[name]}")
    if group == "fidelity":
        chosen = [f"+fidelity={name}", "analyses=null", "backend=engine", "arrivals.rate_rps=1"]
    if group in ("compared", "device", "size", "traffic", "split"):
        chosen = [f"+{group}={name}"]
    if name in ("agents", "chat_sessions"):
        chosen += ["workload.documents=null", "workload.questions_per_document=null"]
        chosen += ["workload.chat_sessions.sessions=2", "workload.chat_sessions.turns=1"]
    if name == "rag" or name.endswith("_attention"):
        chosen.append("workload.rag.requests=null")
    if (group, name) == ("traffic", "narrativeqa"):
        chosen.append("workload.max_prompt_tokens=2048")
    if (group, name) == ("arms", "state_tiers"):
        chosen.append("+tier@store.tiers.host=dram")
    if group == "tier":
        chosen = ["arms=state_tiers", f"+tier@store.tiers.mine={name}"]
    if (group, name) == ("tier", "own"):
        chosen += ["store.tiers.mine.gib=1", "store.tiers.mine.bandwidth_gb_s=2"]
    if (group, name) == ("executor", "dask"):
        chosen += ["executor.address=tcp://anywhere:1", "workers=null"]
    if group == "size":
        chosen += ["workload=rag", "arms=pic"] if name.endswith("attention") else ["arms=clean"]
    if (group, name) == ("timing", "calibrated"):
        for model in ("qwen3.5-0.8b", "llama-3.2-1b"):  # of smoke, and of strategies that reuse spans
            told = ("cpu", 1, "bfloat16", {}, "", "", PRICES, HULL, {"median": 0.05}, 1, 1, 1)
            store_profile(Profile(model, machine(), *told), parquet.parent)
        chosen.append(f"output.root={parquet.parent}")
    if (group, name) == ("workload", "narrativeqa"):
        chosen.append("workload.max_prompt_tokens=2048")
    return chosen


def check_serves(study: Study, arms: list[str]) -> None:
    """Each arm finishes every request, and its store still adds up."""
    assert arms, "nothing is served by nobody"
    requests = build_workload(study.workload, "unused").requests
    arrived = build_arrivals(study, requests, 0, study.arrivals.rate_rps)
    for arm in arms:
        records: list = []
        longest = max(request.num_tokens for request in requests)
        policy = build_policy(study, study.arms[arm], 0, longest, requests)
        tiered = build_tiered(study, study.arms[arm], policy, study.batch)
        serving = policy if tiered is None else tiered
        simulate(arrived, serving, study.batch, build_timing(study), records.append, loads=tiered)
        policy.check()
        assert sorted(record.request_id for record in records) == sorted(request.id for request in requests)


def check_named(study: Study, group: str, name: str) -> None:
    """A file that has a name or a kind is called after it."""
    if group in ("model", "hardware"):
        assert getattr(study, group).name == name
    elif group in ("arrivals", "timing", "tracking", "workload"):
        assert getattr(study, group).kind == name


@pytest.mark.parametrize("chosen", rounds(FREE) + rounds(BESIDE), ids=lambda chosen: "-".join(chosen.values()))
def test_free_choices_serve_requests(chosen: dict[str, str], toy, toy_parquet: Path):
    typed = [word for group, name in chosen.items() for word in overrides(group, name, toy_parquet)]
    study = compose("smoke", [*(word for word in toy if word != "tracking.kind=none"), *typed])
    check_serves(study, ["none", "boundary"] if chosen.keys() <= set(FREE) else list(study.arms))
    for group, name in chosen.items():
        check_named(study, group, name)


@pytest.mark.parametrize(("group", "name"), BOUND, ids=lambda value: value)
def test_a_choice_serves_requests(group: str, name: str, toy, toy_parquet: Path):
    study = compose("smoke", [*toy, *overrides(group, name, toy_parquet)])
    check_serves(study, list(study.arms))
    check_named(study, group, name)


@cache
def strategies(of_attention: bool) -> Study:
    """A study in which the arm my_NAME has the strategy NAME."""
    names = [name for name in CHOICES["strategy"] if (name in OF_ATTENTION) == of_attention]
    model = ("model=llama-3.2-1b", "arms=attention") if of_attention else ()
    return compose("smoke", [*TOY, *model, *(f"+strategy@arms.my_{name}={name}" for name in names)])


@pytest.mark.parametrize("name", CHOICES["strategy"])
def test_a_strategy_serves_requests(name: str):
    check_serves(strategies(name in OF_ATTENTION), [f"my_{name}"])


def test_a_strategy_places_as_it_is_called():
    named = {"block", "balanced", "sqrt", "log", "dp", "last", "tail", "boundary", "branch"}
    named |= {"planned", "learned", "dp_shared"}
    names = [name for name in CHOICES["strategy"] if name not in [*OF_ATTENTION, *OF_MAPS]]
    kinds = {name: strategies(False).arms[f"my_{name}"].placement.kind for name in names}
    named |= {"retention", "second_hit", "chunk_end", "branch_else_last", "response_end"}
    expected = {name: name if name in named else "none" for name in kinds}
    several = {"sglang_0_5_23_hybrid": "branch_else_last", "marconi": "branch"}
    several |= {"trtllm_hybrid": "block", "clairvoyant": "clairvoyant"}
    assert kinds == expected | several


def test_span_strategies_have_the_repair_of_their_name():
    repairs = {"lego_link": "first", "cache_blend": "deviation"}
    repairs |= {"query_aware": "attention", "neighbour_aware": "neighbours"}
    arms = {name: strategies(True).arms[f"my_{name}"] for name in OF_SPANS}
    assert {arm.placement.kind for arm in arms.values()} == {"none"}
    kinds = {name: arm.spans.repair.kind for name, arm in arms.items()}
    assert kinds == {name: repairs.get(name, "none") for name in kinds}
    assert set(repairs) < set(kinds)
    assert len(kinds) == 6


def test_methods_and_controls_differ_only_as_named(toy):
    arms = compose("smoke", [*toy, "model=llama-3.1-8b", "arms=methods"]).arms
    spans = {name: arm.spans for name, arm in arms.items() if arm.spans is not None}
    kernels = {name: (spans[name].keys, spans[name].kernel) for name in ("pic", "pic_raw", "pic_turned")}
    assert kernels == {
        "pic": ("local", "rotate_queries"),
        "pic_raw": ("raw", "rotate_keys"),
        "pic_turned": ("local", "pre_rotated"),
    }
    assert spans["lego_link_16"].repair.k == spans["random_16"].repair.k == spans["last_16"].repair.k == 16
    assert spans["query_aware_16"].repair.k == spans["neighbour_aware_16"].repair.k == 16
    assert spans["cache_blend_15"].repair.ratio == spans["strided_15"].repair.ratio == 0.15
    blends = [spans[f"cache_blend_{name}15"].repair for name in ("", "lmcache_", "kv2_")]
    assert [(one.score, one.filter, one.writes, one.base) for one in blends] == [
        ("values", "queries", "all", "prompt"),
        ("keys", "queries", "chosen", "prompt"),
        ("both", "layers", "all", "spans"),
    ]
    provenances = {name: one.provenance for name, one in spans.items() if one.provenance != "isolated"}
    assert provenances == {"ape": "conditioned", "as_seen": "as_seen", "as_seen_blend_15": "as_seen"}
    assert {name for name, one in spans.items() if one.positions != "sequential"} == {"ape", "old_positions"}


def test_the_arms_of_hybrids_differ_in_the_form_of_their_maps(toy):
    study = compose("smoke", [*toy, "arms=hybrid_pic"])
    arms = study.arms
    maps = {name: arm.spans.maps for name, arm in arms.items() if arm.spans is not None}
    assert {name: (one.form, one.rank, one.dtype) for name, one in maps.items()} == {
        "pic_exact": ("exact", None, "float32"),
        "pic_exact_bf16": ("exact", None, "bfloat16"),
        "pic_low_rank_4": ("low_rank", 4, "float32"),
        "pic_repaired": ("exact", None, "float32"),
        "pic_scalar": ("scalar", None, "float32"),
        "pic_sum": ("sum", None, "float32"),
        "pic_last": ("last", None, "float32"),
    }
    assert {arms[name].placement.kind for name in maps} == {"boundary"}
    for name in maps:
        rules = build_policy(study, arms[name], 0, 100).rules
        assert (rules.layout.__name__, rules.maps) == ("composable", maps[name])
        assert rules.repair.tokens == (16 if name == "pic_repaired" else 0)
