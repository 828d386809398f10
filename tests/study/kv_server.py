"""A small server for tests: publishes given KV events by ZeroMQ, repeats them, and answers /metrics, on loopback."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgpack
import zmq

END = (1 << 64) - 1
METRICS = """\
# HELP vllm:prefix_cache_queries_total Prefix cache queries, in terms of number of queried tokens.
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{{engine="0",model_name="toy"}} {queries}
vllm:prefix_cache_queries_created{{engine="0",model_name="toy"}} 1.7e+09
vllm:prefix_cache_hits_total{{engine="0",model_name="toy"}} {hits}
vllm:generation_tokens_total{{engine="0",model_name="toy"}} 12.0
vllm:num_requests_running{{engine="0",model_name="toy"}} 1.0
vllm:num_requests_waiting{{engine="0",model_name="toy"}} 2.0
vllm:kv_cache_usage_perc{{engine="0",model_name="toy"}} 0.25
vllm:cache_config_info{{block_size="16",engine="0",num_gpu_blocks="64",num_cpu_blocks="None"}} 1.0
"""


class KvServer:
    """Publishes `batches` with the numbers `sent` to each new subscriber; the repetition has all of them.

    `address`  of a subscriber that binds; empty: this server binds
    After the first reading of the counters, /metrics has these values of queries and hits.
    """

    def __init__(self, batches: list[Any], sent: list[int], queries: int = 0, hits: int = 0, address: str = "") -> None:
        self.batches, self.sent, self.counts = batches, sent, [(0, 0), (queries, hits)]
        self._ended = threading.Event()
        self._context = zmq.Context()
        self._publisher, self._router = self._context.socket(zmq.XPUB), self._context.socket(zmq.ROUTER)
        if address:
            self._publisher.connect(address)
            self.events = address
        else:
            self.events = f"tcp://127.0.0.1:{self._publisher.bind_to_random_port('tcp://127.0.0.1')}"
        self.replay = f"tcp://127.0.0.1:{self._router.bind_to_random_port('tcp://127.0.0.1')}"
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.base_url = f"http://127.0.0.1:{self._http.server_port}"
        self._threads = [threading.Thread(target=self._serve_events), threading.Thread(target=self._http.serve_forever)]
        for thread in self._threads:
            thread.start()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *arguments: object) -> None:
                """Log nothing."""

            def do_GET(self) -> None:
                queries, hits = server.counts.pop(0) if len(server.counts) > 1 else server.counts[0]
                body = METRICS.format(queries=queries, hits=hits).encode() if self.path == "/metrics" else b"none"
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        return Handler

    def _frames(self, number: int) -> list[bytes]:
        batch = self.batches[number]
        return [b"kv", number.to_bytes(8, "big"), batch if isinstance(batch, bytes) else msgpack.packb(batch)]

    def _serve_events(self) -> None:
        poller = zmq.Poller()
        poller.register(self._publisher, zmq.POLLIN)
        poller.register(self._router, zmq.POLLIN)
        while not self._ended.is_set():
            ready = dict(poller.poll(50))
            if self._publisher in ready and self._publisher.recv()[:1] == b"\x01":
                for number in self.sent:
                    self._publisher.send_multipart(self._frames(number))
            if self._router in ready:
                identity, empty, first = self._router.recv_multipart()
                for number in range(int.from_bytes(first, "big"), len(self.batches)):
                    self._router.send_multipart([identity, empty, *self._frames(number)])
                self._router.send_multipart([identity, empty, b"", END.to_bytes(8, "big"), b""])
        self._context.destroy(linger=0)

    def stop(self) -> None:
        """End the server, if it runs; every thread of it has ended afterwards."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._http.shutdown()
        self._http.server_close()
        for thread in self._threads:
            thread.join()
