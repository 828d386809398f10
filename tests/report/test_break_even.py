"""The map of the analysis break_even: a colour and two gains per point."""

from dataclasses import replace

from matplotlib.colors import to_hex

from spanlab.analyses.families import break_even_table, draw_break_even
from spanlab.report.sweep import SweepPoint

from ..support.figures import PROVENANCE, check_fits


def step(family: str, gain: float | None, rate: float) -> dict:
    ends = None if gain is None else {"mean": gain, "low": gain - 0.1, "high": gain + 0.1}
    return {"family": family, "arm": f"{family}_1", "ttft_mean_s": 0.1, "token_hit_rate": rate, "gain": ends}


def point(length: str, k: str, verdict: str, repaired: float | None, plain: float) -> SweepPoint:
    """A point of two settings with these gains over the best exact arm."""
    gains = (("prefix", None), ("cached_order", 1.2), ("repaired", repaired), ("plain", plain))
    steps = [step(family, gain, 0.25) for family, gain in gains]
    settings = {"workload.rag.passage_tokens": length, "workload.rag.k": k}
    summary = PROVENANCE | {"break_even": {"steps": steps, "verdict": verdict}}
    return replace(SweepPoint(" ".join(settings), f"{length}, {k}", "toy", summary), settings=settings)


POINTS = [
    point("64", "2", "prefix", 0.7, 1.0),
    point("64", "6", "plain", None, 1.5),
    point("1024", "2", "repaired", 2.0, 2.5),
]


def test_a_cell_shows_the_gains_of_repaired_and_plain():
    ax = draw_break_even(POINTS).axes[0]
    assert [text.get_text() for text in ax.texts] == ["0.7 / 1", "– / 1.5", "2 / 2.5"]
    assert [text.get_position() for text in ax.texts] == [(0.5, 0.5), (1.5, 0.5), (0.5, 1.5)]
    assert ax.get_xlabel() == "down: tokens per passage\nacross: passages per prompt"


def test_verdicts_have_the_colours_of_the_legend():
    figure = draw_break_even(POINTS)
    (legend,) = figure.legends
    named = zip(legend.get_texts(), legend.get_patches(), strict=True)
    colours = {text.get_text(): to_hex(patch.get_facecolor()) for text, patch in named}
    drawn = [to_hex(patch.get_facecolor()) for patch in figure.axes[0].patches]
    expected = ("prefix caching suffices", "only plain PIC pays", "repaired PIC pays")
    assert drawn == [colours[label] for label in expected]


def test_the_map_fits_into_its_frame():
    check_fits(draw_break_even(POINTS))


def test_the_table_has_a_row_per_point():
    table = break_even_table("break_even_1", POINTS)
    assert [cell.text for cell in table.rows[1]] == [
        "workload.rag.passage_tokens=64 workload.rag.k=6",
        "only plain PIC pays",
        "1.20 [1.10, 1.30] ×",
        "–",
        "1.50 [1.40, 1.60] ×",
        *["25.0 %"] * 4,
    ]
