#!/usr/bin/env bash
# bash runall.sh -cn quality_sim [key=value …]: brings the environment that is missing, then runs that entry of conf/.
# The program starts this script again where the settings need an environment with more packages.
# Relative paths in the arguments start at the folder you are in; output.root alone starts at this repository.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/requirements/setup.sh"

environment="${SPANLAB_ENVIRONMENT:-}"
for widest in answers engine cluster; do # each holds all that the next one holds
    venv="$root/.venvs/$widest"
    [[ -n $environment ]] || ! is_complete "$widest" || environment="$widest"
done
export SPANLAB_ENVIRONMENT="${environment:-sim}"

set_up "$SPANLAB_ENVIRONMENT"
exec "$venv/bin/spanlab" "$@"
