"""The hub without a network: its client would retry for half a minute before it says so."""

from __future__ import annotations

import os
import socket
from urllib.parse import urlsplit
from urllib.request import getproxies


def look_for_network() -> None:
    """Let the hub's client read its cache alone where the hub has no address; call before the client is imported."""
    host = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co")).hostname
    if "https" in getproxies():  # the proxy knows the address
        return
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
