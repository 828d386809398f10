"""The registry of policies. The parameters of a factory are properties of the arm, and options."""

from __future__ import annotations

from typing import Annotated

from spanlab.core.admission import Admission, SecondTouch, always
from spanlab.core.placement.rules import Placer
from spanlab.core.policies.block_pool import (
    BLOCK,
    BlockRules,
    BlockShape,
    BlockStore,
    block_multiple,
    block_shape,
)
from spanlab.core.policies.blocks import BlockPolicy
from spanlab.core.policies.chunks import ChunkPolicy, CountedBlocks, UnsharedPolicy
from spanlab.core.policies.sequences import SequenceMemory, SequencePolicy
from spanlab.core.policies.slots import SlotPolicy, SlotRules
from spanlab.core.policies.tree_variants import (
    AdmittingPolicy,
    ExactHashPolicy,
    KeptRepairsPolicy,
    PinningPolicy,
    PrivateIndex,
    PublishedStudyPolicy,
    WholePromptIndex,
)
from spanlab.core.protocol import Policy
from spanlab.core.releases import RELEASES
from spanlab.core.request import Budget
from spanlab.core.rules import ReuseRules
from spanlab.core.store import Store
from spanlab.core.tree import SharedIndex, isolated, whole
from spanlab.model_spec import ModelSpec
from spanlab.registry import Registry, not_negative, positive, share

CHUNK = 256  # tokens, LMCache's usual chunk
GIB = 1 << 30
BlockSize = Annotated[int, positive, "tokens per block"]

#: `rules`, `store`, `placer` and `admission` are those of the arm; `budget` is that of the store;
#: `token_bytes` is the KV per token, a drafter's included; with `ahead` a step is planned while the
#: previous one runs; `drafts` tokens are drafted ahead of it, by a drafter whose own KV depends on
#: `drafter` tokens behind its position; 0: without KV; `in_flight` tokens are planned and not yet
#: computed, at most; `card` is the hardware's compute capability, times ten.
_GIVEN = (
    *("rules", "store", "placer", "admission", "model", "budget", "token_bytes"),
    *("ahead", "drafts", "drafter", "in_flight", "card"),
)
POLICIES: Registry[Policy] = Registry("policy", given=_GIVEN)


@POLICIES.register("tree")
def tree(
    rules: ReuseRules, store: Store, placer: Placer, admission: Admission | None = None
) -> Policy:
    """The policy `tree`: prefixes or spans in a tree that all requests share."""
    kind = AdmittingPolicy if store.pins is None else PinningPolicy
    return kind(rules, store, SharedIndex(store.tree), placer, admission or always())


@POLICIES.register("second_touch")
def second_touch(rules: ReuseRules, store: Store, placer: Placer) -> Policy:
    """The policy `tree` with `admission=second_touch`."""
    return tree(rules, store, placer, SecondTouch())


@POLICIES.register("kept_repairs")
def kept_repairs(rules: ReuseRules, store: Store, placer: Placer) -> Policy:
    """The policy `tree`, which also stores the repaired first blocks of spans."""
    repair = rules.repair
    if repair.kind != "first" or rules.copies or rules.layout is not isolated:
        settings = f"spans.repair.kind={repair.kind}, a layout named {rules.layout.__name__}"
        expected = (
            "expected a repair of first tokens, spans.provenance=isolated, spans.sharing=canonical"
        )
        raise ValueError(f"policy=kept_repairs with {settings}: {expected}")
    return KeptRepairsPolicy(rules, store, SharedIndex(store.tree), placer)


@POLICIES.register("published_study")
def published_study(rules: ReuseRules, store: Store, placer: Placer) -> Policy:
    """One private entry per request, as in the study of arXiv 2605.05219."""
    return PublishedStudyPolicy(rules, store, PrivateIndex(store.tree), placer)


@POLICIES.register("blocks")
def blocks(
    model: ModelSpec,
    budget: Budget,
    token_bytes: int,
    ahead: bool = False,
    drafts: int = 0,
    drafter: int = 0,
    in_flight: int = 0,
    block_size: Annotated[int | None, positive, "tokens per block"] = None,
    retention: Annotated[int | None, not_negative, "states to store"] = 0,
    junctions: Annotated[
        bool, "whether a state is stored at the end of a shared prefix that has none"
    ] = True,
    cut: Annotated[bool, "whether prefill chunks end at each multiple of `retention`"] = False,
    card: int = 0,
    inner_states: Annotated[
        bool | None,
        "whether the last chunk of a prompt also stores the state at its last boundary; null: by the card",
    ] = None,
    release: Annotated[str, tuple(RELEASES), "release of vLLM whose rules hold"] = "vllm_0_32",
) -> Policy:
    """KV and states in one pool of hashed blocks, as large as the budget; `BlockRules` describes
    the options."""
    if drafter and model.has_own_drafter and RELEASES[release].drafter == "drop":
        reason = "it computes the last block of the drafter's windows again, which is not modelled"
        raise ValueError(
            f"release={release} with model.name={model.name} and a drafter's KV: expected method=ngram, or a release "
            f"with lookahead, for {reason}"
        )
    inner = RELEASES[release].exports_states(model, card) if inner_states is None else inner_states
    shape = block_shape(model, token_bytes, block_size, block_multiple(model, inner=inner), drafts)
    size, block_bytes, groups, layout = shape
    if cut and retention and retention % size:
        raise ValueError(
            f"pool.retention={retention} with pool.cut: expected a multiple of a block's {size} tokens"
        )
    rules = BlockRules(
        size,
        "align" if groups else "none",
        groups,
        retention,
        junctions,
        cut,
        ahead,
        inner,
        drafts,
        drafter,
        RELEASES[release],
        layout,
        in_flight,
    )
    pool = shape.pool(shape.limit(budget))
    return BlockPolicy(
        rules, BlockStore(pool, block_bytes, model.state_bytes), model.grid, bounded=model.bounded
    )


@POLICIES.register("unshared")
def unshared(
    model: ModelSpec, budget: Budget, token_bytes: int, block_size: BlockSize = BLOCK
) -> Policy:
    """The pool of `blocks` for requests without common tokens, as in logs of lengths; for models of
    attention alone."""
    if model.is_hybrid or model.has_windows:
        expected = "expected a model whose layers all read all tokens"
        raise ValueError(f"policy=unshared with model.name={model.name}: {expected}")
    shape = BlockShape(block_size, block_size * token_bytes, 0)
    blocks = shape.pool(shape.limit(budget)).num_blocks
    return UnsharedPolicy(block_size, CountedBlocks(blocks, shape.block_bytes))


@POLICIES.register("exact_hash")
def exact_hash(rules: ReuseRules, store: Store, placer: Placer) -> Policy:
    """The policy `tree` for whole prompts, which share nothing unless they are equal."""
    if rules.layout is not whole:
        raise ValueError(
            f"policy=exact_hash with a layout named {rules.layout.__name__}: expected spans=null"
        )
    return ExactHashPolicy(rules, store, WholePromptIndex(store.tree), placer)


@POLICIES.register("chunks")
def chunks(
    model: ModelSpec, budget: Budget, token_bytes: int, block_size: BlockSize = CHUNK
) -> Policy:
    """A pool of chunks that stores prompts only, as in LMCache; for models of attention alone."""
    if model.is_hybrid:
        raise ValueError(
            f"policy=chunks with model.name={model.name}: expected a model of attention layers alone"
        )
    shape = BlockShape(block_size, block_size * token_bytes, 0)
    pool = shape.pool(shape.limit(budget))
    return ChunkPolicy(BlockRules(block_size), BlockStore(pool, shape.block_bytes, 0))


def _memory(policy: str, model: ModelSpec, budget: Budget, token_bytes: int) -> SequenceMemory:
    """Return the memory of a cache of whole sequences, for models of attention alone."""
    if model.is_hybrid:
        raise ValueError(
            f"policy={policy} with model.name={model.name}: expected a model of attention layers alone"
        )
    return SequenceMemory(min(budget.total_bytes, budget.kv_bytes) // token_bytes, token_bytes)


@POLICIES.register("sequences")
def sequences(
    model: ModelSpec,
    budget: Budget,
    token_bytes: int,
    prefix_cache_n: Annotated[int | None, positive, "stored sequences; null: as many as fit"] = 16,
) -> Policy:
    """Whole sequences of finished requests, as in mistral.rs; for models of attention alone."""
    entries = budget.entries if prefix_cache_n is None else min(budget.entries, prefix_cache_n)
    return SequencePolicy(_memory("sequences", model, budget, token_bytes), entries)


@POLICIES.register("slots")
def slots(
    model: ModelSpec,
    budget: Budget,
    token_bytes: int,
    parallel: Annotated[
        int, positive, "slots, each with one sequence and one request at a time"
    ] = 4,
    kv_unified: Annotated[
        bool, "whether slots share all device memory; else each has an equal part"
    ] = True,
    slot_prompt_similarity: Annotated[
        float, share, "share of a prompt above which a slot is chosen by its tokens; 0: by age"
    ] = 0.1,
    cache_reuse: Annotated[
        int, not_negative, "tokens of the smallest chunk that moves to another position; 0: none"
    ] = 0,
    cache_ram_gib: Annotated[
        float, not_negative, "host memory for sequences, outside the budget; 0: none"
    ] = 8.0,
    cache_idle_slots: Annotated[
        bool, "whether idle slots are copied to host memory when a request starts"
    ] = True,
) -> Policy:
    """Slots of one sequence each, as in llama.cpp's server; for models of attention alone."""
    memory = _memory("slots", model, budget, token_bytes)
    host = int(cache_ram_gib * GIB) // token_bytes
    rules = SlotRules(
        parallel, kv_unified, slot_prompt_similarity, cache_reuse, host, cache_idle_slots
    )
    return SlotPolicy(rules, memory)
