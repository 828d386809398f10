"""Preambles have exact shares and lengths, and leave the rest of a prompt unchanged."""

import math
import re
from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spanlab.core.request import Request, Span
from spanlab.registry import forget
from spanlab.workloads import WORKLOADS, Rag, Synthetic
from spanlab.workloads.load import Popularity
from spanlab.workloads.preamble import (
    CountedPreambles,
    NoPreamble,
    Preamble,
    PreambleText,
    draw,
    proportional_counts,
    with_preambles,
)
from spanlab.workloads.selection import Selection, select
from spanlab.workloads.shape import measure
from spanlab.workloads.workload import Provenance, Workload, shared_length, workload

from .factories import check_equal_prefixes, decoded, load_workload

FEW = {"documents": 4, "questions_per_document": 6, "max_prompt_tokens": 3000}
KINDS = ("quality", "narrativeqa", "system_prompts")


def mixed(seed: int = 0) -> Preamble:
    return Preamble(
        none=NoPreamble(0.125),
        fixed=PreambleText(0.125, 40),
        tenant=CountedPreambles(0.25, 30, count=2),
        user=CountedPreambles(0.25, 20, count=3),
        request=PreambleText(0.25, 5),
        seed=seed,
    )


LENGTHS = {"none": 0, "fixed": 40, "tenant": 30, "user": 20, "request": 5}


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_is_its_preamble_and_the_plain_prompt(kind: str):
    plain = load_workload(kind, **FEW | {"max_prompt_tokens": 2960}).requests
    requests = load_workload(kind, **FEW, preamble=mixed()).requests
    lengths = Counter()
    for plain_request, other in zip(plain, requests, strict=True):
        added = other.spans[: len(other.spans) - len(plain_request.spans)]
        lengths[sum(len(span.tokens) for span in added)] += 1
        assert len(added) <= 1
        assert b"".join(span.tokens.tobytes() for span in (*added, *plain_request.spans)) == other.tokens.tobytes()
        for key in ("id", "group_id", "output_len"):
            assert getattr(other, key) == getattr(plain_request, key)
        flags = [(span.independent, span.reusable) for span in other.spans[len(added) :]]
        assert flags == [(span.independent, span.reusable) for span in plain_request.spans]
    assert lengths == {0: 3, 40: 3, 30: 6, 20: 6, 5: 6}
    assert max(request.num_tokens for request in requests) <= 3000


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_share_their_preamble_and_nothing_else_new(kind: str):
    plain = [request.tokens for request in load_workload(kind, **FEW | {"max_prompt_tokens": 2960}).requests]
    prompts = [request.tokens for request in load_workload(kind, **FEW, preamble=mixed()).requests]
    drawn = draw(mixed(), len(prompts))
    for first, second in combinations(range(len(prompts)), 2):
        same_preamble = drawn[first] == drawn[second]
        expected = LENGTHS[drawn[first].kind] + shared_length(plain[first], plain[second]) if same_preamble else 0
        assert shared_length(prompts[first], prompts[second]) == expected
    assert max(Counter(drawn).values()) > 1


def test_tenants_and_users_are_asked_equally_often():
    requests = load_workload("quality", **FEW, preamble=mixed()).requests
    heads = Counter(request.spans[0].tokens.tobytes() for request in requests if len(request.spans) == 4)
    by_length = {length: [] for length in (40, 30, 20, 5)}
    for head, count in heads.items():
        by_length[len(head) // 4].append(count)
    assert by_length == {40: [3], 30: [3, 3], 20: [2, 2, 2], 5: [1] * 6}


def test_only_a_repeated_preamble_is_reusable():
    requests = load_workload("quality", **FEW, preamble=mixed()).requests
    heads = {len(r.spans[0].tokens): r.spans[0] for r in requests if len(r.spans) == 4}
    assert {length: head.reusable for length, head in heads.items()} == {40: True, 30: True, 20: True, 5: False}
    assert not any(head.independent for head in heads.values())


def test_without_a_preamble_requests_stay_as_they_are():
    plain = Workload("toy", (Request(0, 0, (Span(np.arange(3, dtype=np.int32)),)),), Provenance("modelled", "toy"))
    assert with_preambles(plain, Preamble()) is plain


def test_the_seed_draws_only_tenants_and_users():
    first, again, other = (draw(mixed(seed), 400) for seed in (3, 3, 4))
    assert first == again != other
    assert Counter(first)[("fixed", 0)] == Counter(other)[("fixed", 0)] == 50


@given(st.lists(st.integers(0, 20), min_size=1, max_size=6).filter(any), st.integers(0, 500))
def test_shares_are_met_to_less_than_one_request(weights: list[int], total: int):
    shares = [weight / sum(weights) for weight in weights]
    counts = proportional_counts(shares, total)
    assert counts.sum() == total
    assert all(abs(count - share * total) < 1 + 1e-6 for count, share in zip(counts, shares, strict=True))


def test_preambles_stand_before_other_workloads_too():
    everyone = {"preamble": Preamble(NoPreamble(0), PreambleText(1.0, 11))}
    for kind, options in (("rag", {"rag": Rag(requests=5)}), ("synthetic", {"synthetic": Synthetic(groups=2)})):
        plain, requests = load_workload(kind, **options).requests, load_workload(kind, **options, **everyone).requests
        heads = {request.tokens[:11].tobytes() for request in requests}
        assert len(heads) == 1
        assert [r.tokens[11:].tobytes() for r in requests] == [r.tokens.tobytes() for r in plain]


def test_a_workload_of_a_plugin_gets_preambles():
    @workload("three_words")
    def three_words() -> Workload:
        spans = (Span(np.array([7, 8, 9], dtype=np.int32)),)
        requests = tuple(Request(number, 0, spans) for number in range(4))
        return Workload("three_words", requests, Provenance("modelled", "toy"))

    try:
        preamble = Preamble(NoPreamble(0.5), request=PreambleText(0.5, 2))
        loaded = load_workload("three_words", preamble=preamble)
    finally:
        forget(__file__)
    assert sorted(request.tokens.tolist() for request in loaded.requests) == [
        [7, 8, 9],
        [7, 8, 9],
        [10, 11, 7, 8, 9],
        [12, 13, 7, 8, 9],
    ]
    assert loaded.provenance.line() == "modelled: toy; preambles by share: 0.5 none, 0.5 request (2 tokens), seed 0"


def test_a_shape_keeps_what_prompts_with_preambles_share():
    real = load_workload("quality", **FEW, preamble=mixed())
    modelled = select(measure(real).corpus(), Selection())
    check_equal_prefixes(real.requests, modelled.requests)


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"fixed": {"share": 0.5, "tokens": 9}}, "*.share=none 1, fixed 0.5: expected shares that sum to 1"),
        ({"none": {"share": -0.5}}, "none.share=-0.5: expected a share from 0 to 1"),
        ({"none": {"share": 0}, "fixed": {"share": 1}}, "fixed.tokens=null with workload.preamble.fixed.share=1"),
        ({"none": {"share": 0}, "user": {"share": 1, "tokens": 0, "count": 1}}, "user.tokens=0: expected a number"),
        ({"none": {"share": 0}, "tenant": {"share": 1, "tokens": 5}}, "tenant.count=null with workload.preamble.tena"),
        ({"none": {"share": 0}, "tenant": {"share": 1, "tokens": 5, "count": 0}}, "tenant.count=0: expected a number"),
        ({"user": {"tokens": 4}}, "user.tokens=4 with workload.preamble.user.share=0: expected null"),
        ({"user": {"text": "x"}}, "user.text=x with workload.preamble.user.share=0: expected null"),
        ({"seed": 3}, "seed=3 without a preamble: expected 0"),
        ({"none": {"share": math.nan}}, "none.share=nan: expected a share from 0 to 1"),
    ],
)
def test_a_bad_preamble_gets_its_sentence(keys: dict, sentence: str):
    parts = {"none": NoPreamble, "fixed": PreambleText, "request": PreambleText}
    preamble_options = {
        name: value if name == "seed" else parts.get(name, CountedPreambles)(**value) for name, value in keys.items()
    }
    with pytest.raises(ValueError, match=f"^workload.preamble.{re.escape(sentence)}"):
        Preamble(**preamble_options)


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        (
            {"kind": "designed_shapes", "preamble": mixed()},
            "workload.preamble.none.share=0.125 with workload.kind=designed_shapes: expected "
            "workload.preamble.none.share=1.0, for it goes with ",
        ),
        (
            {"kind": "quality", "preamble": mixed(), "popularity": Popularity(requests=9)},
            "workload.preamble.request.share=0.25 with workload.popularity.requests=9: expected 0",
        ),
        (
            {"kind": "quality", "preamble": Preamble(NoPreamble(0), PreambleText(1, 9, "be brief"))},
            "workload.preamble.fixed.text with workload.tokenizer=null: expected null",
        ),
    ],
)
def test_a_workload_that_takes_no_preamble_refuses_it(keys: dict, sentence: str):
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}"):
        WORKLOADS.of("workload", keys)


def test_a_limit_without_room_for_the_preamble_is_refused():
    with pytest.raises(
        ValueError, match=r"^workload\.max_prompt_tokens=40: expected more than 40, the tokens of preamble"
    ):
        load_workload("quality", **FEW | {"max_prompt_tokens": 40}, preamble=mixed())


# -- Preambles of text: a separate turn of the exact length, different for each tenant and user. ---


NOBODY = NoPreamble(0.0)


@pytest.mark.parametrize("marks", [True, False], ids=["turn marks", "plain text"])
def test_the_text_is_repeated_to_the_stated_length(make_quality, marks: bool):
    files = make_quality(marks=marks)
    texts = PreambleText(1.0, 40, "Be brief.")
    request = load_workload("quality", "local", **files, preamble=Preamble(NOBODY, texts)).requests[0]
    head, opening, *_ = decoded(request, files["tokenizer"])
    begin, end = ("<|im_start|>system\n", "<|im_end|>\n") if marks else ("", "\n\n")
    assert len(request.spans[0].tokens) == 40
    assert head.startswith(begin + "Be brief. Be brief. ")
    assert head.endswith(end)
    body = head.removeprefix(begin).removesuffix(end)
    assert body == ("Be brief. " * 40)[: len(body)]
    assert "You read an article" in opening


@pytest.mark.parametrize("kind", ["tenant", "user"])
def test_every_tenant_and_user_has_a_text_of_its_own(make_quality, kind: str):
    files = make_quality()
    preamble = Preamble(NOBODY, **{kind: CountedPreambles(1.0, 60, count=3)})
    requests = load_workload("quality", "local", **files, preamble=preamble).requests
    heads = {decoded(request, files["tokenizer"])[0] for request in requests}
    assert sorted(head[len("<|im_start|>system\n")] for head in heads) == ["0", "1", "2"]


def test_every_request_has_a_stamp_of_its_own(make_quality):
    files = make_quality()
    stamped = Preamble(NOBODY, request=PreambleText(1.0, 30))
    requests = load_workload("quality", "local", **files, preamble=stamped).requests
    assert len({decoded(request, files["tokenizer"])[0] for request in requests}) == len(requests)


@pytest.mark.parametrize(
    ("preamble", "sentence"),
    [
        (
            Preamble(NOBODY, tenant=CountedPreambles(1.0, 30, "Be brief.", count=2)),
            r"^workload\.preamble\.tenant\.text with tokens=30: expected another text for tenant 1 than for tenant 0",
        ),
        (
            Preamble(NOBODY, PreambleText(1.0, 4)),
            r"^workload\.preamble\.fixed\.tokens=4: expected at least \d+, because \d+ tokens open and close the turn",
        ),
    ],
)
def test_a_preamble_that_cannot_be_built_is_refused(make_quality, preamble: Preamble, sentence: str):
    with pytest.raises(ValueError, match=sentence):
        load_workload("quality", "local", **make_quality(), preamble=preamble)
