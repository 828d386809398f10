"""Published sentences follow from the rows of a sweep, and name where a comparison holds."""

import json

import limit_texts
import log_texts
import policy_texts
import texts
import what_changed

BUDGET, QUESTIONS, ORDER = "store.total_gib", "workload.questions_per_document", "arrivals.order"


def rates(boundary: float, dp: float, tail: float, hashed: float) -> dict[str, float]:
    learned = {"dp_3": dp - 1, "dp_8": dp - 2, "dp_3_branch": dp}
    others = {"tail_1": tail, "tail_3": tail - 3, "vllm_0_32": hashed, "block_64": 5.0}
    return learned | others | {"boundary": boundary}


SWEEP = {
    BUDGET: {8.0: rates(25, 15, 20, 23), 64.0: rates(93, 92, 92.5, 89)},
    QUESTIONS: {2.0: rates(49, 37, 43, 42)},
    ORDER: {"shuffled": rates(93, 92, 91, 89), "as_given": rates(93, 92, 91, 89) | {"block_64": 92.9}},
}


def test_gaps_to_boundary_have_their_range():
    said = texts.learned(SWEEP)
    assert "by 1.0 to 10.0 points at 8 to 64 GiB" in said
    assert "With 2 questions per article, the difference is 12.0 points." in said


def test_tail_counts_points_within_half_a_point():
    said = texts.tail(SWEEP)
    assert "at 3 of 5 points, within 0.5 points. The differences are -1.0 to +6.0 points." in said


def test_block_hash_is_named_where_it_leads():
    said = texts.hashed(SWEEP)
    assert "more than every learned arm at 8 GiB (by 8.0 points)" in said
    assert "less than the best learned arm at 64 GiB (by 3.0 points)" in said


def test_dense_states_are_reported_for_both_orders():
    said = texts.dense(SWEEP)
    assert "25.0 to 93.0 % of the prompt tokens at 8 to 64 GiB" in said
    assert "With an article's questions in a row, it reuses 92.9 %." in said


def combination(workload: str, gib: float, ratio: float, shown: bool, preamble: str = "mixed") -> list[dict]:
    """The families of a point whose lead is shown alone, and perhaps after the correction too."""
    shows = {"lead.shown_alone": ratio > 1.05, "lead.shown": shown}
    settings = {"settings.workload": workload, "settings.preamble": preamble, "settings.store": gib}
    point = settings | {"lead.family": "position_independent", "lead.ratio.mean": ratio, "settings.other": None} | shows
    rates = {"prefix_caching": (None, 0.1), "position_independent": (2.14, 0.748)}
    return [
        point | {"entries.family": name, "entries.speedup.mean": speedup, "entries.token_hit_rate": rate}
        for name, (speedup, rate) in rates.items()
    ]


WINNERS = [*combination("quality", 16.0, 1.5, True), *combination("quality", 64.0, 1.01, False)]


def test_leads_are_counted_where_they_are_shown():
    doubtful = combination("rag", 64.0, 1.2, False)
    assert texts.winners([*WINNERS, *doubtful]).splitlines() == [
        "- `position_independent` has the lowest mean TTFT at 2 of 3 points, each judged alone.",
        "- It leads at 1 of 3 points after Holm's correction, with arms chosen on other seeds.",
        "- There, the next family takes 1.50 to 1.50 times as long; 1.1 times or more at 1.",
        "- No lead above 5 % is shown at 2 of 3 points, corrected.",
    ]


def test_the_front_table_has_every_combination_with_mixed_preambles():
    others = combination("quality", 16.0, 1.5, True, "none")
    assert texts.winners_table(WINNERS + others).splitlines() == [
        "| workload · preamble | 16 | 64 |",
        "| --- | --- | --- |",
        "| quality · mixed | position independent 2.14 ×, 75 % | (position independent 2.14 ×, 75 %) |",
    ]


def measured(mean: float, half: float | None = None) -> dict:
    return {"mean": mean, "low": half and mean - half, "high": half and mean + half}


def method(family: str, speedup: dict | None, kept: float) -> dict:
    quality = {"family": family, "questions": 100, "benefit_kept": measured(kept, 0.2)}
    return quality | {"ttft_s": measured(0.0994, 0.01), "speedup": speedup}


ANSWERS = {
    "engine": {"model": "m", "device": "d"},
    "documents": 25,
    "commit": "abc",
    "methods": {
        "none": method("none", None, 1.0),
        "radix": method("radix", measured(1.25), 1.0),
        "cached_order": method("cached_order", measured(1.5, 0.25), 0.9),
        "pic": method("pic", measured(3.25, 0.5), 0.6),
        "lego_link_16": method("lego_link", measured(0.9, 0.05), 0.7),
        "query_aware_16": method("query_aware", measured(1.0, 0.5), 0.8),
        "random_16": method("control", measured(0.5, 0.1), 0.99),
    },
}


def test_answers_have_five_rows_of_four_columns():
    head, _, *rows, _, origin, questions = texts.methods_of_answers(ANSWERS).splitlines()
    assert head == "| method | TTFT | speedup | benefit kept |"
    assert rows == [
        "| `none`: full recompute | 99 [89, 109] ms | – | 100 [80, 120] % |",
        "| `radix`: prefix cache | 99 [89, 109] ms | 1.25 × | 100 [80, 120] % |",
        "| `cached_order`: prefix cache, passages in cached order | 99 [89, 109] ms | 1.50 [1.25, 1.75] × "
        "| 90 [70, 110] % |",
        "| `pic`: position-independent, no repair | 99 [89, 109] ms | 3.25 [2.75, 3.75] × | 60 [40, 80] % |",
        "| `query_aware_16`: position-independent, repaired | 99 [89, 109] ms | 1.00 [0.50, 1.50] × | 80 [60, 100] % |",
    ]
    assert [origin, questions] == ["Measured: m on d.", "100 questions about 25 collections of facts, commit abc."]


def test_the_time_of_transformers_stands_below_the_answers_where_it_was_measured():
    none = ANSWERS["methods"]["none"] | {"plain_s": measured(0.25, 0.01)}
    beside = ANSWERS | {"methods": ANSWERS["methods"] | {"none": none}}
    *_, origin, _ = texts.methods_of_answers(beside).splitlines()
    assert origin == "Measured: m on d. The same prompts take 250 [240, 260] ms in plain transformers."


def test_repairs_are_slower_where_the_whole_interval_is():
    assert texts.answers_claim(ANSWERS).splitlines() == [
        "1 of 2 repairs are slower than full recompute.",
        "Cached order keeps 90 % of the benefit.",
        "The best position-independent method, `query_aware_16`, keeps 80 %.",
    ]


def test_a_noisy_machine_withholds_the_claim_on_speed():
    withheld = {arm: entry | {"speedup": None} for arm, entry in ANSWERS["methods"].items()}
    first, *_ = texts.answers_claim(ANSWERS | {"methods": withheld}).splitlines()
    assert first == "Speedups are withheld: the machine was noisy."


def rule_entry(arm: str, family: str, *rates: float) -> dict:
    """A rule at one point, as a row has it."""
    by_seed = {f"rules.hit_rates.{seed}": rate for seed, rate in enumerate(rates)}
    return {"rules.arm": arm, "rules.family": family, "rules.offline": None} | by_seed


def policy_point(traffic: str, *rules: dict) -> list[dict]:
    return [{"settings.traffic": traffic, "budget_gib": 16.0} | rule for rule in rules]


def test_leads_of_rules_are_counted_alone_and_corrected():
    """Three leads: of 10 points without doubt, of 1 with p = 0.04, which Holm compares with 0.025, and none."""
    other = rule_entry("lru", "engines", 0.4, 0.4, 0.4, 0.4, 0.4)
    sure = policy_point("sure", rule_entry("mine", "ours", 0.5, 0.5, 0.5, 0.5, 0.5), other)
    rates = (0.398, 0.41, 0.41, 0.412, 0.42)  # t = 1.0 / 0.353 = 2.83 with 4 degrees of freedom
    doubtful = policy_point("doubtful", rule_entry("mine", "ours", *rates), other)
    level = policy_point("level", rule_entry("mine", "ours", 0.4, 0.4, 0.4, 0.4, 0.4), other)
    said = policy_texts.policies_claim([*sure, *doubtful, *level])
    assert said.splitlines()[:1] + said.splitlines()[2:4] == [
        "| test, 3 points | ours reuses more | ours reuses less |",
        "| each point alone | 2: sure 16 GiB +10.0, doubtful 16 GiB +1.0 | 0 |",
        "| after Holm's correction | 1: sure 16 GiB +10.0 | 0 |",
    ]


def test_rules_are_judged_on_seeds_that_did_not_choose_them():
    """Each of three rules is best at one seed only: chosen on the other seeds, it trails at that one."""
    lucky = [rule_entry(f"r{seed}", "ours", *(0.9 if seed == each else 0.4 for each in range(3))) for seed in range(3)]
    other = rule_entry("lru", "published", 0.45, 0.45, 0.45)
    said = policy_texts.policies_claim(policy_point("luck", *lucky, other))
    assert said.splitlines()[-1] == "| corrected, rules chosen on the other seeds | 0 | 1: luck 16 GiB -5.0 |"


def fitted(twin: float, line: float, device: str) -> dict:
    """The summary of a twin with equal errors of all kinds, and of predictors without a model."""

    def errors(error: float) -> dict:
        kinds = dict.fromkeys(("p50_error", "p95_error"), error)
        return dict.fromkeys(("ttft", "tpot", "e2e"), {"mean_error": -error} | kinds)

    others = {"line": line, "mean": 0.7, "last": 0.8}
    without_model = {name: {"unseen": errors(error)} for name, error in others.items()}
    server = {"model": "m", "hardware": device, "deployment": {"tensor_parallel": 1, "data_parallel": 2}}
    return server | {"unseen": errors(twin), "without_model": without_model, "split": {"train": 5, "test": 6}}


def test_twins_are_counted_against_predictors_without_a_model():
    twins = (fitted(0.01, 0.02, "a"), fitted(0.03, 0.02, "b"))
    said = log_texts.twin_claim(*twins)
    assert "best of the three in 6 of 12 comparisons.\nThey cover 2 logs," in said
    larger = [line for line in said.splitlines() if line.startswith("- ")]
    assert larger[:2] == [
        "- m on 2 × b: TTFT mean: twin 3.0 %, line 2.0 %.",
        "- m on 2 × b: TTFT p50: twin 3.0 %, line 2.0 %.",
    ]
    assert len(larger) == 6
    assert log_texts.twin_margins(*twins).splitlines()[3].endswith("| 3.0 %, line 2.0 % | 0 of 6 |")
    rows = log_texts.twin_errors(*twins).splitlines()
    assert rows[3] == "|  |  | line | " + " | ".join(["-2.0 %, 2.0 %, 2.0 %"] * 3) + " |"


def test_coverage_has_a_row_per_design():
    design = {"seeds": 1, "documents": 25, "questions": 4, "spreads": [0, 0.5, 0.5], "lognormal": True, "unequal": True}
    intervals = {"of any sign": {"covered": 0.94, "below": 0.041, "above": 0.019}}
    results = {"studies": 1000, "commit": "abc", "designs": [design | {"intervals": intervals}]}
    said = limit_texts.coverage_table(results)
    assert said.splitlines()[2] == "| 1 × 25 × 1 to 7 | lognormal | 0, 0.5, 0.5 | 94.0 % (4.1, 1.9) |"
    assert "1,000 studies each." in said


def test_changed_numbers_are_listed_with_causes(monkeypatch, tmp_path):
    arm = {"token_hit_rate": 0.5, "ttft_s": {"mean": 0.1, "p99": 0.2}, "speedup": {"mean": 2.0}}
    new = {"arms": {"dp_3": arm | {"token_hit_rate": 0.52, "speedup": None}}}
    path = tmp_path / "benchmarks" / "toy" / "headline.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(new))
    monkeypatch.setattr(what_changed, "ROOT", tmp_path)
    monkeypatch.setattr(what_changed, "_at", lambda commit, path: {"arms": {"dp_3": arm, "gone": arm}})
    rows = list(what_changed.changes("benchmarks/toy/summary.json", "abc"))  # the old form
    assert list(what_changed.changes("benchmarks/toy/headline.json", "abc")) == rows
    assert [row[:5] for row in rows[:2]] == [
        ("toy", "`dp_3`", "token hit rate", "50.0 %", "52.0 %"),
        ("toy", "`dp_3`", "speedup", "2.00 ×", "–"),
    ]
    assert "clips match mass" in rows[0][5]
    assert {row[4] for row in rows[2:]} == {"no such arm"}
