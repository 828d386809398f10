"""A toy study that is run, resumed and replaced under one name."""

from collections.abc import Callable
from pathlib import Path

import pytest

from ..conftest import NO_LOAD

TOY = ("workload.documents=2", "workload.questions_per_document=4", "workers=1", "seeds=[0]", *NO_LOAD)
RESUME = "output.if_exists=resume"
#: Files of a finished run without figures.
FILES = {"config.yaml", "records", "report.html", "runs", "summary.json", "tables", "tables.json"}


@pytest.fixture
def toy(run_here, tmp_path: Path) -> Callable[..., Path]:
    """Run the toy under the name `mine`, in tmp_path or below; later settings replace those of the toy."""

    def run(*overrides: str, below: str = "") -> Path:
        return run_here(tmp_path / below, "smoke", *TOY, "output.run=mine", *overrides)

    return run
