"""The same settings give the same bytes for every executor."""

import os
from pathlib import Path

STUDY = ("workload.documents=2", "workload.questions_per_document=4", "store.total_gib=2", "output.run=x")
HERE = ("load.rates_rps=[16]", "load.arms=[dp_8]", "arms=checkpoints", "arrivals.rate_rps=20")


def test_hash_seeds_and_workers_change_no_byte(started, run_here, files_of, summary_of, tmp_path: Path):
    here = run_here(tmp_path / "here", "smoke", *STUDY, *HERE, "seeds=[0,1]", "workers=2")
    seed = "1" if os.environ.get("PYTHONHASHSEED") == "0" else "0"
    environment = os.environ | {"PYTHONHASHSEED": seed}
    process = started(tmp_path, "smoke", *STUDY, *HERE, "seeds=[0,1]", "workers=1", env=environment)
    assert process.wait(timeout=120) == 0, process.communicate()[1]
    folder = tmp_path / "quality" / "x"
    assert files_of(folder) == files_of(here)
    assert summary_of(folder) == summary_of(here)
    assert (folder / "config.yaml").read_bytes() == (here / "config.yaml").read_bytes()


def test_another_seed_changes_the_records(run_here, files_of, tmp_path: Path):
    toy = (*STUDY, "load.rates_rps=[]", "load.arms=[]", "workers=1", "only=[none]")
    first, second = (files_of(run_here(tmp_path, "smoke", *toy, f"seeds=[{seed}]")) for seed in (0, 1))
    assert first["records/none"] != second["records/none"]
