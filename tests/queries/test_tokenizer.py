"""The built-in tokenizer, and tokenizers from folders."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spanlab.queries import builtin_tokenizer, describe, load_tokenizer
from spanlab.queries.render import CHATML, NUM_WORDS, invented_words

from ..support.notation import parse

TOKENIZER = builtin_tokenizer()


def test_the_built_in_words_are_many_distinct_and_one_token_each(builtin):
    words = invented_words()
    assert len(set(words)) == len(words) == NUM_WORDS
    assert words[:3] == ("keledu", "pisigo", "vudoli")
    assert len(builtin.encode(" ".join(words))) == NUM_WORDS
    assert builtin.vocab_size == 256 + 2 * (NUM_WORDS + 3) + 3


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_the_built_in_tokenizer_gives_every_text_back(text):
    tokens = TOKENIZER.encode(text)
    assert tokens.dtype == np.int32
    assert TOKENIZER.decode(tokens) == text


def test_a_turn_costs_four_tokens_around_its_text(builtin):
    rendered = describe(parse(f'(user "{" ".join(invented_words()[:10])}")'), builtin)
    assert [stop - start for start, stop in (span.tokens for span in rendered.spans)] == [10 + 5, 3]


@pytest.fixture
def folder(tmp_path, builtin):
    """A folder with the built-in tokenizer's file, cut at four tokens as training left it."""
    tokenizer = type(builtin.tokenizer).from_str(builtin.tokenizer.to_str())
    tokenizer.enable_truncation(4)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def configure(folder, **config):
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return load_tokenizer(folder)


@pytest.mark.parametrize(
    "template", [CHATML, [{"name": "tool", "template": "x"}, {"name": "default", "template": CHATML}]]
)
def test_the_template_comes_from_the_configuration(folder, builtin, template):
    tokenizer = configure(folder, chat_template=template)
    query = parse('(seq (plus "doc a") "why is the sky so blue today?")')
    assert np.array_equal(describe(query, tokenizer).tokens, describe(query, builtin).tokens)


def test_a_template_by_hand_goes_before_a_file_before_the_configuration(folder):
    assert configure(folder, chat_template="config").chat_template == "config"
    (folder / "chat_template.jinja").write_text("file", encoding="utf-8")
    assert load_tokenizer(folder).chat_template == "file"
    assert load_tokenizer(folder, "hand").chat_template == "hand"


@pytest.mark.parametrize(
    ("config", "adds_bos"),
    [
        ({}, False),
        ({"bos_token": "<|endoftext|>"}, False),
        ({"bos_token": "<|endoftext|>", "add_bos_token": True}, True),
        ({"bos_token": {"content": "<|endoftext|>"}, "add_bos_token": True}, True),
        ({"bos_token": None, "add_bos_token": True}, False),
    ],
)
def test_the_configuration_sets_whether_a_bos_is_added(folder, config, adds_bos):
    assert configure(folder, **config).adds_bos is adds_bos


@pytest.mark.parametrize(("config", "adds_bos"), [({}, True), ({"add_bos_token": False}, False)])
def test_a_tokenizer_that_adds_a_bos_is_recognised(folder, config, adds_bos):
    from tokenizers import Tokenizer, processors

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    bos = ("<|endoftext|>", tokenizer.token_to_id("<|endoftext|>"))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos[0]} $A", special_tokens=[bos])
    tokenizer.save(str(folder / "tokenizer.json"))
    assert configure(folder, bos_token="<|endoftext|>", **config).adds_bos is adds_bos


def test_a_folder_without_template_is_refused_only_for_chats(folder):
    tokenizer = load_tokenizer(folder)
    assert len(tokenizer.encode("hello")) == 5
    with pytest.raises(ValueError, match=rf"^tokenizer={folder.name} has no chat template; expected a folder with"):
        describe(parse('"a"'), tokenizer)


def test_a_bos_outside_the_vocabulary_is_refused(folder):
    tokenizer = configure(folder, chat_template=CHATML, bos_token="<s>")
    with pytest.raises(
        ValueError, match=r"^bos_token=<s> of tokenizer=.* is not in its vocabulary; expected one of its"
    ):
        describe(parse('"a"'), tokenizer)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"holds no tokenizer.json; expected a folder with tokenizer.json and"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("name", "text"), [("tokenizer.json", "{"), ("tokenizer.json", "{}"), ("tokenizer_config.json", "[]")]
)
def test_a_broken_file_is_refused_by_name(folder, name, text):
    (folder / name).write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=rf"{name} (is not JSON|holds no model|holds no JSON object)"):
        load_tokenizer(folder)


def test_a_template_that_is_no_text_is_refused(folder):
    with pytest.raises(ValueError, match=r"^chat_template of tokenizer=.* is no text; expected"):
        configure(folder, chat_template=7)
