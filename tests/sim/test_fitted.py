"""The fitted timing model: durations by hand, spans equal to their steps, formats, profiles and what is refused."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spanlab.core.step import StepFeatures
from spanlab.model_spec import HardwareSpec, ModelSpec
from spanlab_sim.timings import (
    Deployment,
    Fitted,
    FittedProfile,
    FittedTiming,
    Parameter,
    Rates,
    names_for,
    read_fitted,
)

HARDWARE = HardwareSpec("toy", 1e9, 1e9, 1.0, compute_efficiency=0.5, bandwidth_efficiency=0.5, host_s=1e-3)
RATES = Rates(compute=1.0, bandwidth=1.0, host_s=1e-3, host_s_per_sequence=1e-5, host_s_with_prefill=2e-3)
EXPERTS = {"expert_layers": 2, "experts": 8, "experts_per_token": 2, "expert_intermediate_size": 16}


def make_model(**changes) -> ModelSpec:
    sizes = {"attention_layers": 2, "hidden_size": 32, "intermediate_size": 64, "vocab_size": 50}
    return ModelSpec(**(sizes | {"attention_heads": 4, "kv_heads": 2, "head_dim": 8} | changes))


def moe() -> ModelSpec:
    return make_model(intermediate_size=0, **EXPERTS)


def timing(model=None, rates=RATES, **deployment) -> FittedTiming:
    return FittedTiming(model or make_model(), HARDWARE, Deployment(**{"cuda_graphs": False} | deployment), rates)


def test_a_decode_step_costs_weights_context_and_host():
    """One sequence of a large model: memory alone counts, so that the soft maximum changes nothing."""
    model, step = make_model(hidden_size=3200), StepFeatures(num_decodes=1, decode_context=100)
    moved = (model.layer_parameters + model.head_parameters) * 2 + 101 * model.kv_bytes_per_token
    flops = 2 * (model.layer_parameters + model.head_parameters)
    compute_alike = timing(model, Rates(1e9, 1.0, 1e-3, 1e-5)).step(step)  # computing takes no time
    assert compute_alike == pytest.approx(moved + 1e6 + 1e4, rel=1e-9)
    both = timing(model).step(step) - compute_alike
    assert both == pytest.approx(0.0905 * flops, rel=0.01)  # flops and bytes take as long: 2^(1/8) of either


def test_prompt_tokens_cost_their_pairs_and_a_start():
    model = make_model()
    slow = timing(model, Rates(1e-3, 1e6, 1e-3, 1e-5, 2e-3))
    single = slow.step(StepFeatures(8, 36, 1))
    flops = 8 * model.linear_flops_per_token + 36 * model.attention_flops_per_pair
    assert single == pytest.approx(1e3 * flops + 1e6 + 2e6 + 1e4, rel=1e-6)
    assert slow.step(StepFeatures(8, 36, 1, num_first_tokens=1)) - single == pytest.approx(
        1e3 * model.head_flops, rel=0.01
    )


def test_tensor_parallel_halves_work_and_adds_collectives():
    model, step = make_model(), StepFeatures(64, 64 * 65 // 2, 1)
    free = Rates(1e-3, 1e6, 1e-9, 1e-9, 1e-9, collective_s=1e-12, link_bytes_per_s=1e30)
    assert timing(model, free, tensor_parallel=2).step(step) == pytest.approx(
        timing(model, free).step(step) / 2, rel=1e-3
    )
    dear = Rates(1e9, 1e9, 1e-9, 1e-9, 1e-9, collective_s=1e-3, link_bytes_per_s=1e6)
    ring = 2 * (2 - 1) / 2
    expected_s = 2 * 2 * (1e-3 + ring * 64 * model.hidden_size * 2 / 1e6)  # two per layer, two layers
    assert timing(model, dear, tensor_parallel=2).step(step) == pytest.approx(1e9 * expected_s, rel=1e-3)


def test_ranks_wait_for_the_slowest_and_share_experts():
    model, none = moe(), StepFeatures()
    slow = Rates(1e-6, 1e9, 1e-9, 1e-9, 1e-9, experts=1.0, collective_s=1e-12, link_bytes_per_s=1e30)
    alone, together = timing(model, slow), timing(model, slow, data_parallel=2)
    prompt = StepFeatures(64, 64 * 65 // 2, 1)
    experts = 2 * (model.expert_parameters * 2 // 8) * 64 * 1e6  # a fourth of them per token
    single = alone.step(prompt)
    assert together.step_together([prompt, none]) == pytest.approx(single - experts / 2, rel=1e-3)
    assert together.step_together([prompt, prompt]) == pytest.approx(single, rel=1e-3)
    assert together.step(prompt) == together.step_together([prompt, prompt])


@pytest.mark.parametrize(("weights", "share"), [("fp8", 0.5), ("int4", 0.25 + 1 / 128)])
def test_formats_of_weights_change_their_bytes(weights, share):
    model, step = make_model(vocab_size=1), StepFeatures(num_decodes=1)
    free = Rates(1e9, 1e-3, 1e-9, 1e-9)
    full, less = (timing(model, free, weights=kind).step(step) for kind in ("model", weights))
    assert less == pytest.approx(full - (1 - share) * 2e3 * model.layer_parameters, rel=1e-3)
    assert Deployment(weights=weights).weight_bytes(model) < Deployment().weight_bytes(model)


def test_kv_in_fp8_is_read_in_half_the_time():
    free = Rates(1e9, 1e-3, 1e-9, 1e-9)
    full, half = (timing(rates=free, kv=kind) for kind in ("model", "fp8"))
    more = [
        model_timing.step(StepFeatures(num_decodes=1, decode_context=10_000))
        - model_timing.step(StepFeatures(num_decodes=1))
        for model_timing in (full, half)
    ]
    assert more[1] == pytest.approx(more[0] / 2, rel=1e-6)


@pytest.mark.parametrize(("tokens", "computed"), [(1, 1), (3, 4), (9, 16), (130, 136), (512, 512), (513, 513)])
def test_steps_are_padded_to_captured_graphs(tokens, computed):
    assert Deployment().padded(tokens) == computed
    assert Deployment(cuda_graphs=False).padded(tokens) == tokens
    slow = Rates(1e-3, 1e9, 1e-9, 1e-9)
    padded, plain = timing(rates=slow, cuda_graphs=True), timing(rates=slow)
    assert padded.step(StepFeatures(tokens)) == plain.step(StepFeatures(computed))


counts = st.integers(0, 3000)


@given(counts, counts, st.integers(0, 50), st.integers(0, 10**6), st.integers(1, 60))
def test_a_span_equals_its_steps(prefill, pairs, decodes, context, k):
    first = StepFeatures(prefill, pairs, min(1, prefill), decodes, context)
    for model_timing in (timing(), timing(moe(), data_parallel=2, cuda_graphs=True), timing(tensor_parallel=2)):
        steps = [model_timing.step(first._replace(decode_context=context + i * decodes)) for i in range(k)]
        assert model_timing.span(first, k).tolist() == steps


@pytest.mark.parametrize(
    ("deployment", "words"),
    [
        ({"tensor_parallel": 3}, "twin.tensor_parallel=3: expected a divisor of the 4 attention heads"),
        ({"data_parallel": 2}, "twin.data_parallel=2 with model.name=: expected 1, for ranks of a dense model"),
        ({"weights": "int3"}, "twin.weights=int3: expected"),
        ({"data_parallel": 0}, "twin.data_parallel=0: expected a number above zero"),
    ],
)
def test_a_deployment_that_cannot_be_is_refused(deployment, words):
    with pytest.raises(ValueError, match=words):
        Deployment(**deployment).check("twin", make_model())


def test_a_format_on_top_of_another_is_refused():
    with pytest.raises(ValueError, match=r"twin\.kv=fp8 with model\.kv_itemsize=1: expected 2"):
        Deployment(kv="fp8").check("twin", make_model(kv_itemsize=1))


def test_spans_at_other_positions_are_refused():
    with pytest.raises(ValueError, match="timing=fitted with an arm that reuses spans: expected timing=roofline"):
        timing().step(StepFeatures(4, 10, 1, copied_tokens=3))


def profile(**changes) -> FittedProfile:
    parameters = {"compute": Parameter(0.7, 0.6, 0.8, True)}
    fields = {"model": "", "hardware": "toy", "deployment": Deployment(), "parameters": parameters}
    return FittedProfile(**(fields | {"unseen": {}, "log": "log", "commit": "none"} | changes))


def unread(_: str | None) -> Any:
    raise AssertionError("a fitted timing reads its own profile")


def test_a_profile_makes_the_timing_that_was_fitted(tmp_path):
    path = tmp_path / "profile.json"
    profile().write(path)
    assert read_fitted(path) == profile()
    model_timing = Fitted(profile=str(path)).build(make_model(), HARDWARE, unread)
    same = FittedTiming(make_model(), HARDWARE, Deployment(), Rates(0.7, 0.5, 1e-3))
    step = StepFeatures(8, 36, 1, 3, 500)
    assert model_timing.step(step) == same.step(step)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": "other"}, "it was fitted to model other; expected model "),
        ({"hardware": "h100"}, "it was fitted to hardware h100; expected hardware toy"),
        (
            {"parameters": {"compute": {"value": 0.0, "low": 0, "high": 0, "identified": True}}},
            r"parameters\.compute=0\.0: expected a number above zero",
        ),
        (
            {"parameters": {"compute": {"value": True, "low": 0, "high": 0, "identified": True}}},
            r"parameters\.compute\.value=True: expected a number",
        ),
        ({"parameters": {"speed": {"value": 1, "low": 0, "high": 2, "identified": True}}}, "speed: no such key"),
        ({"deployment": {"tensor_parallel": "2"}}, r"deployment\.tensor_parallel=2: expected a whole number"),
        ({"more": 1}, "more: no such key; expected a profile as the entry twin writes it"),
    ],
)
def test_another_profile_is_refused(change, words, tmp_path):
    path = tmp_path / "profile.json"
    profile().write(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=words):
        Fitted(profile=str(path)).build(make_model(), HARDWARE, unread)


def test_parameters_go_with_the_deployment():
    dense, sparse = names_for(make_model(), Deployment()), names_for(moe(), Deployment(data_parallel=2))
    assert "experts" not in dense and "collective_s" not in dense
    assert {"experts", "routing", "collective_s", "link_bytes_per_s"} < set(sparse)
