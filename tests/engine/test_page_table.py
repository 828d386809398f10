"""Lists of page ids in one table: device and host have equal lists while lists grow and end."""

import numpy as np
import torch

from spanlab.engine.pages import PageList, PageTable, TransferBatch, append_to_each

CPU = torch.device("cpu")


def update(table: PageTable) -> None:
    transfer = TransferBatch(CPU)
    table.update(transfer)
    transfer.send()


def on_device(table: PageTable, pages: PageList) -> list[int]:
    update(table)
    return table.on_device[slice(pages.start, pages.start + len(pages))].tolist()


def test_the_device_follows_random_use():
    table, draw = PageTable(CPU), np.random.default_rng(0)
    lists: list[tuple[PageList, list[int]]] = []
    for _ in range(400):
        choice = int(draw.integers(5))
        if choice == 0 or not lists:
            ids = draw.integers(0, 1000, int(draw.integers(0, 40)))
            lists.append((PageList(table, ids), ids.tolist()))
        pages, truth = lists[int(draw.integers(len(lists)))]
        if choice == 1:
            more = draw.integers(0, 1000, int(draw.integers(0, 60)))
            pages.extend(more)
            truth += more.tolist()
        elif choice == 2 and truth:
            first = int(draw.integers(len(truth)))
            pages.replace(first, np.array([7]))
            truth[first] = 7
        elif choice == 3:
            ids = draw.integers(0, 1000, len(lists))
            append_to_each(table, [pages for pages, _ in lists], ids)
            for (_, expected), page_id in zip(lists, ids.tolist(), strict=True):
                expected.append(page_id)
        elif choice == 4:
            lists.remove((pages, truth))
            pages.free()
        for pages, expected in lists:
            assert pages.ids.tolist() == expected == on_device(table, pages)


def test_places_of_lists_that_left_are_used_again():
    table = PageTable(CPU)
    first = PageList(table, np.arange(20))
    places, start = len(table.ids), first.start
    first.free()
    for _ in range(50):
        again = PageList(table, np.arange(20))
        assert again.start == start
        again.free()
    assert len(table.ids) == places


def test_an_append_sends_only_new_pages():
    table = PageTable(CPU)
    pages = PageList(table, np.arange(20))
    update(table)
    append_to_each(table, [pages], np.array([99]))
    assert [len(places) for places in table._written] == [1]
    assert on_device(table, pages)[-1] == 99
