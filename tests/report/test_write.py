"""Figures are written atomically, under stable names, with the same bytes each time."""

import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import pytest

from spanlab.report.curves import FIGURES
from spanlab.report.style import write_figure


def draw_one(study, name, folder):
    return write_figure(partial(FIGURES[name], study), folder / name)


def test_second_write_gives_the_same_bytes(studies, tmp_path):
    study = studies.make_study(dict(list(studies.ARMS.items())[::6]), seeds=2, requests=200)
    first, second = (
        [path for name in FIGURES for path in draw_one(study, name, tmp_path / run)] for run in ("first", "second")
    )
    assert [path.name for path in first] == [f"{name}.{kind}" for name in FIGURES for kind in ("png", "pdf")]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    assert sorted(tmp_path.glob("first/*")) == sorted(first)


def test_a_process_pool_writes_the_same_bytes(degenerate, tmp_path):
    study = degenerate["one arm, one seed"]
    (direct,) = (draw_one(study, "pareto_tokens", tmp_path / "here")[:1],)
    with ProcessPoolExecutor(1) as pool:
        draw = partial(FIGURES["pareto_tokens"], study)
        pooled = pool.submit(write_figure, draw, tmp_path / "there" / "pareto_tokens").result()
    assert direct[0].read_bytes() == pooled[0].read_bytes()


def test_a_users_style_does_not_change_the_bytes(degenerate, tmp_path):
    import matplotlib

    study = degenerate["one arm, one seed"]
    plain = draw_one(study, "pareto_tokens", tmp_path / "plain")
    with matplotlib.rc_context({"font.size": 20, "axes.facecolor": "red"}):
        styled = draw_one(study, "pareto_tokens", tmp_path / "styled")
    assert [path.read_bytes() for path in plain] == [path.read_bytes() for path in styled]


def test_a_failed_write_preserves_the_old_file(degenerate, tmp_path, monkeypatch):
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    study = degenerate["one arm, one seed"]
    (png, _) = draw_one(study, "pareto_tokens", tmp_path)
    before = png.read_bytes()

    def half(self, path, **_):
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(FigureCanvasAgg, "print_png", half)
    with pytest.raises(OSError, match="disk full"):
        draw_one(study, "pareto_tokens", tmp_path)
    assert png.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        (
            ("spanlab.report.data", "spanlab.analyses.summary", "spanlab.report.table", "spanlab.report.figures"),
            "matplotlib",
        ),
        (("spanlab.report.style", "spanlab.report.curves", "spanlab.report.sweep"), "matplotlib"),
    ],
)
def test_imports_avoid_heavy_modules(modules, absent):
    code = f"import sys, {', '.join(modules)}; sys.exit({absent!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
