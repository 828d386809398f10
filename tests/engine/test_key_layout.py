"""Where cache spans count as standing, and what stored keys are rotated by."""

import numpy as np
import pytest

from spanlab.core.repair import SpanSettings
from spanlab.core.tree import CacheSpan, isolated
from spanlab.engine.pages import bases, carried_rotation

from .factories import HEAD, document, make_request, text


def cache_spans(*spans) -> tuple[CacheSpan, ...]:
    """A prompt cut for position-independent caching."""
    return isolated(make_request(0, *spans))


@pytest.mark.parametrize(
    ("spans", "sequential", "overlapping"),
    [
        ([text(HEAD, 9)], [0], [0]),
        ([text(HEAD, 9), document(0, 5), document(1, 8), text(2, 3)], [0, 9, 14, 22], [0, 9, 9, 17]),
        ([document(0, 5), document(1, 8), text(2, 3)], [0, 5, 13], [0, 0, 8]),
        ([text(HEAD, 2), document(0, 5), text(3, 4), document(1, 8), text(2, 3)], [0, 2, 7, 11, 19], [0, 2, 10, 2, 14]),
    ],
)
def test_bases(spans, sequential, overlapping):
    assert bases(cache_spans(*spans), False) == sequential
    assert bases(cache_spans(*spans), True) == overlapping


@pytest.mark.parametrize(
    ("keys", "of_text", "of_document"),
    [("raw", [0, 0, 0], [0, 0, 0]), ("local", [20, 21, 22], [0, 1, 2]), ("absolute", [20, 21, 22], [20, 21, 22])],
)
def test_turns(keys, of_text, of_document):
    span, words = cache_spans(document(0, 5), text(2, 3))
    key_layout = SpanSettings(keys=keys)
    assert carried_rotation(key_layout, words, 20, np.arange(3)).tolist() == of_text
    assert carried_rotation(key_layout, span, 20, np.arange(3)).tolist() == of_document


def test_only_weights_other_than_one_reweigh():
    assert not SpanSettings().reweighs
    assert SpanSettings(temperature=0.9).reweighs
    assert SpanSettings(scale=1.1).reweighs


@pytest.mark.parametrize(
    ("kernel", "sharing", "rotated"),
    [("pre_rotated", "private", True), ("pre_rotated", "canonical", False), ("rotate_queries", "private", False)],
)
def test_copies_are_rotated_where_keys_are_materialised(kernel, sharing, rotated):
    assert SpanSettings(kernel=kernel, sharing=sharing).rotates_copies == rotated
