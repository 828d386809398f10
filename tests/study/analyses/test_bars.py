"""The analysis `bars` on small studies: each bar can be met and missed."""

import json
from pathlib import Path

import pytest

from spanlab.cli import compose
from spanlab.study.bounds import BarMissedError
from spanlab.study.run import run_study

SMALL = ("sweep=[]", "executor.kind=here", "output.figures=false", "seeds=[0]")
DOCUMENTS = "workload.repeated_documents"
BATCH = (f"{DOCUMENTS}.repeats=9", f"{DOCUMENTS}.question_tokens=5")
MIXED = ("workload.synthetic.groups=6", "workload.synthetic.requests_per_group=4", "store.total_gib=8")


def judged(root: Path, entry: str, *overrides: str) -> dict[tuple[str, str], dict]:
    """Run a study, and return its verdicts by arm and number."""
    folder = run_study(compose(entry, [*SMALL, *overrides]), entry, root, show=False)
    entries = json.loads((folder / "summary.json").read_bytes())["bars"]
    return {(entry["arm"], entry["what"]): entry for entry in entries}


def test_a_shared_instruction_is_computed_once_to_the_token(tmp_path: Path):
    verdicts = judged(tmp_path, "batch_sim", *BATCH)
    exact = verdicts["radix", "tokens computed after the first prefill"]
    assert exact["value"] == exact["least"] == exact["most"] == 9 * 5
    assert verdicts["radix", "requests that compute the shared part again"]["value"] == 0
    blocks = verdicts["block_hash", "tokens computed after the first prefill"]
    assert (blocks["value"], blocks["most"]) == (9 * 7, 9 * 20)  # 48 of the 50 tokens fill blocks
    assert verdicts["radix", "prompt tokens ÷ computed tokens"]["value"] == pytest.approx(550 / 100)


def test_speedups_are_those_of_the_timing_model(tmp_path: Path):
    chosen = (f"{DOCUMENTS}.document_tokens=4000", f"{DOCUMENTS}.question_tokens=16", f"{DOCUMENTS}.repeats=2")
    verdicts = judged(tmp_path, "chat_sim", *chosen)
    predicted = verdicts["radix", "predicted speedup of same order, ×"]["value"]
    assert predicted > 12
    assert verdicts["radix", "speedup of same order, ×"]["value"] == pytest.approx(predicted, rel=1e-3)
    assert verdicts["radix", "speedup of same order where 12 × are predicted, ×"]["least"] == 10


def test_shuffled_passages_are_found_as_often_as_chance_has_it(tmp_path: Path):
    verdicts = judged(tmp_path, "rag_prefix_sim", f"{DOCUMENTS}.repeats=6", f"{DOCUMENTS}.trials=12")
    assert verdicts["radix", "reused documents of same order, tokens per prompt"]["value"] == 1000
    expected = verdicts["radix", "E[LCP] of shuffled order, tokens"]["value"]
    shuffled = verdicts["radix", "reused documents of shuffled order, tokens per prompt"]
    assert abs(shuffled["value"] - expected) <= 2 * (shuffled["most"] - expected)
    assert 0 < expected < 400


def test_a_small_store_is_reported_and_a_large_one_judged(tmp_path: Path):
    large = judged(tmp_path, "mixed_sim", *MIXED)
    assert large["radix", "memory ÷ working set"]["value"] > 1.2
    assert large["radix", "token hit rate"]["least"] > 0.5
    assert large["radix", "evicted ÷ inserted bytes"]["most"] == 0.1
    small = judged(tmp_path, "mixed_sim", *MIXED, "store.total_gib=0.5")
    assert not small["radix", "token hit rate"]["judged"]


def test_what_is_evicted_and_asked_for_again_is_thrashed(tmp_path: Path):
    """Two prompts in a store for one: each change of prompt evicts, and each after the first recomputes."""
    two_prompts = (
        "workload.synthetic.groups=2",
        "workload.synthetic.requests_per_group=8",
        "workload.synthetic.value=1.0",
    )
    kv = 2048 * 131_072 / 2**30  # of a prompt with one output token, after the previous request has finished
    one_client = (
        "arrivals=closed_loop",
        "arrivals.rate_rps=null",
        "workload.output_tokens=1",
        f"store.total_gib={1.2 * kv}",
        "arrivals.order=shuffled",
    )
    verdicts = judged(
        tmp_path, "mixed_sim", *two_prompts, *one_client, "~bars.near_infinite", "~bars.beyond_whole_prompts"
    )
    share = verdicts["radix", "computed again ÷ evicted bytes"]
    assert not share["judged"]
    changes = 1 / (1 - share["value"])
    assert changes == pytest.approx(round(changes), rel=0.01)
    assert 4 < changes < 16
    roomy = judged(tmp_path, "mixed_sim", *MIXED)["radix", "computed again ÷ evicted bytes"]
    assert (roomy["value"], roomy["most"]) == (0, 0.05)


def test_whole_prompts_are_the_floor_of_partial_matches(tmp_path: Path):
    verdicts = judged(tmp_path, "mixed_sim", *MIXED, "seeds=[0,1]")
    low = verdicts["radix", "the same, low end of its 95 % interval"]
    lead = verdicts["radix", "token hit rate − that of exact_hash"]["value"]
    assert low["least"] == 0.2
    assert lead == pytest.approx(verdicts["radix", "token hit rate"]["value"])  # no prompt is repeated
    assert low["value"] <= lead


def test_a_missed_bar_ends_with_a_sentence_and_leaves_the_study(tmp_path: Path):
    with pytest.raises(BarMissedError, match=r"^bars.near_infinite: token hit rate of none is 0, expected ≥ 0\.\d+$"):
        judged(tmp_path, "mixed_sim", *MIXED, "bars.near_infinite=[none]")
    assert (tmp_path / "synthetic" / "mixed_sim" / "report.html").is_file()


@pytest.mark.parametrize(
    ("entry", "overrides", "sentence"),
    [
        ("smoke", ["analyses=[bars]"], r"bars=\{\} with analyses=bars: expected arms of a bar"),
        ("mixed_sim", ["bars.near_infinite=[lru]"], "bars.near_infinite=lru: expected one of"),
        ("mixed_sim", ["+bars.fast=[radix]"], "bars=fast: expected one of"),
        ("mixed_sim", ["+bars.expected_prefix=[radix]"], "workload.kind=synthetic: expected repeated_documents"),
        ("mixed_sim", ["+bars.prefill_speedup=[radix]"], "arrivals.clients=None: expected arrivals=closed_loop"),
        (
            "mixed_sim",
            ["model=qwen3.5-0.8b"],
            "bars.thrash with model.name=qwen3.5-0.8b: expected attention layers alone",
        ),
        ("mixed_sim", ["only=[none,radix]"], "with none of policy=exact_hash: expected one such arm that runs"),
        ("chat_sim", ["only=[radix]"], "baseline=none: expected one of the arms that run"),
    ],
)
def test_bars_that_cannot_be_judged_are_refused(entry: str, overrides: list[str], sentence: str):
    with pytest.raises(Exception, match=sentence):
        compose(entry, overrides)
