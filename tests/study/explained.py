"""The analysis `explain` of logs made of bodies."""

import json
import random
from pathlib import Path
from typing import Any

from spanlab.cli import compose
from spanlab.study.run import run_study

from ..support.files import write_lines

GIVEN = ("executor.kind=here", "output.figures=false", "output.run=x")
_WORDS = "amber basin cobalt dune estuary fjord glacier harbour inlet jetty kelp lagoon meadow nectar orchard"
WORDS = _WORDS.split()


def explained(root: Path, *overrides: str) -> dict[str, Any]:
    study = compose("explain", [*GIVEN, *overrides])
    folder = run_study(study, "explain", root, show=False)
    assert folder == root / "explain" / "x"
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_bytes())
    assert (folder / "report.html").is_file()
    return summary


def invented(count: int, seed: int = 0) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=count))


def explained_bodies(folder: Path, *bodies: Any, settings: tuple[str, ...] = ()) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    rows = ({"timestamp": 1000 + 20 * index, **body} for index, body in enumerate(bodies))
    return explained(folder, f"log={write_lines(folder / 'log.jsonl', *rows)}", *settings)


def fixes_of(summary: dict[str, Any]) -> dict[str, float]:
    return {fix["name"]: fix["token_hit_rate"] for fix in summary["fixes"]}


def chat(system: Any, user: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "system", "content": system}, {"role": "user", "content": user}], **more}
