"""What counted instructions mean: programs on a multiprocessor, keys that a span costs, and a model of time.

Every time is an estimate. Rates are those of data sheets: no card was measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

SCHEDULERS = 4  # of a multiprocessor, each of which issues one instruction per cycle
EXPONENTIALS = 16  # per cycle and multiprocessor
REGISTERS, WARPS = 65536, 64  # of a multiprocessor
LATENCY = 600  # cycles of a read that misses the caches of the multiprocessor
RESTART = 3  # such reads one behind the other where a pipeline begins anew: spans, pages, keys
SPAN_KEYS = (128, 500, 1000, 4000)


@dataclass(frozen=True)
class Card:
    """Rates of a data sheet, per multiprocessor and cycle, and its shared memory."""

    name: str
    multiprocessors: int
    clock_ghz: float
    operations: int  # bf16, dense
    gigabytes_per_s: float
    shared_bytes: int

    @property
    def bytes_per_cycle(self) -> float:
        """Of device memory, for each multiprocessor."""
        return self.gigabytes_per_s / self.multiprocessors / self.clock_ghz


CARDS = {
    80: Card("A100 SXM 80 GB", 108, 1.41, 2048, 2039, 164 * 1024),
    90: Card("H100 SXM", 132, 1.83, 4096, 3350, 228 * 1024),
    100: Card("B200", 148, 1.86, 8192, 8000, 228 * 1024),
}


def with_costs(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, each with what follows from its counts and those of the plain kernel of the same shape."""
    plain = {_shape(row): row for row in rows if row["kernel"] == "plain"}
    return [row | _costs(row, plain[_shape(row)]) for row in rows]


def _shape(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["capability"], row["phase"], row["head_dim"]


def _costs(row: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    card = CARDS[row["capability"]]
    parts = tile_cycles(row, card)
    span_keys = row["span"] / (row["tile"] / row["block_n"])
    return {
        "programs": programs(row, card),
        **{f"{name}_cycles": round(value) for name, value in parts.items()},
        "span_cost_keys": round(span_keys, 1),
        "over_plain": {str(keys): round(_span(row, keys) / _plain(plain, keys) - 1, 3) for keys in SPAN_KEYS},
        "estimated_over_plain": {
            str(keys): round(_span_cycles(row, card, keys) / _span_cycles(plain, card, keys, whole=True) - 1, 3)
            for keys in SPAN_KEYS
        },
    }


def programs(row: dict[str, Any], card: Card) -> int:
    """Programs that fit on one multiprocessor at once."""
    of_warp = math.ceil(row["registers"] * 32 / 256) * 256
    by_registers = REGISTERS // of_warp // row["warps"]
    by_shared = card.shared_bytes // (row["shared_bytes"] + 1024)
    return min(by_registers, by_shared, WARPS // row["warps"])


def tile_cycles(row: dict[str, Any], card: Card) -> dict[str, float]:
    """Cycles that a key tile of one program keeps each part of a multiprocessor busy."""
    pairs, width = row["block_m"] * row["block_n"], _padded(row["head_dim"])
    return {
        "issue": row["tile"] * row["warps"] / SCHEDULERS,
        "matrix": 4 * pairs * width / card.operations,
        "exponential": pairs / EXPONENTIALS,
        "memory": 4 * row["block_n"] * row["head_dim"] / card.bytes_per_cycle if row["phase"] == "decode" else 0.0,
    }


def _padded(head_dim: int) -> int:
    return max(32, 1 << (head_dim - 1).bit_length())


def _span(row: dict[str, Any], keys: int) -> float:
    """Instructions for a span: its tiles, one of them masked where it is not full, and what is beside them."""
    return row["tile"] * math.ceil(keys / row["block_n"]) + row["mask"] * bool(keys % row["block_n"]) + row["span"]


def _plain(row: dict[str, Any], keys: int) -> float:
    """Instructions of the plain kernel for as many keys among many others."""
    return row["tile"] * keys / row["block_n"]


def _span_cycles(row: dict[str, Any], card: Card, keys: int, *, whole: bool = False) -> float:
    """Estimated cycles: the slowest part of a multiprocessor where programs overlap, else issue and products in turn.

    A kernel whose pipeline begins anew with every span also waits for `RESTART` reads there; programs beside it hide
    their share of that. `whole` leaves out what a span costs beside its keys.
    """
    parts, beside = tile_cycles(row, card), programs(row, card)
    tile = max(*parts.values(), parts["issue"] + parts["matrix"] if beside == 1 else 0.0)
    if whole:
        return tile * keys / row["block_n"]
    instructions = row["span"] + row["mask"] * bool(keys % row["block_n"])
    if parts["memory"] >= max(parts["issue"], parts["matrix"]) and beside > 1:
        tiles = keys * tile / row["block_n"]  # memory moves the keys that there are; work hides behind it
        busy = (_span(row, keys) * row["warps"] / SCHEDULERS) if not row["restarts"] else 0.0
        return max(tiles, busy) + row["restarts"] * RESTART * LATENCY / beside
    extra = instructions * row["warps"] / SCHEDULERS
    return tile * math.ceil(keys / row["block_n"]) + extra + row["restarts"] * RESTART * LATENCY / beside


def page(rows: list[dict[str, Any]], versions: dict[str, str]) -> str:
    """The results as Markdown."""
    return "\n\n".join([HEAD.format(**versions), _resources(rows), COST, _over(rows), TIME, _times(rows)]) + "\n"


HEAD = """# What the compiled kernels cost

Generated by `python benchmarks/kernels/static.py` with torch {torch} and triton {triton}; nothing here was run.
Instructions are those of one warp, along the control flow of the machine code. bfloat16, 32 query heads, 8 kv heads,
pages of 16. `plain` is paged attention over one page table, without spans (`plain.py`); the other three are
our kernel in its forms. `tile`: a tile of keys that all rows see. `mask`: what a tile costs more that some rows do not
see, or that is not full. `span`: beside its tiles, what a new span costs."""
COST = """## A span beside its keys, by instructions

`keys`: instructions of a new span in keys of the same loop. Then: a span of so many keys against as many keys among
others in the plain kernel, instructions of the padded last tile included."""
TIME = """## Time, estimated

Cycles of one key tile that each part of a multiprocessor is busy, from data-sheet rates ({}). The percentages are
estimates: the slowest part where two programs overlap, else issue and products in turn. Memory counts in decode only,
where every key is read once. A pipeline that begins anew waits for three reads of 600 cycles.""".format(
    ", ".join(f"sm_{capability}: {card.name}" for capability, card in CARDS.items())
)


def _resources(rows: list[dict[str, Any]]) -> str:
    head = (
        "| target | phase | head_dim | kernel | tile m × n, warps, stages | registers | stack, B | spills in loop | "
        "shared, KB | programs per SM | tile | mask | span |"
    )
    return _table(
        head,
        (
            [
                *_name(row), f"{row['block_m']} × {row['block_n']}, {row['warps']}, {row['stages']}", row["registers"],
                row["stack_bytes"], row["spills"], round(row["shared_bytes"] / 1024), row["programs"], row["tile"],
                row["mask"], row["span"],
            ]
            for row in rows
        ),
    )  # fmt: skip


def _over(rows: list[dict[str, Any]]) -> str:
    head = "| target | phase | head_dim | kernel | keys | " + " | ".join(f"{keys} keys" for keys in SPAN_KEYS) + " |"
    spans = (row for row in rows if row["kernel"] != "plain")
    return _table(head, ([*_name(row), row["span_cost_keys"], *_percents(row["over_plain"])] for row in spans))


def _times(rows: list[dict[str, Any]]) -> str:
    parts = ("issue", "matrix", "exponential", "memory")
    head = "| target | phase | head_dim | kernel | " + " | ".join(parts) + " | "
    head += " | ".join(f"{keys} keys" for keys in SPAN_KEYS) + " |"
    cells = (
        [*_name(row), *(row[f"{part}_cycles"] for part in parts), *_percents(row["estimated_over_plain"])]
        for row in rows
    )
    return _table(head, cells)


def _name(row: dict[str, Any]) -> list[Any]:
    return [f"sm_{row['capability']}", row["phase"], row["head_dim"], row["kernel"]]


def _percents(shares: dict[str, float]) -> list[str]:
    return [f"{100 * share:+.1f} %" for share in shares.values()]


def _table(head: str, rows: Any) -> str:
    lines = [head, "|" + "---|" * (head.count("|") - 1)]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows)])
