"""A pool of blocks of one size: published blocks can be matched until they are evicted (vLLM's block pool).

Free blocks form one queue. Blocks without a key come first, last freed first; then the blocks that
were never used; then those with a key, in the order in which they were freed.
"""

from __future__ import annotations

import functools
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import gcd, lcm
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from spanlab.core.releases import VLLM_0_32, Release
from spanlab.core.request import Budget, Request
from spanlab.core.token_string import Tokens, TokenString
from spanlab.model_spec import ModelSpec, layers_per_group


class BlockKey(NamedTuple):
    """Key of a published block: the group of layers that wrote it, and the digest of all tokens up to its end."""

    group: int
    digest: int


class Source(NamedTuple):
    """Tokens from which a block was computed: those of a request from its start to the block's end, or further."""

    cache_salt: str
    tokens: TokenString


class Block:
    """Memory of one block; `digest` is None while the block is not published.

    `source`  distinguishes equal digests of different tokens; None for a block of a lower tier, which has digests only
    """

    __slots__ = ("digest", "group", "source", "users")

    def __init__(self, group: int = 0, digest: int | None = None) -> None:
        self.group, self.digest = group, digest
        self.users = 0
        self.source: Source | None = None

    @property
    def key(self) -> BlockKey | None:
        """Key of the block; None while it is not published."""
        return None if self.digest is None else BlockKey(self.group, self.digest)


class LowerTiers(Protocol):
    """Lower tiers of a pool: `find` may return blocks that are not in the pool; the others report its changes."""

    def find(self, key: BlockKey) -> Block | None: ...

    def published(self, key: BlockKey) -> None: ...

    def evicted(self, key: BlockKey) -> None: ...


#: Placeholder for a block that a request no longer needs, or never had; it is never in the free queue.
NULL_BLOCK = Block()
NULL_BLOCK.users = 1


class BlockPool:
    """A fixed number of blocks of one size; several blocks may have the same content."""

    def __init__(self, num_blocks: int) -> None:
        self._unused = num_blocks
        self._unkeyed: list[Block] = []
        self._keyed: OrderedDict[Block, None] = OrderedDict()
        self._first: defaultdict[int, dict[int, Block]] = defaultdict(dict)  # by group and digest
        self._copies: dict[BlockKey, list[Block]] = {}  # blocks published after the first one of a key, in order
        self.num_blocks = num_blocks
        self.lower: LowerTiers | None = None
        self.num_published: Counter[int] = Counter()  #: blocks ever published, by group
        self.num_revived = 0  #: free published blocks that were reused
        self.num_evicted: Counter[int] = Counter()  #: published blocks that were evicted, by group

    @property
    def num_free(self) -> int:
        """Blocks that no request uses, published ones included."""
        return self._unused + len(self._unkeyed) + len(self._keyed)

    def num_keyed(self, group: int) -> int:
        """Return the number of published blocks of one group."""
        return self.num_published[group] - self.num_evicted[group]

    def find(self, group: int, digest: int) -> Block | None:
        """Return the first published block of a key, else the block of a lower tier; None without one."""
        block = self._first[group].get(digest)
        if block is None and self.lower is not None:
            return self.lower.find(BlockKey(group, digest))
        return block

    def absent(self, group: int, digests: set[int]) -> set[int]:
        """Return the digests without a block."""
        missing = digests.difference(self._first[group])
        return missing if self.lower is None else {digest for digest in missing if self.find(group, digest) is None}

    def find_run(self, group: int, digests: Iterable[int]) -> list[Block]:
        """Return the blocks of `digests` up to the first one without a block."""
        blocks: list[Block] = []
        first = self._first[group]
        for digest in digests:
            block = first.get(digest)
            if block is None and self.lower is not None:
                block = self.lower.find(BlockKey(group, digest))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def take(self, count: int) -> list[Block]:
        """Allocate `count` blocks from the head of the free queue; they lose their keys."""
        assert count <= self.num_free, "more blocks were allocated than are free"
        first = max(0, len(self._unkeyed) - count)
        blocks = self._unkeyed[first:][::-1]
        del self._unkeyed[first:]
        new = min(count - len(blocks), self._unused)
        self._unused -= new
        blocks += [Block() for _ in range(new)]
        blocks += self._evict(count - len(blocks))
        for block in blocks:
            block.users = 1
        return blocks

    def _evict(self, count: int) -> list[Block]:
        """Take the first `count` published blocks from the free queue, and remove their keys."""
        plain, pop, evicted = not self._copies and self.lower is None, self._keyed.popitem, []
        for _ in range(count):
            block, _ = pop(last=False)
            digest = block.digest
            assert digest is not None, "the queue of keyed blocks has only blocks with keys"
            if plain:
                del self._first[block.group][digest]
            else:
                self._forget(block, BlockKey(block.group, digest))
            block.digest = block.source = None
            evicted.append(block)
        if len(self._first) == 1:
            self.num_evicted[next(iter(self._first))] += count
        else:
            self.num_evicted.update([block.group for block in evicted])
        return evicted

    def _forget(self, block: Block, key: BlockKey) -> None:
        """Remove a block from its key; if it was the first one, its next copy becomes the first."""
        copies, first = self._copies.get(key), self._first[key.group]
        if copies is None:
            del first[key.digest]
            if self.lower is not None:
                self.lower.evicted(key)
            return
        if first[key.digest] is block:
            first[key.digest] = copies.pop(0)
        else:
            copies.remove(block)
        if not copies:
            del self._copies[key]

    def publish(
        self, group: int, blocks: Sequence[Block], digests: Sequence[int], source: Source | None = None
    ) -> None:
        """Publish full blocks, each under its digest; all are computed from `source`."""
        first = self._first[group]
        self.num_published[group] += len(blocks)
        for block, digest in zip(blocks, digests, strict=True):
            assert block.digest is None, "a block is published once"
            block.group, block.digest, block.source = group, digest, source
            # As in vLLM, two blocks may hold the same tokens: a running request's table is never
            # changed, so that the second block is kept, and is found once the first one is evicted.
            if first.setdefault(digest, block) is not block:
                self._copies.setdefault(BlockKey(group, digest), []).append(block)
        if self.lower is not None:
            for digest in digests:
                self.lower.published(BlockKey(group, digest))

    def use(self, blocks: Iterable[Block]) -> None:
        """Add one reference to each block; null blocks are not counted."""
        for block in blocks:
            if block is NULL_BLOCK:
                continue
            if block.users == 0:
                del self._keyed[block]
                self.num_revived += 1
            block.users += 1

    def free(self, blocks: Iterable[Block]) -> None:
        """Drop one reference to each block; blocks without references join the free queue in this order."""
        unkeyed = []
        for block in blocks:
            if block is NULL_BLOCK:
                continue
            block.users -= 1
            if block.users:
                continue
            if block.digest is None:
                unkeyed.append(block)
            else:
                self._keyed[block] = None
        # Blocks without a key are of no use to anyone, and are taken before all others, the last
        # freed one first.
        self._unkeyed.extend(reversed(unkeyed))

    def waiting(self) -> Iterator[Block]:
        """Return an iterator over published blocks without references, in order of eviction."""
        return iter(self._keyed)

    def check(self) -> None:
        """Verify the counts and the queue by recounting; slow, for tests."""
        published = [block for first in self._first.values() for block in first.values()]
        published += [block for copies in self._copies.values() for block in copies]
        assert all(block.digest is not None for block in published), "a published block has no key"
        counted = Counter(block.group for block in published)
        assert self.num_published - self.num_evicted == counted, "published blocks are miscounted"
        assert all(block.users == 0 for block in self._keyed), "a free block is in use"
        assert {block for block in published if block.users == 0} == set(self._keyed)
        assert 0 <= self.num_free <= self.num_blocks, "the number of blocks changed"


# ------------------------------------------------------------------------------
# The sizes of a pool of hashed blocks in bytes.
# ------------------------------------------------------------------------------


class BlockStore:
    """A pool of hashed blocks, measured in bytes."""

    def __init__(self, pool: BlockPool, block_bytes: int, state_bytes: int) -> None:
        self.pool, self.block_bytes, self.state_bytes = pool, block_bytes, state_bytes
        self.kv_groups = frozenset({0})  #: groups of attention layers; the others hold states

    @property
    def num_free(self) -> int:
        """Blocks that no request uses."""
        return self.pool.num_free

    @property
    def kv_cached(self) -> int:
        """Bytes of published attention blocks."""
        return sum([self.pool.num_keyed(group) for group in self.kv_groups]) * self.block_bytes

    @property
    def state_cached(self) -> int:
        """Bytes of published state blocks."""
        states = [group for group in self.pool.num_published if group not in self.kv_groups]
        return sum([self.pool.num_keyed(group) for group in states]) * self.block_bytes

    @property
    def inserted_bytes(self) -> int:
        """Bytes of all blocks ever published."""
        return self.pool.num_published.total() * self.block_bytes

    @property
    def evicted_bytes(self) -> int:
        """Bytes of published blocks that were evicted."""
        return self.pool.num_evicted.total() * self.block_bytes


# ------------------------------------------------------------------------------
# Rules of a pool of hashed blocks: block size, and which recurrent states are stored.
# ------------------------------------------------------------------------------

BLOCK = 16  # tokens, vLLM's usual block; blocks of other sizes are multiples of it
INNER = 64  # tokens; states inside a chunk are stored at multiples of it
StateMode = Literal["none", "align"]
GroupKind = Literal["full", "window", "chunk", "state", "ring"]


class GroupRule(NamedTuple):
    """Rule of one group of layers.

    `kind`  full: every token reads all tokens before it; window: the last `span`, itself among them; chunk: those since
            the last multiple of `span`; state: a recurrent state; ring: `size` raw keys, of the request alone
    `size`  tokens per block
    """

    kind: GroupKind
    size: int
    span: int = 0


def check_layout(layout: Sequence[GroupRule]) -> None:
    """Raise ValueError, one sentence, for groups that one pool cannot serve together."""
    kinds = [rule.kind for rule in layout]
    full = sorted({rule.size for rule in layout if rule.kind == "full"})
    if len(full) > 1:
        raise ValueError(f"blocks of {full} tokens in groups of kind=full: expected one size")
    if not set(kinds) - {"ring"}:
        raise ValueError(f"groups of kinds {', '.join(kinds)}: expected one whose blocks a prefix can reuse")
    for rule in layout:
        if rule.kind in ("window", "chunk") and rule.span < 1:
            raise ValueError(f"span={rule.span} of a group of kind={rule.kind}: expected 1 token or more")
    sizes = sorted({rule.size for rule in layout})
    equal = [kind for kind in ("chunk", "state") if kind in kinds]
    if len(sizes) > 1 and equal:
        raise ValueError(f"blocks of {sizes} tokens with a group of kind={equal[0]}: expected one size, as in vLLM")


def unit_of(layout: Iterable[GroupRule]) -> int:
    """Return the tokens per digest: every shared block is a multiple of it."""
    return gcd(*[rule.size for rule in layout if rule.kind != "ring"])


def block_of(layout: Sequence[GroupRule]) -> int:
    """Return the tokens of a block of full attention; else of a whole block in every group."""
    full = next((rule.size for rule in layout if rule.kind == "full"), 0)
    return full or alignment_of(layout)


def alignment_of(layout: Iterable[GroupRule]) -> int:
    """Return the tokens that a reused prefix is a multiple of: whole blocks in every group."""
    return lcm(*[rule.size for rule in layout])


def blocks_of(tokens: int, size: int) -> int:
    """Return the number of blocks for `tokens` tokens, the last one possibly partly filled."""
    return -(-tokens // size)


class BlockShape(NamedTuple):
    """Blocks of a pool for one model: tokens and bytes of each, blocks per recurrent state, and groups of layers."""

    size: int
    block_bytes: int
    state_groups: int
    layout: tuple[GroupRule, ...] = ()

    def limit(self, budget: Budget) -> int:
        """Return the bytes of a budget that the blocks may take; without states, no budget of states is theirs."""
        return min(budget.total_bytes, budget.kv_bytes + (budget.state_bytes if self.state_groups else 0))

    def pool(self, budget_bytes: int) -> BlockPool:
        """Return the pool for a budget; one block of it is the null block, which stores nothing."""
        return BlockPool(max(0, budget_bytes // self.block_bytes - 1))


class _Layers(NamedTuple):
    """Equal layers of a model, for their groups."""

    rule: GroupRule
    layers: int
    page_bytes: int


def block_shape(
    model: ModelSpec, token_bytes: int, block_size: int | None = None, multiple: int = BLOCK, drafts: int = 0
) -> BlockShape:
    """Return the blocks of `block_size` tokens; None: vLLM's size for the model, in hybrids a multiple of `multiple`.

    All groups share one pool, so that a block holds the KV of any of them, or a state. vLLM therefore raises a hybrid's
    block size until the KV of a layer is no smaller than the state of a layer, pads the smaller of the two, and gives
    layers with less KV per token blocks of more tokens. `drafts` tokens are drafted ahead of a step; `token_bytes`
    include the layers of their drafter.
    """
    more = (token_bytes - model.kv_bytes_per_token) // drafter_layer_bytes(model)
    if model.local:
        return _local_shape(model, more, block_size or model.block_size)
    if not model.is_hybrid:
        size = block_size or model.block_size
        return BlockShape(size, size * token_bytes, 0, (GroupRule("full", size),))
    size = block_size or model.block_tokens_per_state(lcm(multiple, model.block_size), drafts)
    layers = model.attention_layers + more
    page_bytes = max(size * model.layer_kv_bytes, model.layer_state_bytes(drafts))
    kinds = [
        _Layers(GroupRule("state", size), model.recurrent_layers, page_bytes),
        _Layers(GroupRule("full", size), layers, page_bytes),
    ]
    each, layout = _grouped(kinds)
    return BlockShape(size, each * page_bytes, sum(rule.kind == "state" for rule in layout), layout)


def drafter_layer_bytes(model: ModelSpec) -> int:
    """Return the bytes per token of a layer of a drafter: that of the model's attention layers."""
    return model.layer_kv_bytes if model.attention_layers else model.kv_bytes_per_token // model.num_layers


def _local_shape(model: ModelSpec, more: int, size: int) -> BlockShape:
    """Return the blocks of a model with windows or chunks: those of layers with less KV have more tokens."""
    full = [_Layers(GroupRule("full", size), model.attention_layers + more, size * model.layer_kv_bytes)]
    kinds = full if model.attention_layers + more else []
    for kind in model.local:
        rule = GroupRule("window" if kind.reach == "window" else "chunk", size, kind.span)
        local = _Layers(rule, kind.layers, size * kind.kv_size * model.kv_itemsize)
        kinds = [local, *kinds] if kind.first else [*kinds, local]
    largest = max(kind.page_bytes for kind in kinds)
    widened = [
        kind._replace(rule=kind.rule._replace(size=size * (largest // kind.page_bytes)))
        if largest % kind.page_bytes == 0
        else kind
        for kind in kinds
    ]
    each, layout = _grouped(widened)
    return BlockShape(block_of(layout), each * largest, 0, layout)


def _grouped(kinds: Sequence[_Layers]) -> tuple[int, tuple[GroupRule, ...]]:
    """Return the layers per group, and the groups, kind by kind."""
    each = layers_per_group(*[kind.layers for kind in kinds])
    return each, tuple(kind.rule for kind in kinds for _ in range(blocks_of(kind.layers, each)))


@dataclass(frozen=True, slots=True)
class BlockRules:
    """Block size, and which states are stored.

    `size`          tokens per block
    `states`        none: attention alone; align: chunks end on block boundaries, and the state at a
                    chunk's end may be stored
    `state_groups`  blocks per state, one per group of recurrent layers
    `retention`     None: every written state; 0: states at the last block boundary of the prompt and at the end of
                    a shared prefix without a state; n: also one per n tokens
    `junctions`     whether a shared prefix without a state gets one, as since vLLM's pull request 37898
    `cut`           whether chunks also end at each multiple of `retention`; else a state exists only where a chunk
                    happens to end; proposed for vLLM in its pull request 54076
    `ahead`         whether a step is planned while the previous one runs: the token of the previous step is not known
                    yet, so that its block is published, and the state before it freed, one step later
    `inner_states`  whether the last chunk of a prompt also stores the state at its last boundary, so that the chunk
                    need not end there: in vLLM with FlashInfer's GatedDeltaNet on Hopper since 0.33, and for KDA
    `drafts`        tokens drafted ahead of a step
    `drafter`       tokens behind a position on which the keys and values of a drafter there depend: 1, or more with
                    several modules of multi-token prediction; 0: the drafter has none
    `release`       rules of the release of vLLM
    `groups`        groups of layers, in the order in which their blocks are freed; empty: the groups of states, and
                    full attention behind them, as where a model's first layer is recurrent
    `in_flight`     tokens that are planned and not yet computed, at most; a prompt's windows take no more memory
    """

    size: int
    states: StateMode = "none"
    state_groups: int = 1
    retention: int | None = 0
    junctions: bool = True
    cut: bool = False
    ahead: bool = False
    inner_states: bool = False
    drafts: int = 0
    drafter: int = 0
    release: Release = VLLM_0_32
    groups: tuple[GroupRule, ...] = ()
    in_flight: int = 0

    def __post_init__(self) -> None:
        if self.groups:
            check_layout(self.groups)
            kinds = [rule.kind for rule in self.groups]
            if self.drops_last and "full" not in kinds and len(kinds) > 1:
                raise ValueError(
                    f"groups of kinds {', '.join(kinds)} with a drafter's KV: expected one of kind=full, or a release "
                    "with lookahead; which groups drop a block is not modelled"
                )
        if self.inner_states and self.drops_last:
            reason = "the state inside a chunk is then stored a block earlier, which is not modelled"
            raise ValueError(f"inner_states=true with a drafter's KV: expected a release with lookahead, for {reason}")
        if self.drafter > 1 and any(rule.kind in ("window", "chunk") for rule in self.groups):
            reason = "how windows keep the tokens that they read again is not modelled"
            raise ValueError(f"a drafter of several modules with windows or chunks: expected one module, for {reason}")
        if self.drafter > self.size:
            expected = f"expected {self.drafter} or more, for its modules read as many tokens ahead, as in vLLM"
            raise ValueError(f"block_size={self.size} with a drafter's KV: {expected}")

    @property
    def layout(self) -> tuple[GroupRule, ...]:
        """The groups of layers, in order."""
        states = self.state_groups if self.states != "none" else 0
        return self.groups or (*[GroupRule("state", self.size)] * states, GroupRule("full", self.size))

    @property
    def drops_last(self) -> bool:
        """Whether the last block of a match is computed again."""
        return self.drafter > 0 and self.release.drafter == "drop"

    @property
    def lookahead(self) -> int:
        """Tokens behind a block that its key has, too."""
        return self.drafter if self.release.drafter == "lookahead" else 0

    def final(self, computed: int) -> int:
        """Return how many of `computed` tokens have KV of attention that no later step computes again.

        Several modules write the keys of the last ones again. In hybrids with lookahead, keys cover them anyway.
        """
        return computed if self.lookahead and self.states != "none" else max(0, computed - max(0, self.drafter - 1))

    def usable(self, matched: int) -> int:
        """Return how many of the matched blocks are reused."""
        return max(0, matched - self.drops_last)

    def reusable(self, matched: int, length: int) -> int:
        """Return how many of the matched blocks `length` tokens may reuse; at least one token is computed."""
        # Beside other groups, attention may match the block of the last token, too, if it is dropped.
        if len(self.layout) == 1 or not self.drops_last:
            matched = min(matched, (length - 1) // self.size)
        return self.usable(matched)

    def last_state(self, length: int) -> int:
        """Return the last boundary of the first `length` tokens at which another request may resume."""
        return self.usable((length if self.drops_last else self._resumed(length)) // self.size) * self.size

    def _resumed(self, length: int) -> int:
        """Return the tokens of a prompt up to which an equal one may resume: it computes at least the last one."""
        return max(0, length - max(1, self.lookahead))

    def resumed_at(self, length: int) -> tuple[int, ...]:
        """Return positions in the blocks behind the states at which a prompt of `length` tokens may be resumed.

        A prompt that continues it resumes from its last whole block, and an equal one computes its last token again.
        """
        if not self.drops_last:
            return (length - 1, self._resumed(length)) if self.lookahead > 1 else (length - 1,)
        unit = alignment_of(self.layout)
        return tuple(max(0, end // unit - 1) * unit for end in (length - 1, length))

    def stores_inside(self, start: int, stop: int, length: int) -> bool:
        """Whether chunk `[start, stop)` stores the state at the last block boundary before `length`, inside of it."""
        boundary, size = self._resumed(length) // self.size * self.size, self.size
        if not self.inner_states or start % size or not start + size <= boundary < stop:
            return False
        return blocks_of(stop, size) - 2 > (start - 1) // size


# ------------------------------------------------------------------------------
# Digests of a request's full blocks, each of all tokens up to its end.
#
# A block's ids are hashed by a multilinear function modulo 2^64 (arXiv 1202.4961); a digest is
# the sum over all blocks so far of their hashes, mixed with their positions. All blocks of a
# prompt take a few operations on arrays. Two of n different prefixes have the same digest with
# a probability of about n² / 2^65: three in a million for ten million blocks. Matched blocks
# are compared token by token, so that such a collision, or a forged one, is a miss.
# ------------------------------------------------------------------------------

_AHEAD = 32  # blocks that are digested at once for an output without known ids
_STRIDE = np.uint64(0x9E3779B97F4A7C15)  # between positions: 2^64 over the golden ratio
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))  # splitmix64, whose last shift is 31


class Chain:
    """Digests of the full blocks of a prompt, and of its output up to the requested length.

    `lookahead`  number of tokens behind a block that its digest covers, too
    `digests`    digest of each block; there may be more than were requested
    """

    __slots__ = (
        *("_digest_of_blocks", "_generated", "_partial_block", "_reach", "_size", "_source"),
        *("digests", "lookahead", "prompt", "request"),
    )

    def __init__(self, request: Request, size: int, lookahead: int = 0) -> None:
        self.request, self._size, self._generated, self.lookahead = request, size, 0, lookahead
        self.prompt = request.string
        self._source, self._reach = Source(request.cache_salt, self.prompt), len(self.prompt)
        self._digest_of_blocks = _seed(request.cache_salt)
        self.digests: list[int] = []
        self._partial_block = self._digest(request.tokens)

    def digests_to(self, length: int) -> list[int]:
        """Return digests of at least the full blocks in the first `length` tokens of prompt and output."""
        if length // self._size > len(self.digests):
            generated = length + self.lookahead - len(self.prompt)
            if self.request.output is None:  # all later ids are equal
                generated += _AHEAD * self._size
            else:
                generated = min(generated, len(self.request.output))
            new = self.request.output_tokens(generated)[self._generated :]
            self._partial_block, self._generated = self._digest(np.concatenate([self._partial_block, new])), generated
        return self.digests

    def string(self, length: int) -> TokenString:
        """Return the first `length` tokens of prompt and output, but at least the whole prompt."""
        generated = length - len(self.prompt)
        return self.prompt + self.request.output_string(generated) if generated > 0 else self.prompt

    def source(self, length: int) -> Source:
        """Return the tokens from which blocks in the first `length` tokens are computed, or more of them."""
        if length > self._reach:
            output = self.request.output
            most = length + _AHEAD * self._size if output is None else len(self.prompt) + len(output)
            self._reach = max(length, most) if output is None else most
            self._source = Source(self.request.cache_salt, self.string(self._reach))
        return self._source

    def count_verified(self, blocks: Sequence[Block], size: int, length: int) -> int:
        """Return the number of leading blocks that were computed from these tokens, despite possible collisions.

        A block has `size` tokens. Null blocks, and blocks of a lower tier, are not compared.
        """
        expected, last, common = self.source(length), None, 0
        for index, block in enumerate(blocks):
            source = block.source
            if source is None:
                continue
            if source is not last:
                last = source
                common = expected.tokens.common(0, source.tokens) if source.cache_salt == expected.cache_salt else 0
            if (index + 1) * size + self.lookahead > common:
                return index
        return len(blocks)

    def _digest(self, tokens: Tokens) -> Tokens:
        """Append digests of the full blocks of `tokens`; return the ids after the last full block."""
        size, first = self._size, len(self.digests)
        count = max(0, len(tokens) - self.lookahead) // size
        if count:
            ids = tokens[: count * size].reshape(count, size).astype(np.int64).view(np.uint64)
            positions = np.arange(first + 1, first + count + 1, dtype=np.uint64) * _STRIDE
            digests = _mixed(ids @ _factors(size) + positions).cumsum() + np.uint64(self._digest_of_blocks)
            self._digest_of_blocks = int(digests[-1])
            if self.lookahead:
                for ahead in range(self.lookahead):
                    behind = tokens[size + ahead :: size][:count].astype(np.int64).view(np.uint64)
                    digests += _mixed((behind + np.uint64(1)) * np.uint64(2 * ahead + 1) * _STRIDE)
            self.digests += digests.tolist()
        return tokens[count * size :]


def _mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    for shift, factor in _MIX:
        numbers = (numbers ^ (numbers >> np.uint64(shift))) * np.uint64(factor)
    mixed: NDArray[np.uint64] = numbers ^ (numbers >> np.uint64(31))
    return mixed


def _seed(cache_salt: str) -> int:
    """Return the digest before the first block, so that requests of different salts share no digest."""
    return int.from_bytes(blake2b(cache_salt.encode(), digest_size=8).digest())


@functools.cache
def _factors(size: int) -> NDArray[np.uint64]:
    """Return odd random numbers, one for each position in a block, shape (size,)."""
    return np.random.default_rng(size).integers(2**64, size=size, dtype=np.uint64) | np.uint64(1)
