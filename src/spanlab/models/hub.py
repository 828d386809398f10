"""Offline use of the hub: without a network its client would retry for half a minute before an error."""

from __future__ import annotations

import os
import socket
from urllib.parse import urlsplit
from urllib.request import getproxies


def look_for_network() -> None:
    """Set the hub's client to its cache only if the hub's host does not resolve; call before importing the client."""
    host = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co")).hostname
    if "https" in getproxies():  # the proxy resolves the address
        return
    try:
        socket.getaddrinfo(host, 443)
    except OSError:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
