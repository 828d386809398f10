"""Rules that a policy applies: costs, recoveries, state formats, progress and reuse."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import astuple, dataclass, field
from math import gcd
from typing import Annotated

from spanlab.core.repair import MapRules, Repair
from spanlab.core.request import Request
from spanlab.core.tree import CacheSpan, Layout, whole
from spanlab.model_spec import COSTS as COSTS  # where plugins of earlier versions import them
from spanlab.model_spec import BoundedReads, ModelSpec
from spanlab.model_spec import Cost as Cost
from spanlab.registry import Registry, not_negative, one_of, positive

# ------------------------------------------------------------------------------
# Recovery of a recurrent state where stored KV reaches deeper: how the gap between both is
# closed.
#
# `recompute` computes the gap as if its KV were not stored. A replay reads that KV in place, and
# advances the state
# through the gap with fewer blocks of the model. A backfill loads a deeper state from a lower
# tier.
# ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Replay:
    """The part of a token's computation that a replayed token of a gap skips.

    `exact`           the state and all that follows are those of recompute
    `token_flops`     FLOPs of a token that do not depend on its position
    `pair_flops`      FLOPs of a query-key pair
    `read_bytes`      KV bytes of each token before a row that the row does not read
    `most_tokens`     a longer gap is recomputed; None: no gap is too long
    """

    exact: bool
    token_flops: int
    pair_flops: int
    read_bytes: int
    most_tokens: int | None = None

    def tokens(self, gap: int) -> int:
        """Return the replayed tokens of a gap: all or none."""
        return gap if self.most_tokens is None or gap <= self.most_tokens else 0

    def left_out(self, start: int, stop: int, alone: bool) -> tuple[int, int]:
        """Return the FLOPs and bytes that tokens `[start, stop)` of a gap skip.

        The KV of the gap is read from memory, which takes the bytes that are not written.

        `alone`  no row behind the gap is in the chunk: such a row would read all KV before it
        """
        rows = stop - start
        flops = rows * self.token_flops + rows * (start + stop + 1) // 2 * self.pair_flops
        return flops, stop * self.read_bytes if alone else 0


@dataclass(frozen=True, slots=True)
class Recovery:
    """How an arm recovers a state; each part is None where the arm does not use it.

    `replay`     advances the state through the gap
    `backfill`   loads deeper states from the tiers of the study: always, or break_even, where that
                 is faster
    """

    replay: Replay | None = None
    backfill: str | None = None


#: `model` is the study's.
RECOVERIES: Registry[Recovery] = Registry("recovery", given=("model",))


def key_value_flops(model: ModelSpec) -> int:
    """Return the FLOPs per token of the key and value projections in one attention layer."""
    return 4 * model.hidden_size * model.kv_heads * model.head_dim


def attention_block_flops(model: ModelSpec) -> int:
    """Return the FLOPs per token of all projections of one attention layer, the output's
    included."""
    return (
        model.projection_flops_per_token
        + 2 * model.hidden_size * model.attention_heads * model.head_dim
    )


def mlp_flops(model: ModelSpec) -> int:
    """Return the FLOPs per token of one layer's MLP block, or of its router and the experts that a
    token passes."""
    if model.expert_layers not in (0, model.num_layers) or model.num_mlps != model.num_layers:
        expected = "expected one MLP block behind each layer, all with experts or all without"
        raise ValueError(f"recovery of states with model.name={model.name}: {expected}")
    if not model.expert_layers:
        return 2 * model.mlp_matrices * model.hidden_size * model.intermediate_size
    shared = model.shared_intermediate_size
    width = model.experts_per_token * model.expert_intermediate_size + shared
    return 2 * model.hidden_size * (model.mlp_matrices * width + model.experts + (shared > 0))


MostTokens = Annotated[int | None, not_negative, "longest gap that is replayed; null: any"]


@RECOVERIES.register("recompute")
def recompute() -> Recovery:
    """`recompute`: all layers over the gap, keys and values included, as in every engine today."""
    return Recovery()


@RECOVERIES.register("resident_kv")
def resident_kv(most_tokens: MostTokens = None, *, model: ModelSpec) -> Recovery:
    """`resident_kv`: no projection of keys and values over the gap, and nothing above the last
    recurrent block.

    Exact: all layers that a state at the end of the gap depends on run, and queries of the gap read
    resident keys and values. The last layer is one of attention, as in Qwen3.5: it is left out
    whole, with the MLP block below it.
    """
    layers = model.attention_layers
    top = attention_block_flops(model) - key_value_flops(model) + 2 * mlp_flops(model)
    flops = layers * key_value_flops(model) + top
    pair, read = model.attention_flops_per_pair // layers, model.kv_bytes_per_token // layers
    return Recovery(Replay(True, flops, pair, read, most_tokens))


@RECOVERIES.register("state_backfill")
def state_backfill(
    always: Annotated[bool, "whether it is loaded even where computing the gap is faster"] = False,
) -> Recovery:
    """`state_backfill`: the deepest state that the tiers of the study have within the KV that is
    there.

    It was evicted from the device while its KV stayed; `core.policies.backfilled` loads it.
    Sources: vllm-project/vllm#52774, which fetches the state alone from the store, and
    sgl-project/sglang#40680, which demotes states of inner nodes to the host.
    """
    return Recovery(backfill="always" if always else "break_even")


@RECOVERIES.register("tail_replay")
def tail_replay(most_tokens: MostTokens = None, *, model: ModelSpec) -> Recovery:
    """`tail_replay`: no attention block over the gap, and nothing above the last recurrent block.
    Not exact.

    A recurrent layer reads the residual stream, which contains the outputs of the attention layers
    below it. These are left out, so every state above the first attention layer is wrong. The last
    layer is one of attention, as in Qwen3.5: two MLP blocks are above the last recurrent block.
    Source: sgl-project/sglang#40865; compare vllm-project/vllm#53041.
    """
    flops = model.attention_layers * attention_block_flops(model) + 2 * mlp_flops(model)
    return Recovery(
        Replay(False, flops, model.attention_flops_per_pair, model.kv_bytes_per_token, most_tokens)
    )


# ------------------------------------------------------------------------------
# Formats of stored recurrent states; a running request has its state in the model's format.
#
# The inputs of the convolution are stored unchanged. Quantising compares, multiplies and rounds
# every number, dequantising multiplies it. Rounded states change what follows: docs/engine.md
# says by how much.
# ------------------------------------------------------------------------------

SCALE_BYTES = 4  # a float32


@dataclass(frozen=True, slots=True)
class StateFormat:
    """Size and conversion cost of one stored state.

    `num_bytes`  its bytes, scales and the convolution's inputs included
    `store_flops`, `load_flops`  operations of converting it into the format, and back
    """

    num_bytes: int
    store_flops: int = 0
    load_flops: int = 0


#: `model` is the study's.
STATE_FORMATS: Registry[StateFormat] = Registry("state format", given=("model",))


def _numbers(model: ModelSpec) -> int:
    """Numbers of the recurrent states of all layers."""
    return _rows(model) * model.recurrent_value_dim


def _rows(model: ModelSpec) -> int:
    """Rows of these states: one per key channel, value head and layer."""
    return model.recurrent_layers * model.recurrent_value_heads * model.recurrent_key_dim


@STATE_FORMATS.register("native")
def native(*, model: ModelSpec) -> StateFormat:
    """`native`: as the model computes it."""
    return StateFormat(model.state_bytes)


@STATE_FORMATS.register("bf16")
def bf16(*, model: ModelSpec) -> StateFormat:
    """`bf16`: two bytes a number, rounded."""
    numbers = _numbers(model)
    return StateFormat(2 * numbers + model.conv_state_bytes, numbers, numbers)


@STATE_FORMATS.register("int8")
def int8(*, model: ModelSpec) -> StateFormat:
    """`int8`: one byte a number, and a scale for each row of value channels."""
    numbers = _numbers(model)
    return StateFormat(
        numbers + SCALE_BYTES * _rows(model) + model.conv_state_bytes, 3 * numbers, numbers
    )


@STATE_FORMATS.register("int8_head")
def int8_head(*, model: ModelSpec) -> StateFormat:
    """`int8_head`: one byte a number, and a scale for each value head of a layer."""
    numbers, heads = _numbers(model), model.recurrent_layers * model.recurrent_value_heads
    return StateFormat(numbers + SCALE_BYTES * heads + model.conv_state_bytes, 3 * numbers, numbers)


# ------------------------------------------------------------------------------
# States captured while tokens are computed, at positions that are unknown when a request is
# admitted.
# ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Progress:
    """Intervals of captured states, in tokens of prompt and output together; 0: no such state.

    `chunk`     a state at its last multiple in every chunk of a prompt
    `interval`  a state at every multiple of it in the output
    `newest`    a state at its last multiple in the output, which replaces the previous one
    """

    chunk: int = 0
    interval: int = 0
    newest: int = 0

    @property
    def every(self) -> int:
        """Greatest common divisor of the intervals in the output; 0 where it has no states."""
        return gcd(self.interval, self.newest)

    def positions(self, prompt: int, start: int, stop: int) -> Sequence[int]:
        """Return the positions in (start, stop] at which computing `[start, stop)` captures a
        state, increasing."""
        positions = []
        if self.chunk and start < prompt:
            end = min(stop, prompt) // self.chunk * self.chunk
            positions += [end] if end > start else []
        every = self.every
        if every and stop > prompt:
            first = max(start, prompt) // every * every + every
            positions += [
                position
                for position in range(first, stop + 1, every)
                if self.stays(position) or (self.newest and position % self.newest == 0)
            ]
        return positions

    def stays(self, position: int) -> bool:
        """Whether a state in the output stays stored when later ones are captured."""
        return bool(self.interval and position % self.interval == 0)

    def equal_steps(self, reached: Iterable[int]) -> int:
        """Return how many decode steps in a row are equal; the first one reaches the positions
        `reached`.

        One if the first step captures a state, else the steps before the next one that may capture
        a state.
        """
        every = self.every
        if not every:
            return 1 << 62
        return min(
            [every - position % every if position % every else 1 for position in reached], default=1
        )

    def max_states(self, output: int) -> int:
        """Return the most states that a running request holds for an output of `output` tokens."""
        return bool(self.newest) + (output // self.interval + 1 if self.interval else 0)


def merge_progress(intervals: Sequence[Progress]) -> Progress | None:
    """Merge the intervals of several placements; None where there are none."""
    if not intervals:
        return None
    return Progress(*(max(units) for units in zip(*map(astuple, intervals), strict=True)))


# ------------------------------------------------------------------------------
# Rules that a policy follows.
# ------------------------------------------------------------------------------


@dataclass
class CacheRules:
    """What counts as a use of what is stored, and what a running request keeps.

    `touch`       what a match refreshes: match, all that was found; resume, the part that is read
    `age_by`      events that count as a use besides a match: release, the end and a preemption;
                  finish, the end; access, insertions alone
    `store_to`    computed: all computed KV is stored; state: KV up to the newest state only
    `share_step`  requests of one step find KV that is scheduled in that step
    `hold_state`  the newest state of a running request cannot be evicted; else only until it has
                  been read
    `states_per_path`  beyond so many states on the path of an insertion, its shallowest leave;
                       null: no such limit.
                  Their KV stays, as do the path's last state, states in use, at forks and at leaves (SGLang #31230)
    """

    touch: str = "match"
    age_by: str = "release"
    store_to: str = "computed"
    share_step: bool = True
    hold_state: bool = False
    states_per_path: int | None = None

    def check(self, path: str) -> None:
        """Raise ValueError for invalid settings; `path` is their key."""
        one_of(f"{path}.touch", self.touch, ("match", "resume"))
        one_of(f"{path}.age_by", self.age_by, ("release", "finish", "access"))
        one_of(f"{path}.store_to", self.store_to, ("computed", "state"))
        positive(f"{path}.states_per_path", self.states_per_path)


@dataclass(frozen=True, slots=True)
class ReuseRules:
    """Rules that a policy follows.

    `keeps`         False: nothing is stored (the cold baseline)
    `needs_states`  the model has recurrent layers: KV without a state saves nothing
    `grid`          states stand at multiples of it
    `last_token`    False: a fully stored prompt still computes one token, for its logits
    `layout`        how a prompt is cut into cache spans
    `repair`        which tokens of spans that were computed elsewhere are recomputed
    `copies`        a request reads private copies of the spans that it reuses
    `cache`         what counts as a use, and what a running request stores and locks
    `maps`          how recurrent layers store spans; None without such layers, or for prompts of
                    one cache span
    `map_bytes`     of one map as it is stored
    `working_map_bytes`  of the map of a span that a running request computes
    `progress`      states that are captured while tokens are computed; None: none
    `replay`        advances a state through tokens whose KV is stored; None: they are computed
    `backfills`     states are loaded back from lower tiers
    `state_format`  format of stored states; None: that of running requests
    `state_bytes_saved`  bytes that the format saves per state
    `drops_last`    the last block of a match is recomputed, since a drafter's keys and values at
                    its end depend on the token after it
    `serves_behind` requests behind one that preempted itself are served in the same step
    `checks_first_chunk`  a prompt's first step may need more memory than is checked for the whole
                          prompt
    `bounded`       reads of layers that read a bounded number of tokens per query
    `admits_behind` requests are admitted behind one whose chunk would leave fewer tokens than its
    drafter reads ahead
    """

    keeps: bool = True
    needs_states: bool = False
    grid: int = 1
    last_token: bool = False
    layout: Layout = whole
    repair: Repair = field(default_factory=Repair)
    copies: bool = False
    cache: CacheRules = field(default_factory=CacheRules)
    maps: MapRules | None = None
    map_bytes: int = 0
    working_map_bytes: int = 0
    progress: Progress | None = None
    replay: Replay | None = None
    backfills: bool = False
    state_format: StateFormat | None = None
    state_bytes_saved: int = 0
    drops_last: bool = False
    serves_behind: bool = False
    checks_first_chunk: bool = False
    bounded: tuple[BoundedReads, ...] = ()
    admits_behind: bool = False

    def __post_init__(self) -> None:
        composed = self.needs_states and self.layout is not whole
        assert composed == (self.maps is not None), (
            "recurrent layers need maps where a prompt has several cache spans"
        )
        assert not (composed and self.copies), "spans with maps are read as stored"
        assert not composed or self.repair.kind in ("none", "first"), (
            "a map covers the tokens behind a repair"
        )
        follows = self.progress is not None or self.replay is not None
        assert not follows or (self.needs_states and not composed), (
            "positions are those of the prompt"
        )
        assert not (self.drops_last and self.needs_states), (
            "drafts need a model without recurrent layers"
        )
        assert not self.repair.rewrites or self.copies, (
            "a measured repair writes to every span it looks at"
        )


@dataclass(frozen=True)
class StorageRules:
    """Rules by which a family of caches divides prompts into stored units.

    `layout`      cache spans of a prompt; each one is a separate prefix
    `key`         cache spans with equal keys may share
    `unit`        tokens per unit; reuse and storage are whole units from the cache span's start
    `last_token`  True: the last prompt token may be reused too
    `outputs`     True: output tokens that the workload contains are stored behind the prompt
    """

    layout: Layout
    key: Callable[[Request, CacheSpan], Hashable]
    unit: int = 1
    last_token: bool = False
    outputs: bool = False
