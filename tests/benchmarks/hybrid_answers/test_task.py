"""Sequences of the recall task, compared with a simple parser of their tokens."""

import numpy as np
import pytest
from probe_model import DOCUMENT, QUESTION, Batch, Shape, draw
from probe_settings import SPECIAL, TaskSettings

TASK = TaskSettings()
SHAPE = Shape(documents=4, tokens=21, facts=5)


def sequences(updated: float = 0.3) -> Batch:
    return draw(np.random.default_rng(3), TaskSettings(updated=updated), SHAPE, 40)


def read_facts(document: np.ndarray) -> dict[int, int]:
    """The token after each key."""
    keys = np.flatnonzero((document >= SPECIAL) & (document < SPECIAL + TASK.keys))
    return {int(document[index]): int(document[index + 1]) for index in keys}


def test_last_document_with_a_key_is_gold():
    batch = sequences()
    for documents, questions, gold in zip(batch.documents, batch.questions, batch.gold, strict=True):
        facts: dict[int, int] = {}
        for document in documents:
            facts |= read_facts(document)
        assert [facts[key] for key in questions[1::2]] == gold.tolist()


def test_documents_hold_their_facts_and_filler():
    batch = sequences()
    assert batch.documents.shape == (40, 4, 21)
    assert (batch.documents[..., 0] == DOCUMENT).all()
    for document in batch.documents.reshape(-1, 21):
        facts = read_facts(document)
        assert len(facts) == SHAPE.facts
        values = np.array(list(facts.values())) - SPECIAL - TASK.keys
        assert ((values >= 0) & (values < TASK.values)).all()
        assert (document[1:] >= SPECIAL + TASK.keys + TASK.values).sum() == 21 - 1 - 2 * SHAPE.facts


def test_kinds_of_keys_are_those_of_the_documents():
    batch = sequences()
    for number, documents in enumerate(batch.documents):
        question_keys = batch.questions[number, 1::2]
        holds = np.array([[key in read_facts(document) for document in documents] for key in question_keys])
        assert (batch.updated[number] == (holds.sum(1) > 1)).all()
        assert (batch.first[number] == (holds[:, 0] & (holds.sum(1) == 1))).all()
    assert (batch.questions[:, ::2] == QUESTION).all()


@pytest.mark.parametrize(("share", "updated"), [(0.0, False), (1.0, True)])
def test_share_of_updates_decides_on_contradictions(share: float, updated: bool):
    assert sequences(share).updated.all() == sequences(share).updated.any() == updated


def test_sequences_follow_the_seed():
    again = sequences()
    assert all((getattr(again, name) == getattr(sequences(), name)).all() for name in vars(again))
