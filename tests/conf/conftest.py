"""The console script, in this process or in a new one, and toy inputs for it."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra

from spanlab import cli

from ..support.files import write_lines
from ..support.script import SCRIPT
from ..support.tokenizers import save_word_tokenizer

TOY = (
    "workload.documents=2",
    "workload.questions_per_document=3",
    "seeds=[0]",
    "load.rates_rps=[]",
    "load.arms=[]",
    "output.figures=false",
    "tracking.kind=none",
    "analyses=[summary]",
    "workers=1",
)


@dataclass(frozen=True)
class Outcome:
    """How a call of the script ended."""

    code: int
    out: str
    err: str

    @property
    def ours(self) -> list[str]:
        """Lines that the script itself wrote to stderr."""
        return [line for line in self.err.splitlines() if line.startswith("spanlab: ")]


def check_one_sentence(outcome: Outcome, *words: str) -> None:
    """The outcome is a failure with exactly one line, which begins with the first word and contains the others."""
    assert "Traceback" not in outcome.err, outcome.err
    assert outcome.code == 1, outcome
    assert len(outcome.ours) == 1, outcome.err
    said = outcome.ours[0].removeprefix("spanlab: ")
    assert said.startswith(words[0]), said
    assert all(word in said for word in words), said


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file below a folder with its bytes."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def toy() -> tuple[str, ...]:
    """Overrides that make a study small, quick and quiet."""
    return TOY


@pytest.fixture
def one_sentence() -> Callable[..., None]:
    """`check_one_sentence`."""
    return check_one_sentence


@pytest.fixture
def bytes_below() -> Callable[[Path], dict[str, bytes]]:
    """`snapshot`."""
    return snapshot


@pytest.fixture
def spanlab(monkeypatch, capsys) -> Callable[..., Outcome]:
    """Call the console script's function here: the same path, without a second of imports."""

    def call(*arguments: str) -> Outcome:
        GlobalHydra.instance().clear()
        monkeypatch.setenv("HYDRA_FULL_ERROR", "0")  # so that the script's own setting is undone afterwards
        monkeypatch.delenv("SPANLAB_TRACEBACK", raising=False)
        monkeypatch.setattr(sys, "argv", ["spanlab", *arguments])
        code = 0
        try:
            cli.main()
        except SystemExit as left:
            code = left.code if isinstance(left.code, int) else 0
        return Outcome(code, *capsys.readouterr())

    return call


@pytest.fixture
def console() -> Callable[..., Outcome]:
    """Call the installed script in a new process."""

    def call(*arguments: str, **options) -> Outcome:
        done = subprocess.run([SCRIPT, *arguments], capture_output=True, text=True, timeout=120, **options)
        return Outcome(done.returncode, done.stdout, done.stderr)

    return call


@pytest.fixture(scope="session")
def toy_parquet(tmp_path_factory) -> Path:
    """Two groups of prompts as token ids: each of six shares all but its last tokens with its group."""
    import pyarrow as pa
    from pyarrow import parquet

    prompts = [[1000 * group + i for i in range(300)] + [7, row] for row in range(6) for group in (1, 2)]
    table = {
        "group_id": [group for _ in range(6) for group in (1, 2)],
        "idx": [row for row in range(6) for _ in (1, 2)],
        "tokens": prompts,
        "n_tokens": [len(prompt) for prompt in prompts],
    }
    path = tmp_path_factory.mktemp("parquet") / "toy.parquet"
    parquet.write_table(pa.table(table), path)
    return path


@pytest.fixture(scope="session")
def toy_quality(tmp_path_factory) -> dict[str, Path]:
    """A QuALITY jsonl of two articles with two questions each, and a tokenizer with its words."""
    rows = [
        {
            "article_id": name,
            "article": " ".join(f"{name}{i}" for i in range(length)),
            "questions": [
                {"question": f"why {name} {i} ?", "options": [f"{letter}{i}" for letter in "abcd"], "gold_label": 1 + i}
                for i in range(2)
            ],
        }
        for name, length in (("alpha", 200), ("beta", 350))
    ]
    folder = tmp_path_factory.mktemp("quality")
    path = write_lines(folder / "toy.jsonl", *rows)
    return {"path": path, "tokenizer": save_word_tokenizer(folder / "tokenizer.json", path.read_text(encoding="utf-8"))}
