"""Timing models: hand-worked durations, and a span that equals its steps to the nanosecond."""

from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from spanlab.core.step import StepFeatures
from spanlab.model_files import find_spec
from spanlab.model_spec import HardwareSpec, causal_pairs
from spanlab_sim.timing import ConstantTiming, RooflineTiming, TimingModel

from ..support.models import make_model

CONF = Path(__file__).parents[2] / "conf"


def load(kind: type, folder: str, name: str):
    node = yaml.safe_load((CONF / folder / f"{name}.yaml").read_text())
    assert node.pop("defaults") == [f"base_{folder}", "_self_"]
    # PyYAML reads 4.8e12 as text where OmegaConf reads a number.
    return kind(**{key: float(value) if key.startswith(("peak", "band")) else value for key, value in node.items()})


def make_hardware(**changes) -> HardwareSpec:
    plain = {"peak_flops": 1e6, "bandwidth_bytes_per_s": 1e6, "memory_gib": 1.0, "host_s": 0.0}
    return HardwareSpec(**(plain | {"compute_efficiency": 1.0, "bandwidth_efficiency": 1.0} | changes))


EXPERTS = {"expert_layers": 1, "experts": 9, "experts_per_token": 2, "expert_intermediate_size": 5}


def h200(name: str) -> RooflineTiming:
    return RooflineTiming(find_spec(name), load(HardwareSpec, "hardware", "h200"))


def prefill(start: int, stop: int, **more: int) -> StepFeatures:
    return StepFeatures(stop - start, causal_pairs(start, stop), 1, prefill_context=start, **more)


def test_constant_charges_each_computed_token_and_nothing_else():
    timing = ConstantTiming(0.05)
    assert timing.step(prefill(4_000, 4_007, loaded_state_bytes=10**9)) == 350_000_000
    assert timing.step(StepFeatures()) == 0
    assert timing.step(StepFeatures(num_decodes=2, decode_context=10**6)) == 100_000_000


def test_constant_prices_steps_and_decodes_apart():
    timing = ConstantTiming(0.05, seconds_per_step=0.001, seconds_per_decode_token=0.0)
    assert timing.step(StepFeatures(num_decodes=8)) == 1_000_000
    assert timing.span(StepFeatures(num_decodes=8), 3).tolist() == [1_000_000] * 3


def test_constant_rounds_the_step_and_not_the_token():
    # 12.4 ns per token: rounding the price first would lose 40 ns here
    assert ConstantTiming(12.4e-9).step(prefill(0, 100)) == 1_240


def test_roofline_prefill_by_hand():
    # 144 layer parameters, 40 head parameters, 8 B of KV per token, 16 FLOPs per pair
    step = prefill(2, 5, num_first_tokens=1)
    flops = 3 * 288 + 16 * (3 + 4 + 5) + 80
    moved = 2 * 144 + 2 * 40 + 8 * (2 + 3)
    assert RooflineTiming(make_model(), make_hardware()).step(step) == 1_000 * max(flops, moved) == 1_136_000
    assert RooflineTiming(make_model(), make_hardware(peak_flops=1e9)).step(step) == 1_000 * moved == 408_000


def test_roofline_decode_by_hand_with_state_and_host_time():
    hybrid = {"recurrent_layers": 1, "recurrent_key_heads": 1, "recurrent_value_heads": 1, "conv_kernel": 4}
    model = make_model(recurrent_key_dim=2, recurrent_value_dim=3, **hybrid)
    assert model.state_bytes == 6 * 4 + (4 + 3) * 3 * 2 == 66
    features = StepFeatures(num_decodes=2, decode_context=30, loaded_state_bytes=5, captured_state_bytes=7)
    moved = 2 * model.layer_parameters + 2 * 40 + 8 * (30 + 2) + 2 * 66 * 2 + 5 + 7
    slow_memory = make_hardware(bandwidth_bytes_per_s=1e3, bandwidth_efficiency=0.5, host_s=0.25)
    assert RooflineTiming(model, slow_memory).step(features) == moved * 2_000_000 + 250_000_000


def test_a_step_reads_the_experts_it_is_expected_to_choose():
    # layer: attention 48, router 16, four experts of 12 each; a token passes one of them
    experts = {"expert_layers": 1, "experts": 4, "experts_per_token": 1, "expert_intermediate_size": 1}
    timing = RooflineTiming(make_model(**experts), make_hardware(peak_flops=1e12))
    for tokens, chosen in ((1, 1), (2, 1.75), (3, 2.3125)):
        moved = 2 * (48 + 16 + chosen * 12) + 8 * tokens
        assert timing.step(prefill(0, tokens)) == pytest.approx(1_000 * moved, abs=1_000)
    assert timing.step(prefill(0, 500)) == 1_000 * (2 * (48 + 16 + 48) + 8 * 500)


def test_a_token_computes_with_the_experts_that_it_passes():
    experts = {"expert_layers": 1, "experts": 4, "experts_per_token": 2, "expert_intermediate_size": 1}
    timing = RooflineTiming(make_model(**experts), make_hardware(bandwidth_bytes_per_s=1e12))
    assert timing.step(prefill(0, 3)) == 1_000 * (3 * 2 * (48 + 16 + 24) + 16 * (1 + 2 + 3))


def test_an_unfinished_chunk_reads_no_output_head():
    timing = RooflineTiming(make_model(), make_hardware(peak_flops=1e12))
    assert timing.step(prefill(0, 3, num_first_tokens=1)) - timing.step(prefill(0, 3)) == 80_000


def test_a_measured_repair_pays_for_shallow_tokens_and_copies():
    model = make_model(attention_layers=2)
    plain, timing = prefill(2, 5), RooflineTiming(model, make_hardware(peak_flops=1e3, bandwidth_bytes_per_s=1e9))
    shallow = timing.step(plain._replace(shallow_token_layers=6, shallow_pair_layers=10)) - timing.step(plain)
    assert shallow == (6 * 144 * 2 + 10 * 16) * 1_000_000  # of one layer: 144 parameters, 16 FLOPs per pair
    projected = timing.step(plain._replace(projected_tokens=3)) - timing.step(plain)
    assert projected == 3 * model.projection_flops_per_token * 1_000_000
    slow = RooflineTiming(model, make_hardware(peak_flops=1e12))
    assert slow.step(plain._replace(copied_tokens=7)) - slow.step(plain) == 7 * 16 * 2 * 1_000


def test_each_further_forward_reads_weights_and_waits_for_the_host_again():
    timing = RooflineTiming(make_model(), make_hardware(peak_flops=1e12, host_s=0.003))
    once, thrice = prefill(2, 5, num_forwards=1), prefill(2, 5, num_forwards=3)
    assert timing.step(thrice) - timing.step(once) == 2 * (288_000 + 3_000_000)
    assert timing.step(once) == timing.step(prefill(2, 5))


def test_rotated_keys_cost_arithmetic_for_every_pair():
    timing = RooflineTiming(make_model(), make_hardware(bandwidth_bytes_per_s=1e12))
    plain = prefill(20, 50)
    # 16 FLOPs per pair: 31 % more is 4, 95 % more is 15
    pairs = plain.prefill_pairs
    assert timing.step(plain._replace(turned_keys=50)) - timing.step(plain) == 4 * pairs * 1_000
    decode = StepFeatures(num_decodes=2, decode_context=300)
    assert timing.step(decode._replace(turned_keys=300)) - timing.step(decode) == 15 * 300 * 1_000


def test_rotated_keys_hide_under_memory_in_decode():
    timing = h200("llama-3.1-8b")
    decode = StepFeatures(num_decodes=4, decode_context=40_000)
    assert timing.step(decode._replace(turned_keys=40_000)) == timing.step(decode)


def test_a_span_read_costs_as_further_keys_for_its_rows():
    compute = RooflineTiming(make_model(), make_hardware(bandwidth_bytes_per_s=1e12))
    plain, decode = prefill(20, 50), StepFeatures(num_decodes=2, decode_context=300)
    assert compute.step(plain._replace(span_reads=3)) - compute.step(plain) == 3 * 14 * 30 * 16 * 1_000
    assert compute.step(decode._replace(span_reads=6)) - compute.step(decode) == 6 * 8 * 16 * 1_000
    memory = RooflineTiming(make_model(), make_hardware(peak_flops=1e12))
    assert memory.step(plain._replace(span_reads=3)) == memory.step(plain)


@pytest.mark.parametrize("reads", [{"span_reads": 3}, {"turned_keys": 5_020}])
def test_a_long_prefill_copies_its_spans_once_instead_of_rotating(reads: dict[str, int]):
    model = make_model(attention_heads=4, kv_heads=1)
    compute = RooflineTiming(model, make_hardware(bandwidth_bytes_per_s=1e15))
    memory = RooflineTiming(model, make_hardware(peak_flops=1e15))
    short, long = prefill(5_000, 5_255), prefill(5_000, 5_256)
    assert compute.step(short._replace(**reads)) > compute.step(short)
    assert compute.step(long._replace(**reads)) == compute.step(long)
    moved = 2 * 5_000 * model.kv_bytes_per_token * 1_000
    assert memory.step(long._replace(**reads)) - memory.step(long) == moved
    assert memory.step(short._replace(**reads)) == memory.step(short)


def test_short_spans_read_one_by_one_cost_more_than_long_ones():
    timing = h200("llama-3.1-8b")
    question = prefill(8_000, 8_255, num_first_tokens=1, num_forwards=1)
    durations = [timing.step(question._replace(span_reads=spans)) for spans in (0, 8, 64)]
    assert durations == sorted(set(durations))


def test_roofline_without_work_costs_weights_and_host_time():
    assert RooflineTiming(make_model(), make_hardware(host_s=0.002)).step(StepFeatures()) == 288_000 + 2_000_000


def test_an_8b_model_decodes_at_the_speed_of_its_weights():
    # 7.505 G parameters · 2 B + one sequence's KV, at 0.8 · 4.8 TB/s, + 2 ms
    seconds = (7_504_658_432 * 2 + 131_072 * 8_194) / 3.84e12 + 0.002
    assert h200("llama-3.1-8b").step(StepFeatures(num_decodes=1, decode_context=8_193)) == round(seconds * 1e9)


def test_an_8b_model_prefills_at_the_speed_of_its_arithmetic():
    flops = 8_192 * 13_958_643_712 + 524_288 * 8_192 * 8_193 // 2 + 2 * 525_336_576
    step = h200("llama-3.1-8b").step(prefill(0, 8_192, num_first_tokens=1))
    assert step == pytest.approx(flops / 593.4e12 * 1e9 + 2e6, abs=1)


def test_resuming_costs_less_than_recomputing_and_more_than_nothing():
    timing = h200("qwen3.5-0.8b")
    full = timing.step(prefill(0, 8_192))
    resumed = timing.step(prefill(7_168, 8_192, loaded_state_bytes=19_759_104))
    assert 0 < resumed < full


@pytest.mark.parametrize("name", sorted(path.stem for path in (CONF / "hardware").glob("*.yaml")))
def test_every_hardware_file_builds_and_names_itself(name):
    assert load(HardwareSpec, "hardware", name).name == name


counts = st.integers(0, 300)
features = st.builds(
    StepFeatures,
    prefill_tokens=st.integers(0, 16_384),
    prefill_pairs=st.integers(0, 10**9),
    num_prefills=st.integers(0, 8),
    num_decodes=counts,
    decode_context=st.integers(0, 10**7),
    num_first_tokens=st.integers(0, 2),
    loaded_state_bytes=st.integers(0, 10**9),
    captured_state_bytes=st.integers(0, 10**9),
    prefill_context=st.integers(0, 10**6),
    shallow_token_layers=st.integers(0, 10**6),
    shallow_pair_layers=st.integers(0, 10**10),
    copied_tokens=st.integers(0, 10**5),
    projected_tokens=st.integers(0, 10**6),
    composed_maps=st.integers(0, 10**4),
    map_tokens=st.integers(0, 10**6),
    added_flops=st.integers(-(10**15), 10**15),
    added_bytes=st.integers(-(10**12), 10**12),
    num_forwards=st.integers(0, 4),
    span_reads=st.integers(0, 500),
    turned_keys=st.integers(0, 10**6),
)
TIMINGS: list[TimingModel] = [
    ConstantTiming(0.05),
    ConstantTiming(1 / 3e7, 1 / 7e3, 1 / 9e6),
    h200("qwen3.5-0.8b"),
    h200("llama-3.1-8b"),
    RooflineTiming(find_spec("qwen3.5-27b"), load(HardwareSpec, "hardware", "cpu2")),
    RooflineTiming(make_model(**EXPERTS), make_hardware(peak_flops=3e6)),
]


@pytest.mark.parametrize("timing", TIMINGS)
@given(features=features, k=st.integers(0, 60))
def test_a_span_equals_its_steps_to_the_nanosecond(timing, features, k):
    span = timing.span(features, k)
    grown = [features._replace(decode_context=features.decode_context + i * features.num_decodes) for i in range(k)]
    assert span.dtype == np.int64
    assert span.tolist() == [timing.step(each) for each in grown]


def test_a_span_may_cross_from_memory_to_arithmetic():
    # Per extra KV token 16 FLOPs against 8 B: equal peaks let attention overtake the weights' read as context grows.
    timing = RooflineTiming(make_model(), make_hardware(peak_flops=1.2e6))
    start = StepFeatures(num_decodes=1, decode_context=0)
    span = timing.span(start, 200)
    slopes = np.unique(np.diff(span).round(-3))
    assert slopes[0] == 8_000
    assert slopes[-1] in (13_000, 14_000)
    assert span.tolist() == [timing.step(start._replace(decode_context=i)) for i in range(200)]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ConstantTiming(-0.1), "timing.seconds_per_computed_token=-0.1: expected zero or more"),
        (lambda: ConstantTiming(0.1, float("nan")), "timing.seconds_per_step=nan"),
        (lambda: make_hardware(peak_flops=0.0), "hardware.peak_flops=0.0"),
        (lambda: make_hardware(compute_efficiency=1.5), "hardware.compute_efficiency=1.5: expected a share"),
        (lambda: make_hardware(host_s=-1.0), "hardware.host_s=-1.0"),
    ],
)
def test_impossible_hardware_and_prices_are_refused_by_name(build, message):
    with pytest.raises(ValueError, match=message):
        build()
