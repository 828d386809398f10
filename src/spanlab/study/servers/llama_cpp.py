"""llama.cpp's server for CPUs: the version of the preset `llama_cpp`, built from the source of a Python package."""

from __future__ import annotations

import math
from pathlib import Path

from spanlab.core.policies.named import POLICIES
from spanlab.core.request import UNLIMITED
from spanlab.settings.server import held_token_bytes
from spanlab.study.servers.base import LOOPBACK, SERVERS, EmbeddedServer, Launch, served_folder

_SERVER = Path(__file__).with_name("llama_server.py")
_UNIT = 256  # tokens; a slot's context has a multiple of it
_MIB_PER_GIB = 1024


@SERVERS.register("llama_cpp")
class LlamaCpp(EmbeddedServer):
    """llama.cpp of October 2026 (llama-cpp-python 0.3.36) for CPUs: slots of one sequence."""

    environment = "llama_cpp"
    version = "0c1e57098"
    policy = "slots"
    overrides = ("arms=presets", "only=[llama_cpp]", "baseline=llama_cpp")
    knows_salts = False

    def command(self, launch: Launch) -> list[str]:
        """Return the command of the server; the study's store is its context, in whole units of 256 tokens."""
        study = launch.study
        (arm,) = study.chosen()
        rules = POLICIES.schema(self.policy)(**study.arms[arm].options)
        options = {
            "alias": study.model.name,
            "host": LOOPBACK,
            "port": launch.port,
            "ctx-size": _context(launch, 1 if rules.kv_unified else rules.parallel, rules.parallel),
            "parallel": rules.parallel,
            "batch-size": study.batch.max_num_batched_tokens,
            "slot-prompt-similarity": rules.slot_prompt_similarity,
            "cache-reuse": rules.cache_reuse,
            "cache-ram": round(rules.cache_ram_gib * _MIB_PER_GIB),
        }
        given = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        flags = [
            "--kv-unified" if rules.kv_unified else "--no-kv-unified",
            "--cache-idle-slots" if rules.cache_idle_slots else "--no-cache-idle-slots",
        ]
        model = launch.folder / "model.gguf"
        words = [str(_SERVER), str(served_folder(study)), str(model), "--", *given, *flags]
        return ["python", "-I", *words, *study.server.arguments]


def _context(launch: Launch, parts: int, slots: int) -> int:
    """Return the tokens of all slots, in `parts` equal parts; without a limit, each slot takes the longest request."""
    budget = launch.study.store.budget
    limit = min(budget.total_bytes, budget.kv_bytes)
    unit = _UNIT * parts
    if limit >= UNLIMITED:
        return math.ceil(slots * launch.longest / unit) * unit
    return max(unit, limit // held_token_bytes(launch.study.model, launch.study.batch) // unit * unit)
