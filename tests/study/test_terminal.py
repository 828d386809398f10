"""Output to a stdout that is no terminal."""

import pytest

from spanlab.study.folder import printed


@pytest.mark.parametrize(("columns", "width"), [("", 240), ("100", 100), ("0", 240), ("wide", 240)])
def test_width_of_a_file_is_columns_or_wide(columns, width, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", columns)
    with printed() as console:
        assert console.width == width
        console.print("x" * 240)
    assert max(map(len, capsys.readouterr().out.splitlines())) == min(240, width)
