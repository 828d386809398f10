"""Without a network the hub fails within seconds, and missing local inputs are reported first."""

import os
import re
import socket
import sys
from types import SimpleNamespace

import pytest

from spanlab import model_files
from spanlab.workloads import reading
from spanlab.workloads.files import SourceUnavailable

from .factories import load_workload

OFFLINE = "HF_HUB_OFFLINE"


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setattr(model_files, "getproxies", dict)
    monkeypatch.setenv(OFFLINE, "x")  # so that it is restored
    monkeypatch.delenv(OFFLINE)


def unknown(*address):
    raise socket.gaierror("Name or service not known")


def test_client_stays_offline_where_the_hub_has_no_address(monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    model_files.look_for_network()
    assert os.environ[OFFLINE] == "1"


def test_client_goes_online_where_the_hub_has_an_address(monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *address: [])
    model_files.look_for_network()
    assert OFFLINE not in os.environ


def test_a_proxy_counts_as_an_address(monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.setattr(model_files, "getproxies", lambda: {"https": "http://proxy:1"})
    model_files.look_for_network()
    assert OFFLINE not in os.environ


@pytest.mark.parametrize("kind", ["quality", "narrativeqa"])
def test_a_missing_tokenizer_is_reported_before_the_download(kind, monkeypatch):
    monkeypatch.setattr(reading, "hub_rows", lambda *given: pytest.fail("the download began"))
    with pytest.raises(SourceUnavailable, match=r"^workload\.tokenizer is not set"):
        load_workload(kind, "hub")


HUB_ROW = {"document": {"id": "n1", "text": "a story"}, "question": {"text": "who?"}, "answers": [{"text": "x"}]}


@pytest.mark.parametrize(
    ("broken", "problem"),
    [
        ({"document": None}, "document=null, not an object"),
        ({"document": {"id": 1, "text": "a"}}, "id=1, not a string"),
        ({"document": {"id": "n2"}}, "no field 'text'"),
        ({"question": {"text": None}}, "text=null, not a string"),
        ({"answers": ["x"]}, '"x" in answers, not an object'),
        ({"answers": [{"text": 2}]}, "text=2, not a string"),
    ],
)
def test_a_bad_row_of_the_hub_gets_its_sentence(monkeypatch, make_tokenizer, broken, problem):
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.setitem(sys.modules, "datasets", FakeDatasets([HUB_ROW, HUB_ROW | broken]))
    expected = re.escape("; expected rows with document{id, text}, question{text} and answers[{text}]")
    place = "workload.source=hub row 1 of deepmind/narrativeqa"
    with pytest.raises(ValueError, match=f"^{place} has {problem}{expected}$"):
        load_workload("narrativeqa", "hub", tokenizer=make_tokenizer())


def test_rows_of_the_hub_are_grouped_by_document(monkeypatch, make_tokenizer):
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    rows = [HUB_ROW, HUB_ROW | {"document": {"id": "n2", "text": "b"}}, HUB_ROW | {"question": {"text": "why?"}}]
    monkeypatch.setitem(sys.modules, "datasets", FakeDatasets(rows))
    requests = load_workload("narrativeqa", "hub", tokenizer=make_tokenizer("a b story who why x")).requests
    assert [request.group_id for request in requests] == [0, 0, 1]
    assert {request.answer for request in requests} == {"x"}


class FakeDatasets(SimpleNamespace):
    """The library of the hub, for one data set."""

    def __init__(self, rows):
        super().__init__(load_dataset=lambda *_, **__: rows, exceptions=SimpleNamespace(DatasetsError=OSError))
