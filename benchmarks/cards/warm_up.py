"""Compile the kernels of every arm for this card, one process per arm; Triton caches them on disk.

    python benchmarks/cards/warm_up.py --device cuda --out FOLDER --model NAME --hybrid NAME ARM...

A kernel depends on the sizes of a layer, not on their number: the attention model is cut to two layers. The arms are
those of `pic_bench`; the hybrid runs `checkpoint_bench`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from spanlab.model_files import find_config

PROGRAM = [sys.executable, "-c", "from spanlab.cli import main; main()"]
OPTIONS = ["tracking=none", "output.figures=false", "output.run=run", "output.if_exists=replace"]


def main() -> None:
    """Run all processes, print how long each took, and fail if any does."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--hybrid", required=True)
    parser.add_argument("--prefill", default="plain")
    parser.add_argument("--tokens", type=int, default=500, help="of a document")
    parser.add_argument("arms", nargs="+")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    two_layers = given.out / f"{given.model}-layers.json"
    two_layers.write_text(json.dumps(dict(find_config(given.model).keys) | {"num_hidden_layers": 2}))
    shape = [
        f"workload.repeated_documents.{key}" for key in (f"document_tokens={given.tokens}", "trials=1", "repeats=1")
    ]
    studies = {
        arm: ["pic_bench", f"model={two_layers}", f"engine.name={two_layers}", f"only=[none,{arm}]", "sweep=[]", *shape]
        for arm in given.arms
    }
    studies["hybrid"] = ["checkpoint_bench", f"model={given.hybrid}", "only=[none,block_64]", "sweep=[]", "seeds=[0]"]
    studies["hybrid"] += [
        f"workload.forked_sequence.{key}" for key in (f"prompt_tokens={4 * given.tokens}", "visits=1")
    ]
    processes, began = {}, time.monotonic()
    for name, (entry, *overrides) in studies.items():
        overrides += [f"device={given.device}", f"engine.prefill={given.prefill}", f"output.root={given.out / name}"]
        with (given.out / f"{name}.txt").open("wb") as log:
            command = [*PROGRAM, "-cn", entry, *overrides, *OPTIONS]
            processes[name] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    failed = []
    for name, process in processes.items():
        code = process.wait()
        print(f"{name}: exit code {code} after {time.monotonic() - began:.1f} s at most")
        if code:
            failed.append(name)
            print("\n".join((given.out / f"{name}.txt").read_text(errors="replace").splitlines()[-20:]))
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
