"""Errors of incompatible templates and queries."""

import sys

import pytest

from spanlab.queries import describe
from spanlab.queries.render import CHATML

from ..support.notation import parse
from .templates import (
    ANSWERS_NUMBERED,
    BOS,
    BRACKETS,
    NUMBERED,
    ONLY_USERS_BEGIN,
    SHARED_MARK,
    THINKING,
    TRIMMING,
    WITHOUT_OPENING,
    closing_by_length,
)

ALIKE = "expected a template that wraps a message in the same way everywhere"
ALONE = f"so it cannot be an independent span; {ALIKE}"
OTHERWISE = f"the chat template of toy writes {{}} otherwise in another place, {ALONE}"
BY_PLACE = f"the chat template of toy wraps message {{}} by its place in this chat, {ALONE}"
CHANGED = (
    "the chat template of toy changes message {}, so its place in the prompt cannot be found;"
    " expected a text that the template leaves as it is, often one without spaces at its ends"
)
CLOSED = (
    "the chat template of toy leaves no assistant turn open behind these messages;"
    " expected a template with add_generation_prompt"
)
REORDERED = (
    "the chat template of toy repeats, leaves out or reorders messages, so their places in the prompt"
    " cannot be found; expected a template that writes each message once, in order"
)
BEGINS_INSIDE = (
    "the chat template of toy writes <|endoftext|> inside the prompt, at token {};"
    " expected one at the beginning and none elsewhere, or one before every message"
)


@pytest.mark.parametrize(
    ("template", "text", "sentence"),
    [
        (
            None,
            '"a"',
            "tokenizer=toy has no chat template; expected a folder with tokenizer.json and, beside it,"
            " tokenizer_config.json with chat_template, or one given by hand",
        ),
        (TRIMMING, '(seq (system "s") (plus "a" "doc b ") "q")', CHANGED.format("3, user 'doc b '")),
        (
            THINKING,
            '(seq "q" (assistant "<think>well</think>so") "and?")',
            CHANGED.format("2, assistant '<think>well</think>so'"),
        ),
        (NUMBERED, '(seq (system "s") (plus "a" "b") "q")', OTHERWISE.format("user")),
        (THINKING, '(seq "q" (plus "a" (assistant "b")))', BY_PLACE.format(3)),
        (THINKING, '(seq "q" (plus (seq "a" (assistant "b"))))', BY_PLACE.format(2)),
        (SHARED_MARK, '(plus "a" (assistant "b"))', BY_PLACE.format(2)),
        (ANSWERS_NUMBERED, '(seq (plus (seq "a" (assistant "b"))) "q")', OTHERWISE.format("user+assistant")),
        (closing_by_length(3), '(seq (plus "a") "q")', OTHERWISE.format("user")),
        (
            closing_by_length(4) + "{% if add_generation_prompt %}:{% endif %}",
            '(seq (plus "a" "b" "c") "q")',
            BY_PLACE.format(1),
        ),
        (closing_by_length(3), '(seq "a" (assistant "b") "q")', CLOSED),
        (
            BRACKETS,
            '(seq (plus "a" "b") "q")',
            "the chat template of toy does not take these messages (roles must alternate); expected a chat that it can"
            " write, in the roles and the order that it asks for",
        ),
        (WITHOUT_OPENING, '"a"', CLOSED),
        ("{{ messages[-1].content }}", '(seq "a" "b")', REORDERED),
        ("{% for m in messages | reverse %}{{ m.content }}{% endfor %}", '(seq "a" "b")', REORDERED),
        (CHATML.replace("<|im_end|>", BOS), '(seq "a" "b")', BEGINS_INSIDE.format(4)),
        (ONLY_USERS_BEGIN, '(seq "a" (assistant "b") "c")', BEGINS_INSIDE.format(11)),
        (
            "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}:{% endif %}",
            '(seq (plus "a" "") "q")',
            "message 2, user, is an independent span without any token; expected some text",
        ),
    ],
)
def test_a_template_that_does_not_fit_is_one_sentence(with_template, template, text, sentence):
    with pytest.raises(ValueError, match=r"chat template|without any token") as caught:
        describe(parse(text), with_template(template, bos_token=BOS))
    assert str(caught.value) == sentence


def test_a_prompt_without_tokens_is_one_sentence(with_template):
    bare = with_template("{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(ValueError, match=r"^query has no token in the chat template of toy; expected some text$"):
        describe(parse('""'), bare)


def test_a_missing_jinja_gives_one_sentence(with_template, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(
        ValueError, match=r"^jinja2 is missing and chat templates need it; expected spanlab's extra engine"
    ):
        describe(parse('"a"'), with_template(CHATML))


@pytest.mark.parametrize(
    "template",
    ["{% for m in messages %}", "{{ messages[0].__class__.__mro__[1].__subclasses__() }}", "{{ messages + 1 }}"],
)
def test_a_template_that_jinja_refuses_is_one_sentence(with_template, template):
    with pytest.raises(
        ValueError, match=r"^the chat template of toy (is no Jinja template|does not take) .*; expected"
    ):
        describe(parse('"a"'), with_template(template))
