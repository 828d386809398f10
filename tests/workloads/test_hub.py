"""Without a network the hub fails within seconds, and missing local inputs are reported first."""

import os
import socket

import pytest

from spanlab.models import hub
from spanlab.workloads import narrativeqa, quality
from spanlab.workloads.files import SourceUnavailable

from .factories import load_workload

OFFLINE = "HF_HUB_OFFLINE"


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    monkeypatch.setattr(hub, "getproxies", dict)
    monkeypatch.setenv(OFFLINE, "x")  # so that it is restored
    monkeypatch.delenv(OFFLINE)


def unknown(*address):
    raise socket.gaierror("Name or service not known")


def test_client_stays_offline_where_the_hub_has_no_address(monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    hub.look_for_network()
    assert os.environ[OFFLINE] == "1"


def test_client_goes_online_where_the_hub_has_an_address(monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *address: [])
    hub.look_for_network()
    assert OFFLINE not in os.environ


def test_a_proxy_knows_the_address(monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.setattr(hub, "getproxies", lambda: {"https": "http://proxy:1"})
    hub.look_for_network()
    assert OFFLINE not in os.environ


@pytest.mark.parametrize("module", [quality, narrativeqa], ids=["quality", "narrativeqa"])
def test_a_missing_tokenizer_is_told_before_the_download(module, monkeypatch):
    monkeypatch.setattr(module, "hub_rows", lambda *given: pytest.fail("the download began"))
    with pytest.raises(SourceUnavailable, match=r"^workload\.tokenizer is not set"):
        load_workload(module.__name__.rpartition(".")[2], "hub")
