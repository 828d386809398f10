"""A small OpenAI-compatible server for tests with a real cache: prints its port, then serves until it is terminated.

Its model has two attention layers and a recurrent one. Rows of keys and values lie in blocks of a pool that prompts
share, and each full block has the recurrent state after its last token. A scheduler computes prompts in chunks, decodes
all running requests, evicts unused blocks and preempts the newest request. Its argument is JSON with options:
block, blocks (of the pool), chunk (tokens), noise (of logits), step (logits are rounded to it), drafts, salts, cached,
metrics (whether they work), ids (whether tokens are reported by id), decoded (whether blocks of answers are shared),
dies_after (requests), gate (number of a request that waits for others, how many are computed together, and the output
tokens from which a request counts), and fault, one of

stale_block        a block that was evicted is still found, with its new content
early_state        the stored state of a block lacks its last token
shifted            positions after a reused prefix are one too large
whole_prompt       the state of a prompt that is cached entirely takes its last token twice
decoded            blocks that decoding completes lack their last row
published_early    blocks are shared before they are computed
chunk_position     positions in every later chunk of a prompt are one larger
resumed            positions after a preemption are one too large
unverified         drafts are accepted as they are
"""

import json
import os
import sys
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np

OPTIONS = {"block": 8, "blocks": 400, "chunk": 64, "noise": 0.0, "drafts": False, "salts": True, "cached": True}
OPTIONS |= {"metrics": True, "ids": True, "dies_after": None, "gate": None, "step": None, "fault": None}
OPTIONS |= {"port": 0, "decoded": True}
OPTIONS |= json.loads(sys.argv[1])
BLOCK, FAULT = OPTIONS["block"], OPTIONS["fault"]
VOCAB, WIDTH = 2048, 12


class Model:
    """Log-probabilities of the next token, from rows of all earlier tokens and a recurrent state."""

    def __init__(self) -> None:
        draw = np.random.default_rng(5)
        self.embedding = draw.normal(size=(VOCAB, WIDTH))
        self.layers = draw.normal(size=(2, 3, WIDTH, WIDTH)) / np.sqrt(WIDTH)
        self.recurrent = np.linalg.qr(draw.normal(size=(WIDTH, WIDTH)))[0] * 0.9
        self.output = draw.normal(size=(WIDTH, VOCAB)) * 0.6
        self.frequencies = 1 / 3.0 ** np.arange(WIDTH // 2)
        self.noise = np.random.default_rng(6)

    def step(self, token: int, position: int, rows: np.ndarray, row: np.ndarray, state: np.ndarray) -> np.ndarray:
        """Write the row of a token, change the state, and return the hidden vector; `rows` has those before."""
        angles = position * self.frequencies
        hidden = self.embedding[token] + np.concatenate([np.sin(angles), np.cos(angles)])
        for layer, (query, key, value) in enumerate(self.layers):
            row[layer] = key @ hidden, value @ hidden
            keys = np.concatenate([rows[:, layer, 0], row[None, layer, 0]])
            values = np.concatenate([rows[:, layer, 1], row[None, layer, 1]])
            scores = keys @ (query @ hidden)
            weights = np.exp(scores - scores.max())
            hidden = hidden + weights @ values / weights.sum()
        state[:] = np.tanh(self.recurrent @ state + hidden)
        return hidden

    def logprobs(self, hidden: np.ndarray, state: np.ndarray) -> np.ndarray:
        logits = (hidden / 2 + state) @ self.output
        logits = logits + OPTIONS["noise"] * self.noise.normal(size=VOCAB)
        if OPTIONS["step"] is not None:
            logits = np.round(logits / OPTIONS["step"]) * OPTIONS["step"]
        return logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())


@dataclass(eq=False)
class Sequence:
    """A request; `computed` of its tokens have rows in `table`."""

    tokens: list[int]
    end: int
    salt: str
    top: int
    prompt: int = 0
    computed: int = 0
    table: list[int] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)
    state: np.ndarray = field(default_factory=lambda: np.zeros(WIDTH))
    shift: int = 0
    cached: int | None = None
    generated: list[dict] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)


class Engine:
    """One scheduler, one pool of blocks."""

    def __init__(self) -> None:
        self.model, self.work = Model(), threading.Condition()
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.added, self.followed = 0, dict[int, int]()  # the token that last followed a token in an answer
        self.counts = {"num_preemptions_total": 0}
        if OPTIONS["drafts"]:
            self.counts |= {"spec_decode_num_draft_tokens_total": 0, "spec_decode_num_accepted_tokens_total": 0}
        self.empty()

    def empty(self) -> None:
        count = OPTIONS["blocks"]
        self.rows, self.states = np.zeros((count, BLOCK, 2, 2, WIDTH)), np.zeros((count, WIDTH))
        self.uses, self.owner = [0] * count, [None] * count
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(count))
        self.blocks: dict[int, int] = {}

    def serve(self) -> None:
        while True:
            with self.work:
                self.work.wait_for(lambda: (self.waiting or self.running) and not self.gated())
                self.admit()
                for sequence in list(self.running):
                    if sequence in self.running:
                        self.advance(sequence)

    def add(self, sequence: Sequence) -> None:
        with self.work:
            sequence.prompt = len(sequence.tokens)
            self.waiting.append(sequence)
            _, _, least = OPTIONS["gate"] or (0, 0, 0)
            self.added += sequence.end - sequence.prompt >= least
            self.work.notify()
        sequence.done.wait()

    def gated(self) -> bool:
        """Whether requests wait until all of them have arrived."""
        first, count, _ = OPTIONS["gate"] or (0, 0, 0)
        return first < self.added < first + count

    def admit(self) -> None:
        while self.waiting:
            sequence = self.waiting[0]
            hits = self.match(sequence)
            missing = -(-(len(sequence.tokens) + 1) // BLOCK) - len(hits)
            if len(self.free) - sum(not self.uses[block] for block in hits) < missing and self.running:
                return
            for block in hits:
                self.take(block)
            self.waiting.pop(0)
            self.running.append(sequence)
            sequence.table, sequence.computed = hits, len(hits) * BLOCK
            sequence.state = self.states[hits[-1]].copy() if hits else np.zeros(WIDTH)
            if sequence.computed == len(sequence.tokens):  # fault whole_prompt
                sequence.computed -= 1
            if sequence.cached is None:
                sequence.cached = sequence.computed
                sequence.shift = int(FAULT == "shifted" and bool(hits))
            elif FAULT == "resumed":
                sequence.shift = 1
            self.publish(sequence) if FAULT == "published_early" else None

    def match(self, sequence: Sequence) -> list[int]:
        """Blocks of the longest cached prefix; the last token is computed in any case."""
        tokens, hits = sequence.tokens, []
        sequence.hashes = [hash(sequence.salt if OPTIONS["salts"] else "")]
        for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
            sequence.hashes.append(hash((sequence.hashes[-1], *tokens[start : start + BLOCK])))
        most = (len(tokens) - (FAULT != "whole_prompt")) // BLOCK
        for key in sequence.hashes[1 : most + 1]:
            if key not in self.blocks:
                break
            hits.append(self.blocks[key])
        return hits

    def take(self, block: int) -> None:
        self.uses[block] += 1
        self.free.pop(block, None)

    def new_block(self) -> int | None:
        if not self.free:
            return None
        block, _ = self.free.popitem(last=False)
        if self.owner[block] is not None and FAULT != "stale_block":
            del self.blocks[self.owner[block]]
        self.owner[block], self.uses[block] = None, 1
        return block

    def release(self, sequence: Sequence) -> None:
        for block in reversed(sequence.table):
            self.uses[block] -= 1
            if not self.uses[block]:
                self.free[block] = None
        sequence.table = []
        self.running.remove(sequence)

    def reserve(self, sequence: Sequence) -> bool:
        """Allocate the block of the next token; preempt the newest request if there is none."""
        while len(sequence.table) <= sequence.computed // BLOCK:
            if (block := self.new_block()) is not None:
                sequence.table.append(block)
                continue
            victim = self.running[-1]
            self.release(victim)
            self.waiting.insert(0, victim)
            self.counts["num_preemptions_total"] += 1
            if victim is sequence:
                return False
        return True

    def advance(self, sequence: Sequence) -> None:
        """Compute a chunk of the prompt, or decode a token."""
        end = min(len(sequence.tokens), sequence.computed + OPTIONS["chunk"])
        if FAULT == "chunk_position" and sequence.cached < sequence.computed < sequence.prompt:
            sequence.shift += 1
        hidden = None
        while sequence.computed < end:
            if not self.reserve(sequence):
                return
            hidden = self.compute(sequence)
        if sequence.computed == len(sequence.tokens):
            self.sample(sequence, self.model.logprobs(hidden, sequence.state))

    def compute(self, sequence: Sequence) -> np.ndarray:
        at = sequence.computed
        block, offset = sequence.table[at // BLOCK], at % BLOCK
        rows = self.rows[sequence.table].reshape(-1, 2, 2, WIDTH)[:at]
        row, before = np.zeros((2, 2, WIDTH)), sequence.state.copy()
        hidden = self.model.step(sequence.tokens[at], at + sequence.shift, rows, row, sequence.state)
        last = offset == BLOCK - 1
        self.rows[block, offset] = 0 if FAULT == "decoded" and last and at >= sequence.prompt else row
        sequence.computed += 1
        if last:
            self.states[block] = before if FAULT == "early_state" else sequence.state
            if OPTIONS["decoded"] or at < sequence.prompt:
                self.publish(sequence, at // BLOCK + 1)
        return hidden

    def publish(self, sequence: Sequence, count: int | None = None) -> None:
        """Share the full blocks; without a count, those of the whole prompt before they are computed."""
        if count is None:
            count = len(sequence.hashes) - 1
            while len(sequence.table) < count and (block := self.new_block()) is not None:
                self.rows[block], self.states[block] = 0, 0
                sequence.table.append(block)
        while len(sequence.hashes) <= count:
            start = (len(sequence.hashes) - 1) * BLOCK
            sequence.hashes.append(hash((sequence.hashes[-1], *sequence.tokens[start : start + BLOCK])))
        for key, block in list(zip(sequence.hashes[1:], sequence.table, strict=False))[:count]:
            if key not in self.blocks:
                self.blocks[key], self.owner[block] = block, key

    def sample(self, sequence: Sequence, logprobs: np.ndarray) -> None:
        token = int(logprobs.argmax())
        if sequence.drafts:
            draft = sequence.drafts.pop(0)
            self.counts["spec_decode_num_draft_tokens_total"] += 1
            if FAULT == "unverified":
                token = draft
            self.counts["spec_decode_num_accepted_tokens_total"] += token == draft
            sequence.drafts = sequence.drafts if token == draft else []
        best = np.argsort(-logprobs)[: sequence.top]
        sequence.generated.append({"token": token, "top": {int(b): float(logprobs[b]) for b in (*best, token)}})
        sequence.tokens.append(token)
        if len(sequence.tokens) == sequence.end:
            self.release(sequence)
            sequence.done.set()
        elif OPTIONS["drafts"] and not sequence.drafts and token in self.followed:
            sequence.drafts = [self.followed[token], 1]  # the second is wrong
        self.followed[sequence.tokens[-2]] = token


ENGINE, RECEIVED = Engine(), []


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or each reply waits 40 ms for an acknowledgement

    def log_message(self, *arguments: object) -> None:
        """Log nothing."""

    def do_GET(self) -> None:
        if self.path == "/metrics" and OPTIONS["metrics"]:
            lines = [f'vllm:{name}{{engine="0"}} {float(value)}' for name, value in ENGINE.counts.items()]
            labels = f'block_size="{BLOCK}",num_gpu_blocks="{OPTIONS["blocks"]}"'
            lines.append(f"vllm:cache_config_info{{{labels}}} 1.0")
            self._send(200, "\n".join(["# TYPE of metrics", *lines, ""]).encode())
        elif self.path == "/received":
            self._send(200, json.dumps(RECEIVED).encode())
        else:
            known = self.path == "/v1/models"
            self._send(200 if known else 404, json.dumps({"data": [{"id": "toy"}]} if known else {}).encode())

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path == "/reset":
            with ENGINE.work:
                ENGINE.empty()
            self._send(200, b"{}")
            return
        body = json.loads(data)
        RECEIVED.append(body)
        if OPTIONS["dies_after"] is not None and len(RECEIVED) > OPTIONS["dies_after"]:
            os._exit(0)
        prompt, count = body["prompt"], body["max_tokens"]
        sequence = Sequence(list(prompt), len(prompt) + count, body.get("cache_salt", ""), body["logprobs"])
        if -(-sequence.end // BLOCK) > OPTIONS["blocks"] or max(prompt) >= VOCAB:
            self._send(400, json.dumps({"error": {"message": "too long or too large for me"}}).encode())
            return
        ENGINE.add(sequence)
        self._send(200, json.dumps(self._reply(sequence)).encode())

    def _reply(self, sequence: Sequence) -> dict:
        def spelled(token: int) -> str:
            return f"token_id:{token}" if OPTIONS["ids"] else f"w{token}"

        tops = [{spelled(token): value for token, value in each["top"].items()} for each in sequence.generated]
        tokens = [spelled(each["token"]) for each in sequence.generated]
        values = [top[token] for token, top in zip(tokens, tops, strict=True)]
        details = {"cached_tokens": sequence.cached} if OPTIONS["cached"] and sequence.cached else None
        usage = {"prompt_tokens": sequence.prompt, "completion_tokens": len(tokens), "prompt_tokens_details": details}
        logprobs = {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": [0] * len(tokens)}
        return {"id": "1", "choices": [{"index": 0, "text": "", "logprobs": logprobs}], "usage": usage}

    def _send(self, code: int, data: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class Server(ThreadingHTTPServer):
    request_queue_size = 256
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore clients that disconnect."""


if __name__ == "__main__":
    threading.excepthook = lambda error: (sys.__excepthook__(*error[:3]), os._exit(1))
    threading.Thread(target=ENGINE.serve, daemon=True).start()
    server = Server(("127.0.0.1", OPTIONS["port"]), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()
