"""What a running server tells of its cache: KV events by ZeroMQ, earlier events again, and the
counters of /metrics."""

from __future__ import annotations

import re
import socket
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import httpx

from spanlab.workloads.logs.kv_events import HITS, QUERIES

# ------------------------------------------------------------------------------
# Addresses.
# ------------------------------------------------------------------------------

_TCP = re.compile(r"tcp://(\[[^\]]+\]|[^:/\[\]]+):(\d+)")


def host_and_port(address: str) -> tuple[str, int] | None:
    """Return host and port of tcp://HOST:PORT; None for any other text."""
    match = _TCP.fullmatch(address)
    return None if match is None else (match[1], int(match[2]))


def _parts(address: str) -> tuple[str, int]:
    parts = host_and_port(address)
    assert parts is not None, "the settings let no other address pass"
    return parts


def of_rank(address: str, rank: int) -> str:
    """Return the address of a data-parallel rank: vLLM adds the rank to the port."""
    host, port = _parts(address)
    return f"tcp://{host}:{port + rank if port else 0}"


# ------------------------------------------------------------------------------
# The stream: a ZeroMQ subscription, and messages that the server sends again.
# ------------------------------------------------------------------------------

_QUEUED = 100_000  # messages that wait while counters are read; vLLM's publisher queues as many
_END = (1 << 64) - 1  # number of the message that ends a repetition
NUMBER_BYTES = 8
_REACHABLE_S = 3.0
Frames = list[bytes]


class Subscription:
    """The socket on which messages arrive; `publishers` are connected now, `ever` says whether any
    was.

    Raises ValueError for an address that is in use, or where nothing listens.
    """

    def __init__(self, addresses: Sequence[str], binds: bool, topic: str) -> None:
        import zmq

        self.publishers, self.ever = 0, False
        self._context: Any = zmq.Context()
        self._socket: Any = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.RCVHWM, _QUEUED)
        self._socket.setsockopt(zmq.IPV6, int("[" in addresses[0]))
        self._socket.setsockopt_string(zmq.SUBSCRIBE, topic)
        self._monitor: Any = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        try:
            for address in addresses:
                self._open(address, binds)
        except ValueError:
            self.close()
            raise
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._poller: Any = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)

    def _open(self, address: str, binds: bool) -> None:
        import zmq

        try:
            if binds:
                self._socket.bind(address)
                return
            host, port = _parts(address)
            with socket.create_connection((host.strip("[]"), port), _REACHABLE_S):
                self._socket.connect(address)
        except zmq.ZMQError as error:
            in_use = (
                "; where the server listens there itself, socket=connect"
                if error.errno == zmq.EADDRINUSE
                else ""
            )
            raise ValueError(
                f"events={address}: expected an address to bind, but {zmq.strerror(error.errno or 0)}{in_use}"
            ) from error
        except OSError as error:
            bind = "where the server connects to this address, socket=bind"
            raise ValueError(
                f"events={address}: expected a server that publishes there, but {error.strerror or error}; {bind}"
            ) from error

    def receive(self, wait_s: float) -> Frames | None:
        """Return the next message, or None if none comes in time."""
        from zmq.utils.monitor import recv_monitor_message

        ready = dict(self._poller.poll(int(1000 * wait_s)))
        if self._monitor in ready:
            import zmq

            event = recv_monitor_message(self._monitor)["event"]
            joined = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            self.publishers, self.ever = (
                max(self.publishers + (1 if joined else -1), 0),
                self.ever or joined,
            )
        return self._socket.recv_multipart() if self._socket in ready else None

    def close(self) -> None:
        """Close the sockets, and give up messages that were not read."""
        self._socket.disable_monitor()
        self._context.destroy(linger=0)


class Repetition:
    """Asks a server for messages again, at the address of `replay`; `complete` says whether all of
    them came."""

    def __init__(self, address: str) -> None:
        self._address, self.complete = address, False

    def messages(self, rank: int, first: int) -> Iterator[Frames]:
        """Yield topic, number and payload of the messages from number `first` on that the server
        still has."""
        import zmq

        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.connect(of_rank(self._address, rank))
            dealer.send_multipart([b"", first.to_bytes(NUMBER_BYTES, "big")])
            while dealer.poll(int(1000 * _REACHABLE_S)):
                frames = dealer.recv_multipart()[-3:]
                if len(frames) != 3 or int.from_bytes(frames[1], "big") == _END:
                    self.complete = True
                    return
                yield frames


# ------------------------------------------------------------------------------
# Counters of the server: /metrics in the text format of Prometheus.
# ------------------------------------------------------------------------------

_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+\d+)?$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_LARGEST_REPLY = 1 << 24
#: Names in vLLM's /metrics; the first one is today's.
_NAMES = {
    QUERIES: ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_queries"),
    HITS: ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_hits"),
    "generated": ("vllm:generation_tokens_total", "vllm:generation_tokens"),
    "running": ("vllm:num_requests_running",),
    "waiting": ("vllm:num_requests_waiting",),
    "in_use": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
}
_SHARES = ("in_use",)  # a mean over engines; the others are sums
_CONFIG = "vllm:cache_config_info"


def read_metrics(text: str) -> dict[str, float]:
    """Return the values of a reply of /metrics that are known, summed over engines; `blocks`: size
    of the cache."""
    values, engines, config = Counter[str](), Counter[str](), dict[str, float]()
    for line in text.splitlines():
        sample = None if line.startswith("#") else _SAMPLE.match(line)
        if sample is None:
            continue
        try:
            value = float(sample[3])
        except ValueError:
            continue
        values[sample[1]] += value  # type: ignore[assignment]  # a Counter adds floats too
        engines[sample[1]] += 1
        if sample[1] == _CONFIG:
            labels = dict(_LABEL.findall(sample[2] or ""))
            for name, label in (("blocks", "num_gpu_blocks"), ("block_size", "block_size")):
                if labels.get(label, "").isdecimal():
                    config[name] = float(labels[label]) + (
                        config.get(name, 0.0) if name == "blocks" else 0.0
                    )
    for key, names in _NAMES.items():
        for served in [name for name in names if name in values][:1]:
            config[key] = values[served] / (engines[served] if key in _SHARES else 1)
    return config


class Metrics:
    """Reads /metrics of a server; `last` is the latest reading."""

    def __init__(self, base_url: str, silence_s: float) -> None:
        parts = urlsplit(base_url.rstrip("/"))
        self.base_url, self.last, self.problem = base_url, dict[str, float](), ""
        self._url = str(
            urlunsplit(parts._replace(path=f"{parts.path.removesuffix('/v1')}/metrics"))
        )
        self._client = httpx.Client(timeout=min(silence_s, _REACHABLE_S), trust_env=False)
        self._failing_since: float | None = None

    def read(self) -> dict[str, float] | None:
        """Return a reading; None, if the server does not answer."""
        try:
            with self._client.stream("GET", self._url) as reply:
                reply.raise_for_status()
                body = bytearray()
                for data in reply.iter_bytes():
                    body += data
                    if len(body) > _LARGEST_REPLY:
                        raise httpx.DecodingError(
                            f"the reply is longer than {_LARGEST_REPLY:,} bytes"
                        )
        except httpx.HTTPError as error:
            self.problem = str(error) or type(error).__name__
            self._failing_since = self._failing_since or time.monotonic()
            return None
        self._failing_since, self.last = None, read_metrics(body.decode(errors="replace"))
        return self.last

    def check(self) -> None:
        """Raise ValueError where the first reading fails, or has no counters of a prefix cache."""
        expected = f"base_url={self.base_url}: expected a running vLLM server with {self._url}"
        if self.read() is None:
            raise ValueError(f"{expected}, but {self.problem}")
        if not {QUERIES, HITS} <= self.last.keys():
            raise ValueError(f"{expected}, but the reply has no {_NAMES[QUERIES][0]}")

    @property
    def silent_s(self) -> float:
        """Seconds since the first of the readings that failed without an answer in between."""
        return 0.0 if self._failing_since is None else time.monotonic() - self._failing_since

    def close(self) -> None:
        """Close the connection."""
        self._client.close()
