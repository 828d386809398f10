"""Noise of a machine: exact numbers, limits, and withheld numbers of a noisy study."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spanlab.analyses.summary import arms_table
from spanlab.report.data import ArmData, StudyData
from spanlab.report.table import as_text
from spanlab.study.machine import Noise, Reading, drift, processor_time, ratios, steal, successive, withdraw_speedups

CALM = {"drift": 0.02, "load": 1.1, "steal": 0.0, "cores": 2}


def noise(aa=(1.02, 0.98), **changes) -> Noise:
    return Noise(aa=tuple(aa), **CALM | changes)


def test_calm_machine_gives_no_sentence():
    assert noise().sentence("speedups") == ""
    assert noise().summary()["noisy"] is False


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"aa": (0.77, 1.42)}, r"A/A of the baseline 0\.77 to 1\.42, spread 36% \(limit 10%\)$"),
        ({"aa": (1.2,)}, r"A/A of the baseline 1\.2, spread 20% \(limit 10%\)$"),
        ({"drift": 0.15}, r"a fixed step drifted by 15% \(limit 10%\)$"),
        ({"load": 2.5}, r"load average 2\.5 \(limit 2 cores\)$"),
        ({"steal": 0.08}, r"stolen processor time 8% \(limit 5%\)$"),
    ],
)
def test_each_limit_is_named_in_the_sentence(changes, message):
    measured = noise(**changes)
    assert len(measured.reasons()) == 1
    assert re.search(message, measured.sentence("speedups")), measured.sentence("speedups")
    assert measured.sentence("speedups").startswith("noisy machine, no speedups: ")


def test_one_repeat_passes_between_the_inverse_limit_and_the_limit():
    verdicts = {ratio: bool(noise((ratio,)).reasons()) for ratio in (1 / 1.11, 1 / 1.09, 1.0, 1.09, 1.11)}
    assert verdicts == {1 / 1.11: True, 1 / 1.09: False, 1.0: False, 1.09: False, 1.11: True}


def test_ratios_that_cancel_out_still_count():
    assert noise((1.3, 1 / 1.3)).spread == pytest.approx(0.3)


@given(st.lists(st.floats(0.5, 2.0), min_size=1, max_size=8), st.floats(1.0, 5.0))
def test_more_noise_never_passes_more_easily(logs, factor):
    less = noise([math.exp(0.1 * (log - 1)) for log in logs])
    more = noise([math.exp(0.1 * factor * (log - 1)) for log in logs])
    assert more.spread >= less.spread - 1e-12
    assert bool(more.reasons()) >= bool(less.reasons()) or more.spread == pytest.approx(less.spread)


def test_readings_become_drift_load_and_steal():
    steps = [100, 100, 100, 130]
    readings = [Reading(step, index + 1.0, index * 1000, index * 20) for index, step in enumerate(steps)]
    measured = Noise.of([1.0], readings, 2)
    assert (measured.drift, measured.load, measured.steal) == (drift(steps), 2.5, 0.02)
    assert drift(steps) == pytest.approx(0.255)
    assert (drift([5]), steal(readings[:1]), Noise.of([], [], 2).reasons()) == (None, None, [])


def test_aa_ratios_pair_repeats():
    assert ratios([1.0, 2.0, 4.0], [1.1, 1.0]) == [1.1, 0.5]
    assert successive([2.0, 1.0, 4.0]) == [0.5, 4.0]


def test_processor_time_counts_guests_once():
    assert processor_time("cpu  10 1 2 80 3 1 1 2 5 5\ncpu0 1 1 1 1\n") == (100, 2)


def study_of(speedup) -> StudyData:
    tokens = {"prompt": 10, "reused": 5, "computed": 5, "repaired": 0}
    summary = {
        "tokens": tokens,
        "finds": "prefixes",
        "token_hit_rate": 0.5,
        "request_hit_rate": 0.5,
        "token_hit_rate_interval": None,
    }
    summary |= {"share_of_bound": 0.5, "bytes": {"kv_resident_mean": 0, "state_resident_mean": 0, "copied_mean": 0}}
    summary |= {"ttft_s": dict.fromkeys(("mean", "p50", "p95", "p99"), 0.1), "ttft_s_interval": {"mean": None}}
    summary |= {"speedup": speedup, "seeds": [0]}
    bounds = ("infinite_prefix_tokens", "infinite_any_position_tokens", "offline_tokens")
    summary |= {"stationarity": {"verdict": "steady", "drift_p": 0.5, "drift_rps": 0.0, "warmup_requests": 5}}
    summary |= {"utilisation": None, "requests": 200, "groups": 12, "evicted_bytes": 0}
    in_seconds = dict.fromkeys(("least_ttft_s", "ttft_regret_s"))
    summary |= {"bounds": dict.fromkeys(bounds, 6) | {"regret_points": 10.0} | in_seconds}
    return StudyData("toy", "footer", [ArmData("none", "none", {}, [], summary)], [], "unlimited")


def test_noisy_study_has_no_speedup_column():
    speedup = {"mean": 2.0, "low": None, "high": None}
    calm = study_of(speedup)
    assert withdraw_speedups(calm, noise()).caveats == ()
    assert calm.arms[0].summary["speedup"] == speedup
    data = withdraw_speedups(calm, noise((1.5,)))
    assert list(data.caveats) == [noise((1.5,)).sentence("speedups")]
    assert data.footer.endswith(data.caveats[0]), "every figure says it"
    text = as_text([arms_table(data)], 160)
    assert "speedup\n" not in text
    assert "of TTFT" not in text
    assert "noisy machine, no speedups: A/A of the baseline 1.5" in text
