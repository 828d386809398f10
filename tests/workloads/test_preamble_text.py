"""Preambles of text: a separate turn of the exact length, different for each tenant and user."""

import pytest

from spanlab.workloads.preamble import CountedPreambles, NoPreamble, Preamble, PreambleText

from .factories import decoded, load_workload

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
