#!/usr/bin/env bash
# bash runall.sh -cn quality_sim [key=value …]: brings the environment that is missing, then runs that entry of conf/.
# Relative paths in the arguments start at the folder you are in; output.root alone starts at this repository.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/requirements/setup.sh"

environment=sim
for argument in "$@"; do
    case "$argument" in *hydra/launcher=submitit*) environment=cluster ;; esac
done

set_up "$environment"
exec "$venv/bin/spanlab" "$@"
