"""Runs vLLM's own scheduler and KV-cache manager over cases: no model, no GPU, nothing of spanlab.

usage: PYTHON_OF_VLLM vllm_driver.py CASES.json OUT.json

Both files have the formats of the entry `schedule`. A step ends where its output tokens are given.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import deque
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, resolve_kv_cache_block_sizes
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

LONGEST = 131_072
CHOICES = ("policy", "long_prefill_token_threshold", "long_prefill_token_threshold_adaptive")
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 200_000,
    "max_position_embeddings": 2 * LONGEST,
    "torch_dtype": "bfloat16",
}


def state_width(case: dict) -> int:
    """Tokens that one block of states stands for."""
    return LONGEST if case["mamba_mode"] == "none" else case["block_size"]


def cache_config(case: dict) -> CacheConfig:
    """The cache's settings; states are as wide as a block, or as the longest request where prefixes are not cached."""
    options = {"block_size": case["block_size"], "enable_prefix_caching": case.get("prefix_caching", True)}
    if case.get("mamba_mode"):
        options |= {"mamba_cache_mode": case["mamba_mode"], "mamba_block_size": state_width(case)}
    if case.get("retention") is not None:
        options["prefix_cache_retention_interval"] = case["retention"]
    return CacheConfig(**options)


def state_spec(case: dict) -> MambaSpec:
    """A group of recurrent layers."""
    inner = {"num_prefill_checkpoint_blocks": 1, "prefill_checkpoint_alignment": case["block_size"]}
    return MambaSpec(
        block_size=state_width(case),
        shapes=((4, 16, 16),),
        dtypes=(torch.float32,),
        mamba_cache_mode=case["mamba_mode"],
        num_speculative_blocks=case.get("draft_tokens", 0),
        **(inner if case.get("inner_states") else {}),
    )


def groups(case: dict, ahead: int) -> list[KVCacheGroupSpec]:
    """The groups of the case; without any, full attention and, in a hybrid, `state_groups` of recurrent layers.

    `ahead`  tokens that a drafter reads ahead; windows keep those that it may write again, as vLLM's workers tell
    """
    states = [{"kind": "state", "count": case.get("state_groups", 1)}] if case.get("mamba_mode") else []
    has_drafter = case.get("draft_method", "ngram") != "ngram"  # its layers are in the group of full attention
    made: list[KVCacheGroupSpec] = []
    for group in case.get("groups") or [{"kind": "full"}, *states]:
        kind, span = group["kind"], group.get("span")
        sizes = {"block_size": group.get("block_size") or case["block_size"], "dtype": torch.bfloat16}
        sizes |= {"num_kv_heads": 2, "head_size": 16}
        for _ in range(group.get("count", 1)):
            if kind == "state":
                spec = state_spec(case)
            elif kind == "window":
                spec = SlidingWindowSpec(**sizes, sliding_window=span, extra_retained_tokens=max(0, ahead - 1))
            elif kind == "chunk":
                spec = ChunkedLocalAttentionSpec(**sizes, attention_chunk_size=span)
            else:
                spec = (CircularBufferSpec if kind == "ring" else FullAttentionSpec)(**sizes)
            drafts = kind == "full" and has_drafter
            made.append(KVCacheGroupSpec([f"{kind} {len(made)}"], spec, is_eagle_group=drafts))
    return made


def speculation(case: dict) -> SpeculativeConfig | None:
    """Drafts from the prompt's own n-grams: no model, and no memory beyond that of the drafts.

    Under the name of EAGLE, which needs a drafter's model to be made, the same drafts take the memory of a drafter.
    With async scheduling, n-grams are looked up on the card: the only drafter of n-grams that vLLM then takes.
    """
    if not case.get("draft_tokens"):
        return None
    made = SpeculativeConfig(
        method="ngram", num_speculative_tokens=case["draft_tokens"], prompt_lookup_max=2, prompt_lookup_min=1
    )
    made.method = case.get("draft_method", "ngram")
    if made.method == "ngram" and case.get("async_scheduling"):
        made.method = "ngram_gpu"
    return made


def make_scheduler(case: dict) -> tuple[Scheduler, int]:
    """A scheduler over a pool of `num_blocks` blocks, and the tokens of a hashed block."""
    chunked = case.get("enable_chunked_prefill", True)
    longest = LONGEST if chunked else case["max_num_batched_tokens"]  # no request may be longer than a step
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODEL))
        model = ModelConfig(
            model=folder, tokenizer=folder, skip_tokenizer_init=True, dtype="bfloat16", max_model_len=longest
        )
    batch = SchedulerConfig(
        max_num_seqs=case["max_num_seqs"],
        max_num_batched_tokens=case["max_num_batched_tokens"],
        max_model_len=longest,
        enable_chunked_prefill=chunked,
        is_encoder_decoder=False,
        async_scheduling=case.get("async_scheduling", False),
        **{key: case[key] for key in CHOICES if key in case},
    )
    config = VllmConfig(
        model_config=model,
        scheduler_config=batch,
        cache_config=cache_config(case),
        device_config=DeviceConfig(device="cpu"),
        parallel_config=ParallelConfig(),
        speculative_config=speculation(case),
    )
    batch.async_scheduling = case.get("async_scheduling", False)  # a processor's platform switches it off
    if case.get("draft_modules", 1) > 1:
        config.speculative_config.method = "mtp"
        drafter = SimpleNamespace(num_nextn_predict_layers=case["draft_modules"])
        config.speculative_config.draft_model_config = SimpleNamespace(hf_config=drafter)
    config.cache_config.block_size = case["block_size"]
    config.cache_config.num_gpu_blocks = case["num_blocks"]
    if case.get("mamba_mode"):
        config.cache_config.mamba_cache_mode = case["mamba_mode"]
        config.cache_config.mamba_block_size = state_width(case)
    kept = {}
    if case.get("retention") is not None:
        kept["prefix_cache_retention_interval"] = case["retention"]
    kv = KVCacheConfig(case["num_blocks"], [], groups(case, config.num_prefill_lookahead_tokens), **kept)
    size, hashed = resolve_kv_cache_block_sizes(kv, config)
    kind = AsyncScheduler if case.get("async_scheduling") else Scheduler
    scheduler = kind(config, kv, StructuredOutputManager(config), size, hash_block_size=hashed)
    return scheduler, hashed


def output_of(request: Request, drafts: int) -> list[int]:
    """The next tokens of a request that has computed all its tokens: one, and the drafts that hold."""
    made = request.num_tokens - request.num_prompt_tokens
    kept = (5 * int(request.request_id) + 3 * made) % (drafts + 1)
    return [7 + at % 13 for at in range(made, made + 1 + kept)]


def complete(scheduler: Scheduler, out: SchedulerOutput, sampled: dict[str, bool]) -> None:
    """Give a planned step its output tokens; a request that was preempted meanwhile gets its own, too."""
    ids = list(out.num_scheduled_tokens)
    drafted = out.scheduled_spec_decode_tokens
    made = ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={request: at for at, request in enumerate(ids)},
        sampled_token_ids=[
            output_of(scheduler.requests[one], len(drafted.get(one, ())))
            if sampled[one] and one in scheduler.requests  # the output of an aborted request is dropped
            else []
            for one in ids
        ],
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
    )
    scheduler.update_from_output(out, made)


def drive(case: dict) -> dict:
    """Every decision of one case.

    With async scheduling a step is planned while the one before is under way, as vLLM's engine does with a queue of
    two. A plan that has nothing to do but to wait for that one is not counted. Drafts are then placeholders of the
    scheduler's own, whose ids the worker knows; without it, the engine hands over the drafts of each step.
    """
    try:
        scheduler, hashed = make_scheduler(case)
    except ValueError as error:  # of vLLM's own check of its settings
        return {"refused": str(error)}
    drafts = case.get("draft_tokens", 0)
    if drafts:
        # A prompt with one token left gets placeholder rows for CUDA graphs, none of which holds: left out here and
        # there. vLLM has none where the number of drafts may depend on the batch; here it is the same for each.
        scheduler.dynamic_sd_lookup = [drafts] * (case["max_num_seqs"] + 1)
    init_none_hash(sha256)
    ahead_of_block = getattr(scheduler, "num_hash_lookahead_tokens", 0)  # since 0.33
    hasher = get_request_block_hasher(hashed, sha256, *([ahead_of_block] if ahead_of_block else []))
    given = case["requests"]
    coming = sorted(range(len(given)), key=lambda at: (given[at].get("arrive_step", 0), at))
    steps: list[dict[str, int]] = []
    reused: dict[str, int] = {}
    preemptions = 0
    under_way: deque[tuple[SchedulerOutput, dict[str, bool]]] = deque()
    ahead = int(case.get("async_scheduling", False))
    while coming or scheduler.has_unfinished_requests():
        while coming and given[coming[0]].get("arrive_step", 0) <= len(steps):
            at = coming.pop(0)
            asked = SamplingParams(max_tokens=given[at]["output_len"], ignore_eos=True)
            tokens = given[at]["tokens"]
            salt = given[at].get("cache_salt")
            order = {"priority": given[at].get("priority", 0), "arrival_time": float(len(given) - len(coming))}
            scheduler.add_request(Request(str(at), tokens, asked, None, cache_salt=salt, block_hasher=hasher, **order))
        for at, one in enumerate(given):
            if one.get("abort_step") is not None and one["abort_step"] <= len(steps) and at not in coming:
                scheduler.finish_requests(str(at), RequestStatus.FINISHED_ABORTED)  # once it has ended: no change
        if not coming and not scheduler.has_unfinished_requests():
            break
        out = scheduler.schedule()
        for new in out.scheduled_new_reqs:
            reused.setdefault(new.req_id, new.num_computed_tokens)
        preemptions += len(out.preempted_req_ids or ())
        if out.num_scheduled_tokens or not under_way:
            steps.append(dict(out.num_scheduled_tokens))
            under_way.append((out, {one: not scheduler.requests[one].is_prefill_chunk for one in steps[-1]}))
            if len(under_way) <= ahead:
                continue
        complete(scheduler, *under_way.popleft())
        if drafts and not ahead:
            ids = list(out.num_scheduled_tokens)
            scheduler.update_draft_token_ids(DraftTokenIds(ids, [[1] * drafts for _ in ids]))
    return {
        "reused_on_admission": [reused.get(str(at)) for at in range(len(given))],
        "preemptions": preemptions,
        "num_steps": len(steps),
        "steps": steps,
    }


if __name__ == "__main__":
    cases = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps({name: drive(case) for name, case in cases.items()}))
