"""Answers: agreement with full recompute for any weights, accuracy for stored ones."""

from __future__ import annotations

import json

import pytest
import torch

from spanlab.engine.dense import Segment, block_mask, causal_mask, dense_logits, eager_twin
from spanlab.analysis.divergence import kl_rows
from spanlab.pic_bench import quality, run
from spanlab.pic_bench.decode import decode
from spanlab.queries.builtin import CHATML, builtin_tokenizer

ASK = ("quality.questions=1", "quality.words=12", "quality.output_tokens=3")


@pytest.fixture(scope="module")
def toy(settings):
    return settings("outputs=[agreement]", *ASK)


@pytest.fixture(scope="module")
def asked(toy, ground):
    return quality.prompts(toy, ground.tokenizer, quality.chains(toy)[0], 0)


@pytest.fixture(scope="module")
def answered(toy, ground):
    return {one.arm: one for one in quality.answers(toy, ground, 0, quality.chains(toy)[0])}


def test_every_arm_answers_in_both_orders(toy, answered):
    floors = [quality.FLOOR, f"{quality.FLOOR}-shuffled"]
    assert sorted(answered) == sorted([*quality.names(toy), *floors])
    assert len(answered) == quality.rows_of(toy)
    assert all(one.predictions == 3 for one in answered.values())
    assert not any(one.answer for one in answered.values())


def test_full_recompute_is_no_distance_from_itself_and_its_floor_is_small(answered):
    for order in ("", "-shuffled"):
        assert answered[f"flat{order}"].kl == 0
        assert 0 <= answered[f"floor{order}"].kl < 1e-9
        assert answered[f"floor{order}"].greedy


def test_three_kernels_agree_with_each_other(answered):
    for order in ("", "-shuffled"):
        plain = answered[f"pic{order}"].kl
        assert plain > 1e-4
        for arm in ("pic_raw", "pic_turned"):
            assert answered[f"{arm}{order}"].kl == pytest.approx(plain, rel=1e-3)


@pytest.mark.parametrize("order", ["same", "shuffled"])
def test_divergences_are_those_of_dense_forwards(order, asked, answered, ground):
    """Plain PIC is a forward under the block mask, full recompute one under the causal mask (M4 and M0)."""
    request = getattr(asked, order)
    arm = "pic" if order == "same" else "pic-shuffled"
    twin, segments, start = eager_twin(ground.model), [], 0
    for span in request.spans:
        segments.append(Segment(start, start + len(span.tokens), span.independent))
        start += len(span.tokens)
    ids = torch.from_numpy(request.tokens.astype("int64"))
    outputs: list[int] = []
    pairs = []
    for _ in range(3):
        now = torch.cat([ids, torch.tensor(outputs, dtype=torch.int64)])
        n = len(now)
        tail = [*segments[:-1], Segment(segments[-1].start, n)]
        full, block = (
            dense_logits(twin, now, mask, torch.arange(n))[-1:] for mask in (causal_mask(n), block_mask(tail))
        )
        pairs.append(float(kl_rows(full.numpy(), block.numpy())[0]))
        outputs.append(int(full.argmax()))
    assert answered[arm].kl == pytest.approx(sum(pairs) / 3, rel=2e-3)


def test_shuffled_moves_a_document_and_nothing_else(asked):
    same, shuffled = ([span.tokens.tobytes() for span in one.spans] for one in (asked.same, asked.shuffled))
    assert same != shuffled
    assert sorted(same) == sorted(shuffled)
    assert (same[0], same[5:]) == (shuffled[0], shuffled[5:])


def test_told_tokens_are_followed_and_the_logits_are_theirs(toy, ground, asked):
    strategy = toy.arms["none"]
    free = decode(ground, strategy, [], asked.same, 8192)
    told = decode(ground, strategy, [], asked.same, 8192, free.tokens)
    assert told.tokens == free.tokens
    assert abs(told.logits - free.logits).max() == 0
    other = [5, 6, 7]
    forced = decode(ground, strategy, [], asked.same, 8192, other)
    assert forced.tokens == other
    assert abs(forced.logits[0] - free.logits[0]).max() == 0
    assert abs(forced.logits[1] - free.logits[1]).max() > 1e-3


def test_agreement_runs_with_random_weights_and_prints_its_floor(settings, tmp_path, capsys):
    wanted = settings("outputs=[agreement]", "only=[none,pic]", "output.run=mine", *ASK)
    folder = run.run_bench(wanted, "pic_bench", tmp_path)
    said = capsys.readouterr().out
    assert "floor: M0 to M0" in said
    assert "exact" not in said
    summary = json.loads((folder / "summary.json").read_text())
    assert [row["arm"] for row in summary["quality"]] == ["flat", "flat-shuffled", "pic", "pic-shuffled"]
    assert summary["entries"] == []
    assert summary["quality"][0]["agreement"] is None
    assert summary["quality"][2]["agreement"]["kl"][0] > 1e-4
    assert summary["quality"][2]["accuracy"] is None


def test_an_interrupted_run_asks_no_question_twice(settings, tmp_path, monkeypatch):
    real, begun = quality.answers, []

    def watched(toy, ground, number, chain):
        begun.append(number)
        for place, one in enumerate(real(toy, ground, number, chain)):
            if len(begun) == 2 and place == 3:
                raise KeyboardInterrupt
            yield one

    monkeypatch.setattr(quality, "answers", watched)
    given = ("outputs=[agreement]", "only=[none,pic]", "output.run=cut", *ASK[1:], "quality.questions=2")
    with pytest.raises(KeyboardInterrupt):
        run.run_bench(settings(*given), "pic_bench", tmp_path)
    folder = run.run_bench(settings(*given, "output.if_exists=resume"), "pic_bench", tmp_path)
    assert begun == [0, 1, 1]
    lines = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    assert [line["question"] for line in lines] == [0] * 6 + [1] * 6


@pytest.fixture(scope="module")
def stored(ground, tmp_path_factory):
    """A model with its tokenizer as they are stored; random, but nobody can see that."""
    folder = tmp_path_factory.mktemp("stored")
    ground.model.hf.save_pretrained(folder)
    builtin_tokenizer().tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML, "eos_token": "<|im_end|>"}))
    return folder


def test_accuracy_of_stored_weights_is_scored_and_judged(settings, stored, tmp_path, capsys, monkeypatch):
    from spanlab.evaluation import judge

    monkeypatch.setattr(judge, "post_chat", lambda *given: '{"score": 40}')
    given = (
        "engine.weights=path",
        f"engine.path={stored}",
        "outputs=[accuracy,agreement]",
        "only=[none,pic]",
        "output.run=mine",
    )
    wanted = settings(*given, *ASK, "judge.base_url=http://localhost", "judge.model=m")
    folder = run.run_bench(wanted, "pic_bench", tmp_path)
    summary = json.loads((folder / "summary.json").read_text())
    for row in summary["quality"]:
        assert row["accuracy"]["exact"] == [0.0, 0.0, pytest.approx(0.975)]
        assert row["judge"] == {"mean": 0.4, "judged": 1, "failures": {}}
    answers = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    assert all(one["answer"] for one in answers if not one["arm"].startswith("floor"))
    assert "exact" in capsys.readouterr().out


def test_an_answer_ends_where_the_model_ends_it(ground):
    from spanlab.pic_bench.decode import Decoded

    logits = torch.zeros(4, 2).numpy()
    cut = quality._cut(Decoded([3, 9, 1, 2], logits), 9)
    assert (cut.tokens, len(cut.logits)) == ([3, 9], 2)
    assert quality._cut(Decoded([3, 1], logits[:2]), 9).tokens == [3, 1]


def test_a_question_longer_than_the_context_is_refused(settings, ground):
    long = settings("outputs=[agreement]", "quality.questions=1", "quality.words=3000")
    with pytest.raises(ValueError, match=r"quality\.words=3000 with .* expected at most the 65,536 positions of tiny"):
        next(quality.answers(long, ground, 0, quality.chains(long)[0]))
