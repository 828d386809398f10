"""Answers prompts by kvboost: python kvboost_worker.py FOLDER DTYPE THREADS, a JSON list of token ids a line.

It replies with a JSON line: seconds to the first token, tokens of the prompt that were reused. Settings are those of
kvboost itself: chunks of 128 tokens, reused by content, and its repair of seams.
"""

import json
import sys
import time
from functools import partial

import torch
from kvboost import KVBoost  # type: ignore[import-not-found]  # installed by measure.py
from transformers import AutoModelForCausalLM

CACHE_BYTES = 4 << 30


class Words:
    """A tokenizer whose texts are token ids, so that every system gets the same prompt."""

    def __init__(self, end: int) -> None:
        self.eos_token_id = self.pad_token_id = end

    def encode(self, text: str, **given: object) -> list[int]:
        """Return the ids of a text."""
        return [int(word) for word in text.split() if word.isdecimal()]

    def decode(self, ids: list[int], **given: object) -> str:
        """Return the text of ids."""
        return " ".join(map(str, ids))


def note(times: list[float], token: int) -> None:
    """Note the time of a token."""
    times.append(time.perf_counter())


def main() -> None:
    """Load the model and answer prompts until standard input closes."""
    folder, dtype, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    engine = KVBoost(model, Words(model.config.eos_token_id), max_cache_bytes=CACHE_BYTES, device="cpu")
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        prompt, firsts = " ".join(map(str, json.loads(line))), list[float]()
        began = time.perf_counter()
        result = engine.generate(prompt, max_new_tokens=1, on_token=partial(note, firsts))
        reply = {"seconds": firsts[0] - began, "reused": result.cached_tokens}
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
