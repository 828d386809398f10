"""Static sizes of the attention kernel: fixed ones, or the fastest ones that `tune` measured on this card."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch

LARGEST = 128  # pairs (row, head) of a tile


@dataclass(frozen=True)
class Blocks:
    """The static sizes of one compiled kernel: pairs (row, head) and keys of a tile, warps, and tiles in flight."""

    m: int
    n: int
    warps: int
    stages: int


def blocks(head_dim: int, dtype: torch.dtype, entries: int, device: torch.device | str = "cpu") -> Blocks:
    """Sizes for groups of up to `entries` pairs (row, query head of a kv head): tuned for the card, else fixed.

    The fixed sizes are for H100 and H200. Few entries are bound by memory: tiles are small, so that several programs on
    one processor keep keys in flight. Many entries are bound by the tensor cores: each of two groups of four warps
    multiplies 64 rows at once. float32 is for exactness: its products do not run on tensor cores.
    """
    device = torch.device(device)
    fixed = _fixed(head_dim, dtype, entries)
    if device.type != "cuda":
        return fixed
    tuned = choices(torch.cuda.get_device_name(device), cache_file())
    return tuned.get(variant(head_dim, dtype, entries), fixed)


def variant(head_dim: int, dtype: torch.dtype, entries: int) -> str:
    """The key of tuned sizes in the cache file: entries count by powers of two, up to the largest tile."""
    return f"{head_dim} {str(dtype).removeprefix('torch.')} {min(_power(entries), LARGEST)}"


def cache_file() -> Path:
    """The file of tuned sizes by card: `spanlab/blocks.json` in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "spanlab" / "blocks.json"


@cache
def choices(card: str, file: Path) -> dict[str, Blocks]:
    """Tuned sizes of a card by variant; ValueError for a file that `save_choices` cannot have written."""
    try:
        stored = json.loads(file.read_text())[card] if file.exists() else {}
        return {name: Blocks(**sizes) for name, sizes in stored.items()}
    except KeyError:
        return {}
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{file}: expected sizes of blocks by card and variant, as tune writes them.") from error


def save_choices(card: str, tuned: dict[str, Blocks], file: Path) -> None:
    """Add tuned sizes of one card to a file, and use them from now on."""
    stored = json.loads(file.read_text()) if file.exists() else {}
    stored[card] = stored.get(card, {}) | {name: asdict(sizes) for name, sizes in tuned.items()}
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n")
    temporary.replace(file)  # a concurrent reader sees the old file or the new one
    choices.cache_clear()


def _power(entries: int) -> int:
    return max(16, 1 << (entries - 1).bit_length())


def _fixed(head_dim: int, dtype: torch.dtype, entries: int) -> Blocks:
    rows, wide = _power(entries), head_dim > 128
    if dtype == torch.float32:
        return Blocks(min(rows, 32), 32, 8, 2)
    if rows <= 32:
        return Blocks(rows, 32 if wide else 64, 4, 3)
    if rows <= 64:
        return Blocks(64, 32 if wide else 64, 8, 3)
    return Blocks(LARGEST, 32 if wide else 64, 8, 2 if wide else 3)
