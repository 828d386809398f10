"""Draw docs/figures/map_weight.png: bytes of a stored span of a hybrid, over its length.

    .venvs/sim/bin/python docs/map_weight.py

The bytes are computed by `ModelSpec` and `map_bytes`, not measured.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from spanlab.core.repair import MapRules, map_bytes
from spanlab.model_files import find_spec
from spanlab.model_spec import ModelSpec
from spanlab.report.style import Margins, framed_with, label, write_figure

STEM = Path(__file__).parent / "figures" / "map_weight"
LENGTHS = np.geomspace(64, 65536, 200)
#: Sizes of Kimi-Linear-48B: MLA stores 576 numbers a token and layer, KDA 32 heads of 128 · 128.
KIMI_LIKE = ModelSpec(
    name="Kimi-Linear-like",
    attention_layers=7,
    recurrent_layers=20,
    hidden_size=2304,
    intermediate_size=9216,
    vocab_size=163840,
    attention_heads=32,
    kv_heads=1,
    head_dim=288,
    recurrent_key_heads=32,
    recurrent_value_heads=32,
    recurrent_key_dim=128,
    recurrent_value_dim=128,
    conv_kernel=4,
)
COLOURS = ("#0072b2", "#d55e00", "#117733", "#aa4499")


def models() -> list[ModelSpec]:
    """Return the models of the figure."""
    return [*map(find_spec, ("qwen3.5-0.8b", "qwen3.5-27b", "qwen3-next-80b-a3b")), KIMI_LIKE]


def stored(model: ModelSpec) -> dict[str, int]:
    """Return the bytes stored with a span's KV, by the label of the panel."""
    return {
        "a checkpoint: one order of documents": model.state_bytes,
        "the map, exact, float32: any order": map_bytes(MapRules(), model),
        "the map, rank 4, bfloat16: any order": map_bytes(
            MapRules("low_rank", 4, "bfloat16"), model
        ),
    }


def draw() -> Figure:
    """Draw bytes of a stored span ÷ bytes of its KV; a dot marks the length at which state or map
    equals the KV."""
    footer = (
        "computed from the sizes of the models; KV in bfloat16, states and exact maps in float32"
    )
    title = "From which length on does a span's map weigh less than its KV?"
    figure, axes = framed_with(
        footer, title, 1, 3, height=3.6, share=("all", "all"), margins=Margins(bottom=1.1)
    )
    for ax, panel in zip(axes[0], stored(KIMI_LIKE), strict=True):
        _panel(ax, panel)
    axes[0][0].set_ylabel("stored bytes ÷ bytes of KV", fontsize=9)
    lines = axes[0][0].get_lines()[::2]
    figure.legend(
        lines,
        [model.name for model in models()],
        loc="lower center",
        bbox_to_anchor=(0.5, 0.07),
        ncols=4,
        fontsize=8,
        frameon=False,
    )
    return figure


def _panel(ax: Axes, title: str) -> None:
    for model, colour in zip(models(), COLOURS, strict=True):
        even = stored(model)[title] / model.kv_bytes_per_token
        ax.plot(LENGTHS, 1 + even / LENGTHS, color=colour)
        ax.plot([even], [2], "o", color=colour, markersize=5)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_ylim(1, 60)
    ax.set_yticks([1, 2, 5, 10, 50], ["1 ×", "2 ×", "5 ×", "10 ×", "50 ×"])
    ax.set_xticks([64, 512, 4096, 32768], ["64", "512", "4 k", "32 k"])
    ax.minorticks_off()
    ax.set_title(title, fontsize=8.5)
    label(ax, "tokens of the span", size=9)


if __name__ == "__main__":
    write_figure(draw, STEM)
    STEM.with_suffix(".pdf").unlink()
