"""What is left of a comparison: the summary, the table, the figures."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import orjson
from rich.console import Console
from rich.text import Text

from spanlab.fidelity import figures
from spanlab.fidelity.cells import Cell, Files
from spanlab.fidelity.compare import Compared, compared
from spanlab.fidelity.errors import delays
from spanlab.fidelity.measure import Saturation
from spanlab.fidelity.replay import Trace
from spanlab.fidelity.summary import summarise
from spanlab.fidelity.table import cells_table, decisions_table, goals_table
from spanlab.settings import Study
from spanlab.study import summary as sums
from spanlab.study import watch
from spanlab.study.device import EngineFacts
from spanlab.study.noise import Noise, successive
from spanlab.study.results import describe_store
from spanlab.terminal import printed
from spanlab.tracking import Tracker
from spanlab.workloads import Workload
from spanlab_sim.calibrated import Profile


@dataclass(frozen=True)
class Ground:
    """What was measured: files of the cells, the loads' arrivals, and the profile."""

    files: Files
    saturation: Saturation
    traces: dict[float, Trace]
    profile: Profile


@dataclass(frozen=True)
class Report:
    """A comparison that has been measured, and what to say of it; `failed` holds a sentence by arm."""

    study: Study
    name: str
    workload: Workload
    facts: EngineFacts
    ground: Ground
    failed: dict[str, str]

    def leave(self, run_facts: dict[str, Any], tracker: Tracker) -> None:
        """Simulate, compare, print, draw, write the summary."""
        found = self._compared()
        noise = self._noise()
        sentence = noise.sentence("conclusions")
        told = {"machine_noise": noise.summary(), "caveats": [sentence] if sentence else []}
        summary = self._head() | told | {"simulated": summarise(found)} | run_facts
        footer = " · ".join([self._footer(run_facts["commit"]), *told["caveats"]])
        with printed(200) as console:
            self._print(summary["simulated"], footer, console)
            console.print(Text(noise.words))
        if self.study.output.figures:
            drawn = figures.write(found, footer, self.ground.files.folder / "figures")
            tracker.figures([path for path in drawn if path.suffix == ".png"])
        (self.ground.files.folder / "summary.json").write_bytes(
            orjson.dumps(summary, option=orjson.OPT_INDENT_2) + b"\n"
        )
        tracker.summary(summary)

    def _compared(self) -> list[Compared]:
        arms = [arm for arm in self.study.chosen() if arm not in self.failed]
        return [self._cell(arm, share) for share in self.ground.traces for arm in arms]

    def _noise(self) -> Noise:
        """A/A of the baseline by its repeats in a row at each load, and every reading."""
        files, baseline = self.ground.files, self.study.baseline
        found: list[float] = []
        for share in self.ground.traces if baseline not in self.failed else ():
            cells = [Cell(baseline, share, repeat) for repeat in range(self.study.fidelity.repeats)]
            delay = [delays(sums.read_records(files.records(cell)))["ttft_s"] for cell in cells]
            found += successive([float(one.mean()) for one in delay])
        return Noise.of(found, watch.readings(files.readings), watch.cores())

    def _cell(self, arm: str, share: float) -> Compared:
        files, trace, profile = self.ground.files, self.ground.traces[share], self.ground.profile
        cells = [Cell(arm, share, repeat) for repeat in range(self.study.fidelity.repeats)]
        measured = [delays(sums.read_records(files.records(cell))) for cell in cells]
        logs = [files.steps(cell) for cell in cells]
        return compared(self.study, arm, share, trace, profile, measured, logs, files.simulated(arm, share))

    def _head(self) -> dict[str, Any]:
        provenance = self.workload.provenance
        return {
            "study": self.name,
            "workload": {
                "name": self.workload.name,
                "kind": self.study.workload.kind,
                "provenance": provenance.kind,
                "detail": provenance.detail,
                "requests": len(next(iter(self.ground.traces.values())).requests),
            },
            "model": self.study.model.name,
            "engine": asdict(self.facts),
            "store": describe_store(self.study),
            "seeds": self.study.seeds,
            "warmup_fraction": self.study.warmup_fraction,
            "baseline": self.study.baseline,
            "saturation": asdict(self.ground.saturation),
            "rates_rps": {f"{share:g}": trace.rate_rps for share, trace in self.ground.traces.items()},
            "repeats": self.study.fidelity.repeats,
            "profile": asdict(self.ground.profile),
            "failed": self.failed,
        }

    def _footer(self, commit: str) -> str:
        profile = self.ground.profile
        return (
            f"{self.name} · {self.workload.provenance.line()} · {self.study.model.name} · {self.facts.line()} · "
            f"{self.study.arrivals.kind} arrivals, {self.study.fidelity.repeats} repeats · "
            f"store {describe_store(self.study)} · simulator calibrated {profile.date} at {profile.steps} steps · "
            f"commit {commit}"
        )

    def _print(self, own: dict[str, Any], footer: str, console: Console) -> None:
        tables = cells_table(own["cells"]), goals_table(own["goals"]), decisions_table(own["decisions"])
        console.print(Text(f"{footer}\n"))
        for table in tables:
            console.print(table, "")
        for sentence in self.failed.values():
            console.print(Text(f"failed: {sentence}"))
