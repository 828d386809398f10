"""Writes what vLLM's scheduler decides, as JSON lines, to the file that SPANLAB_STEP_LOG names.

Python imports a module of this name by itself, also in the process of the engine core, where the
folder is on PYTHONPATH. It runs in the environment of the server: standard library alone, nothing
of spanlab. The methods of the scheduler are wrapped when vLLM imports it; they decide as before.
Times are nanoseconds of CLOCK_MONOTONIC.
"""

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Method = Callable[..., Any]
SCHEDULER = "vllm.v1.core.sched.scheduler"
LOG = "SPANLAB_STEP_LOG"


class _Log:
    def __init__(self, path: str) -> None:
        self._file = open(path, "a", buffering=1)  # noqa: SIM115 - open until the process ends

    def write(self, event: str, **values: Any) -> None:
        self._file.write(json.dumps({"event": event, "at": time.monotonic_ns(), **values}) + "\n")


def _facts(scheduler: Any, config: Any, kv: Any) -> dict[str, Any]:
    import vllm

    batch, cache, drafts = config.scheduler_config, config.cache_config, config.speculative_config
    spans = {
        "SlidingWindowSpec": "sliding_window",
        "ChunkedLocalAttentionSpec": "attention_chunk_size",
    }
    groups = []
    for group in kv.kv_cache_groups:
        spec = group.kv_cache_spec
        kind = type(spec).__name__
        groups.append(
            {
                "kind": kind,
                "block_size": spec.block_size,
                "page_bytes": spec.page_size_bytes,
                "layers": len(group.layer_names),
                "span": getattr(spec, spans[kind]) if kind in spans else 0,
            }
        )
    return {
        "version": vllm.__version__,
        "scheduler": type(scheduler).__name__,
        "num_blocks": kv.num_blocks,
        "block_size": scheduler.block_size,
        "groups": groups,
        "max_num_seqs": batch.max_num_seqs,
        "max_num_batched_tokens": batch.max_num_batched_tokens,
        "max_model_len": config.model_config.max_model_len,
        "enable_chunked_prefill": bool(batch.enable_chunked_prefill),
        "long_prefill_token_threshold": batch.long_prefill_token_threshold,
        "policy": batch.policy,
        "async_scheduling": bool(batch.async_scheduling),
        "prefix_caching": bool(cache.enable_prefix_caching),
        "mamba_mode": cache.mamba_cache_mode,
        "retention": getattr(cache, "prefix_cache_retention_interval", None),
        "cuda_graphs": config.compilation_config.cudagraph_mode.name != "NONE",
        "draft_method": drafts.method if drafts else None,
        "draft_tokens": drafts.num_speculative_tokens if drafts else 0,
    }


def _watch(kind: Any, log: _Log) -> None:
    def wrapped(name: str) -> Callable[[Method], Method]:
        method = getattr(kind, name)

        def wrap(replacement: Method) -> Method:
            setattr(kind, name, functools.partialmethod(replacement, method))
            return replacement

        return wrap

    @wrapped("__init__")
    def _init(self: Any, method: Any, *args: Any, **options: Any) -> None:
        method(self, *args, **options)
        log.write("start", **_facts(self, self.vllm_config, self.kv_cache_config))

    @wrapped("add_request")
    def _add(self: Any, method: Any, request: Any) -> Any:
        log.write(
            "add",
            id=request.request_id,
            tokens=list(request.prompt_token_ids),
            output_len=request.max_tokens,
            priority=request.priority,
            salt=request.cache_salt,
        )
        return method(self, request)

    @wrapped("schedule")
    def _schedule(self: Any, method: Any, *args: Any, **options: Any) -> Any:
        began = time.monotonic_ns()
        plan = method(self, *args, **options)
        resumed = plan.scheduled_cached_reqs
        starts = zip(resumed.req_ids, resumed.num_computed_tokens, strict=True)
        again = set(resumed.resumed_req_ids)
        log.write(
            "plan",
            began=began,
            chunk_block_size=self.cache_config.block_size,  # of the moment: it changes after the start
            tokens=dict(plan.num_scheduled_tokens),
            reused={new.req_id: new.num_computed_tokens for new in plan.scheduled_new_reqs},
            resumed={request: computed for request, computed in starts if request in again},
            preempted=sorted(plan.preempted_req_ids or ()),
            drafts={
                request: len(ids) for request, ids in plan.scheduled_spec_decode_tokens.items()
            },
        )
        return plan

    @wrapped("update_from_output")
    def _update(self: Any, method: Any, plan: Any, output: Any) -> Any:
        sampled = output.sampled_token_ids
        ids = {
            request: list(map(int, sampled[at]))
            for request, at in output.req_id_to_index.items()
            if sampled
        }
        log.write(
            "done",
            began=time.monotonic_ns(),
            tokens={name: new for name, new in ids.items() if new},
        )
        return method(self, plan, output)

    @wrapped("finish_requests")
    def _finish(self: Any, method: Any, ids: Any, status: Any) -> Any:
        known = [ids] if isinstance(ids, str) else list(ids or self.requests)
        log.write("abort", ids=[request for request in known if request in self.requests])
        return method(self, ids, status)

    @wrapped("reset_prefix_cache")
    def _reset(self: Any, method: Any, *args: Any, **options: Any) -> Any:
        done = method(self, *args, **options)
        log.write("reset", done=bool(done))
        return done


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Any, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != SCHEDULER:
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            load(module)
            _watch(module.Scheduler, _Log(os.environ[LOG]))

        spec.loader.exec_module = exec_module
        return spec  # type: ignore[no-any-return]


if LOG in os.environ:
    sys.meta_path.insert(0, _Finder())
