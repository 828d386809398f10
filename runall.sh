#!/usr/bin/env bash
# bash runall.sh -cn quality_sim [key=value …]: brings the environment that is missing, then runs that entry of conf/.
# Relative paths in the arguments start at the folder you are in; output.root alone starts at this repository.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/requirements/setup.sh"

environment=sim previous=""
for argument in "$@"; do
    case "$previous $argument" in
        *"-cn "* | *"--config-name "* | *" --config-name="* | *" -cn"*)
            case "$argument" in *_bench | *_clean | *_fidelity | *calibrate) environment=engine ;; esac ;;
        *" backend=engine") environment=engine ;;
        *" backend=sim") environment=sim ;; # the twin of an engine study
        *" hydra/launcher=submitit"* | *" executor=dask" | *" executor.kind=dask") [[ $environment == engine ]] || environment=cluster ;; # engine has it too
    esac
    previous="$argument"
done

set_up "$environment"
exec "$venv/bin/spanlab" "$@"
