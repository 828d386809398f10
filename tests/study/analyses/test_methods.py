"""The analysis `methods`: scored gold answers of a study, its files and figures, and rejected settings."""

import json

import numpy as np
import pytest

from spanlab.analyses.methods import choice_score, covariates
from spanlab.cli import compose
from spanlab.queries import builtin_tokenizer
from spanlab.study.backends import RealEngine
from spanlab.study.numbers import read_options, read_scores
from spanlab.study.prepare import gold_tokens, with_given_answers
from spanlab.study.run import run_study

FACTS = "{collections: 3, passages: 2, sentences: 2, remarks: 0, hops: [1]}"
SMALL = (
    "model=tiny",
    "tracking.kind=none",
    "engine.weights=random",
    "engine.threads=1",
    f"workload.questions={{requests: 4, k: 2, retrieval: given, facts: {FACTS}}}",
    "methods.floor_tokens=64",
)
ARMS = "only=[none,none_view,gold_view,radix,pic,lego_link_16]"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return run_study(compose("pic_answers", [*SMALL, ARMS]), "pic_answers", tmp_path_factory.mktemp("m"), show=False)


@pytest.fixture(scope="module")
def summary(folder):
    return json.loads((folder / "summary.json").read_bytes())


def test_every_method_is_scored_beside_its_floor(summary):
    methods = summary["methods"]
    assert set(methods) == {"none", "none_view", "gold_view", "radix", "pic", "lego_link_16"}
    for entry in methods.values():
        for key in ("ttft_s", "computed_tokens", "gold_loss", "top1"):
            assert entry[key]["low"] <= entry[key]["mean"] <= entry[key]["high"]
        assert entry["f1"] is None
    whole = {arm for arm, entry in methods.items() if entry["plain_s"]}  # prompts with all passages
    assert whole == {"none", "radix", "pic", "lego_link_16"}
    assert len({methods[arm]["plain_s"]["mean"] for arm in whole}) == 1
    assert methods["radix"]["kl"]["mean"] < 1e-9 < 1e-4 < methods["pic"]["kl"]["mean"]
    assert methods["pic"]["computed_tokens"]["mean"] < methods["none"]["computed_tokens"]["mean"]
    assert methods["none_view"]["computed_tokens"]["mean"] < methods["gold_view"]["computed_tokens"]["mean"]
    assert summary["floor"]["kl"]["mean"] < 1e-9
    assert methods["radix"]["shown"] is False
    assert any("not shown" in caveat and "radix" in caveat for caveat in summary["caveats"])


def test_loss_is_reported_by_place_and_length(summary):
    buckets = summary["gold_loss_by"]
    assert {bucket["covariate"] for bucket in buckets} == {
        "task",
        "place of the gold passage",
        "tokens of the gold passage",
    }
    pic = [
        bucket for bucket in buckets if bucket["arm"] == "pic" and bucket["covariate"] == "place of the gold passage"
    ]
    assert sum(bucket["questions"] for bucket in pic) == 4


def test_the_baseline_runs_once_more_in_other_chunks(folder):
    baseline_steps, floor_steps = (
        (folder / subfolder / "none-seed0-rateNone.jsonl").read_text().splitlines()
        for subfolder in ("steps", "floor/none/steps")
    )
    assert len(baseline_steps) == 2 * 4  # the prompt and the first token of its answer, and the others
    assert len(floor_steps) > len(baseline_steps)


def test_only_the_baseline_keeps_logits(folder):
    assert [path.name for path in folder.rglob("*.logits.npy")] == ["none-seed0-rateNone.logits.npy"]
    with np.load(folder / "steps" / "pic-seed0-rateNone.npz") as file:
        assert file["logits"].size == 0
        assert len(file["nll"]) == len(file["scored"])


def test_tables_and_figure_are_written(folder):
    names = {path.name for path in folder.rglob("*")}
    assert {"methods.csv", "gold_loss_by.csv", "method_pairs.csv", "methods_benefit.png"} <= names


def test_a_gold_answer_follows_what_the_prompt_says():
    tokenizer = builtin_tokenizer()
    opened, stem = (gold_tokens("Oslo\nthe city of Oslo", opening, tokenizer) for opening in ("", "Mira lives in"))
    assert tokenizer.decode(opened) == "Oslo"
    assert tokenizer.decode(stem) == " Oslo"


def test_other_requests_keep_their_outputs():
    study = compose(
        "pic_agreement", ["tracking.kind=none", "engine.teacher=gold", "workload.alias_questions.questions=1"]
    )
    from spanlab.build import build_workload

    workload = with_given_answers(study, build_workload(study.workload, ""))
    for request in workload.requests:
        assert (request.output is None) == (request.answer is None)
        assert request.output is None or len(request.output) == request.output_len


def test_the_likeliest_option_is_counted(tmp_path):
    """Two questions with options, one of which has two right answers, and one without options."""
    rows = [
        {"question": "Where?", "answer": "at sea", "options": ["at sea", "in the old mill"], "passages": ["At sea."]},
        {"question": "Who?", "answer": ["Mira", "Mo"], "options": ["Mira", "Mo", "Al"], "passages": ["Mira and Mo."]},
        {"question": "When?", "answer": "now", "passages": ["It is now."]},
    ]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    mine = "workload.questions={k: 1, retrieval: given}"
    settings = [*(setting for setting in SMALL if "questions" not in setting), mine, f"local={tmp_path / 'mine.jsonl'}"]
    arms = ("only=[none,pic]", "methods.without_context=null", "methods.gold_only=null", "output.figures=false")
    study = compose("pic_answers", [*settings, *arms])
    folder = run_study(study, "pic_answers", tmp_path, show=False)
    methods = json.loads((folder / "summary.json").read_bytes())["methods"]
    for arm in ("none", "pic"):
        outputs_path = folder / "steps" / f"{arm}-seed0-rateNone.npz"
        gold, wrong = read_scores(outputs_path), read_options(outputs_path)
        assert {request: len(losses) for request, losses in wrong.items()} == {0: 1, 1: 1}
        right = [gold[request]["nll"] < min(losses) for request, losses in wrong.items()]
        assert methods[arm]["likeliest"]["mean"] == pytest.approx(sum(right) / 2)


def test_a_choice_is_the_option_that_alone_is_nearest():
    options = ["in the red barn", "in the old mill", "at sea"]
    assert choice_score("It was the old mill.", "in the old mill", options) == 1
    assert choice_score("It was the old mill.", "at sea", options) == 0
    assert choice_score("nowhere", "at sea", options) == 0
    assert np.isnan(choice_score("at sea", "at sea", [""]))


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("engine.record=logits", r"analyses=methods with engine\.record=logits: expected scores or tokens"),
        ("engine={record: tokens, teacher: null}", r"engine\.record=tokens with .* expected .* trained weights"),
        ("only=[radix,pic]", r"baseline=none .*: expected|expected baseline=none among the arms"),
        ("arrivals.clients=2", r"analyses=methods with arrivals\.clients=2: expected .* with 1"),
        ("methods.without_context=nothing", r"methods\.without_context=nothing: expected"),
        ("methods.floor_tokens=9000", r"methods\.floor_tokens=9000 .*: expected fewer"),
        (
            "analyses=[summary]",
            r"methods\.without_context=none_view with analyses=\['summary'\]: expected methods among them",
        ),
    ],
)
def test_refuses_what_cannot_be_compared(override, sentence):
    with pytest.raises(ValueError, match=sentence):
        compose("pic_answers", [*SMALL, ARMS, override])


def test_two_files_of_questions_are_refused():
    with pytest.raises(ValueError, match=r"local=mine\.jsonl with workload\.path=other\.jsonl"):
        compose("pic_answers", ["model=tiny", "engine.weights=random", "local=mine.jsonl", "workload.path=other.jsonl"])


def test_covariates_are_of_the_questions_alone():
    study = compose("pic_answers", [*SMALL, ARMS])
    from spanlab.build import build_workload

    workload = build_workload(study.workload, "")
    buckets = covariates(workload, workload.requests[2:4])
    assert all(len(values) == 2 for values in buckets.values())


@pytest.mark.parametrize("alternate", [True, False])
def test_no_arm_is_scored_against_logits_of_a_baseline_that_failed(alternate, tmp_path, monkeypatch):
    serve = RealEngine._serve

    def fail_late(self, job, write, clock):
        written = []

        def write_some(record):
            written.append(record)
            if len(written) == 2 and job.reference:
                raise MemoryError
            write(record)

        return serve(self, job, write_some, clock)

    monkeypatch.setattr(RealEngine, "_serve", fail_late)
    settings = (*SMALL, "only=[none,pic]", f"engine.alternate={alternate}")
    with pytest.raises(ValueError, match=r"arms\.none ran out of memory: no more memory"):
        run_study(compose("pic_answers", settings), "pic_answers", tmp_path, show=False)
    assert [path.read_bytes() for path in tmp_path.rglob("runs/pic.jsonl")] == [b""]
