"""Pages of an admitted request: ownership while it runs, with equal concurrent requests, and when it finishes."""

from __future__ import annotations

import numpy as np

from spanlab.core.admission import BatchRules
from spanlab.core.scheduler import Scheduler
from spanlab.engine.pages import NodePages
from spanlab.engine.request_state import SpanView
from spanlab.engine.slots import PADDING_ROW

from .factories import (
    APART,
    HEAD,
    KERNELS,
    Run,
    arm,
    document,
    make_request,
    make_small,
    nothing_leaks,
    questions,
    start,
    text,
)
from .oracles import wrong
from .test_recurrence import KINDS, begin, pool_of


def stepped(run: Run, *requests) -> tuple[Scheduler, list]:
    """A scheduler that has these requests, and their sequences."""
    scheduler = Scheduler(run.engine.policy, run.rules)
    for request in requests:
        scheduler.add(request)
    return scheduler, list(scheduler.waiting)


def advance(run: Run, scheduler: Scheduler, ended=()) -> None:
    """One step."""
    step = scheduler.schedule(0)
    run.engine.run(step)
    scheduler.complete(step, 0, ended)
    run.engine.completed(step)


def request_states(run: Run, sequences) -> list:
    """Their request states."""
    return [run.engine._request_states[sequence] for sequence in sequences]


def second_of(run: Run, requests):
    """The state of the second request after its first step, when the first has been served."""
    run.serve(requests[:1])
    scheduler, sequences = stepped(run, requests[1])
    advance(run, scheduler)
    return request_states(run, sequences)[0]


def test_equal_documents_computed_together_share_pages():
    requests = [
        make_request(0, document(0, 35), text(1, 3), output=3),
        make_request(1, text(HEAD, 5), document(0, 35), text(2, 3), output=3),
    ]
    run = start(make_small(), arm("pic", 16), requests)
    scheduler, sequences = stepped(run, *requests)
    advance(run, scheduler)
    first, second = (
        request_state.spans[0 if rank == 0 else 1] for rank, request_state in enumerate(request_states(run, sequences))
    )
    assert first.pages.ids[:2].tolist() == second.pages.ids[:2].tolist()
    assert first.pages.ids[2] != second.pages.ids[2]
    assert (first.stored_pages, second.stored_pages) == (2, 2)
    assert sorted(run.stored) == sorted(first.pages.ids[:2])
    used = run.engine.pool.shape.pages - run.engine.pool.free_pages
    assert used == 2 + 2 * 2 + 1  # the document; its last page and the question's, each; the opening text


def test_what_was_found_is_read_where_it_lies():
    requests = questions([(0, 1), (1, 0)], (35, 20), tail=3)
    run = start(make_small(), arm("pic", 16), requests)
    head, second, first, _ = second_of(run, requests).spans
    assert {*first.pages.ids[:2], *second.pages.ids[:1]} == set(run.stored)
    assert (head.base, second.base, first.base) == (0, 11, 31)


def test_extents_prefer_copies_to_original_positions():
    requests = questions([(0,), (0,)], (35,), tail=3, output=2)
    request_state = second_of(start(make_small(), arm("lego_link_16", 16), requests), requests)
    span_pages = request_state.spans[1]
    assert span_pages.copied == 35
    assert span_pages.copy.ids[0] not in span_pages.pages.ids
    assert span_pages.copy.ids[1:].tolist() == span_pages.pages.ids[1:].tolist()
    assert request_state.views(1, 35) == [SpanView(0, 35, span_pages.copy, 11)]
    assert request_state.views(1, 20) == [SpanView(0, 20, span_pages.copy, 11)]
    assert request_state.views(0, 11) == [SpanView(0, 11, request_state.spans[0].pages, 0)]


def test_rotated_copies_have_the_reader_positions():
    requests = questions([(0,), (0,)], (35,), tail=3, output=2)
    run = start(make_small(), arm("as_seen", 16, **KERNELS["pre_rotated"]), requests)
    request_state = second_of(run, requests)
    span_pages = request_state.spans[1]
    assert request_state.views(1, 35) == [SpanView(0, 32, span_pages.copy, 0), SpanView(32, 35, span_pages.pages, 11)]
    assert not {*span_pages.copy.ids} & {*span_pages.pages.ids}


def test_a_finished_request_frees_its_pages_at_the_next_step():
    requests = questions([(0,)], (35,), tail=3)
    run = start(make_small(), arm("pic_turned", 16), requests)
    scheduler, sequences = stepped(run, *requests)
    advance(run, scheduler, ended=sequences)
    assert not nothing_leaks(run)
    run.engine.close()
    assert nothing_leaks(run)


def test_half_a_document_stored_by_somebody_else_is_taken_over():
    # The second request begins while the first is in the middle of the document they share.
    requests = [
        make_request(0, text(HEAD, 4), document(0, 60), text(1, 3), output=2),
        make_request(1, text(HEAD, 7), document(0, 60), text(2, 3), output=2, at=3),
        make_request(2, document(0, 60), text(3, 3), output=2, at=APART),
    ]
    strategy = arm("pic", 16)
    rules = BatchRules(max_num_batched_tokens=23, max_num_seqs=2)
    run = start(make_small(), strategy, requests, rules=rules).serve(requests)
    assert run.records[1].reused_tokens % 16 == 0
    assert run.records[2].reused_tokens == 48
    assert wrong(run, strategy, *requests) < 1e-4
    assert nothing_leaks(run)


class FakeNode:
    """The fields of a node that its pages need."""

    def __init__(self, start: int, depth: int, parent: FakeNode | None = None) -> None:
        self.start, self.depth, self.parent = start, depth, parent

    def path(self):
        node = self
        while node is not None:
            yield node
            node = node.parent


def test_pages_go_with_their_tokens_when_an_edge_splits():
    given: list[int] = []
    pages = NodePages(4, given.extend)
    lower = FakeNode(0, 12)
    pages[lower] = np.array([7, 3, 9])
    upper = FakeNode(0, 4)
    lower.start, lower.parent = 4, upper
    pages.split(upper, lower)
    assert (pages[upper].tolist(), pages[lower].tolist()) == ([7], [3, 9])
    assert (pages.path(lower, 12).tolist(), pages.path(lower, 4).tolist()) == ([7, 3, 9], [7])
    pages.removed(lower)
    assert given == [3, 9]
    assert pages.all() == [7]


def test_an_unused_node_has_no_pages():
    given: list[int] = []
    pages = NodePages(4, given.extend)
    upper, lower = FakeNode(0, 4), FakeNode(4, 12)
    pages.split(upper, lower)
    assert upper not in pages
    pages.removed(lower)
    assert given == []


# -- States that run lie side by side, however many there are; stored ones do not lie among them. ---


def test_running_states_survive_growth_of_the_slab():
    pool = pool_of(KINDS[0])
    slots, rows = [], []
    for number in range(5):
        slots.append(begin(pool, number))
        rows.append(pool.slab.rows)
    assert rows == [2, 3, 5, 5, 9]  # the unused slot, and a power of two
    slab_rows = pool.rows(slots)
    assert len(set(slab_rows)) == 5 and PADDING_ROW not in slab_rows
    fresh = pool_of(KINDS[0])
    for number, slot in enumerate(slots):
        expected = begin(fresh, number)
        assert pool.recurrent(1, slot).equal(fresh.recurrent(1, expected))
        assert pool.slab.tensor("conv", 1)[slab_rows[number]].equal(fresh.conv(1, expected))
    assert not any(tensor.any() for tensor in pool.slab.row(PADDING_ROW).values())


def test_stored_states_take_no_row_of_those_that_run():
    pool = pool_of(KINDS[0])
    running, stored = pool.allocate_running(), pool.allocate()
    assert pool.used == 2
    pool.free([stored, running])
    assert pool.used == 0
    assert (pool.allocate_running(), pool.allocate()) == (running, stored)
    assert pool.slab.rows == 2
