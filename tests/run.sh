#!/usr/bin/env bash
# bash tests/run.sh: ruff, mypy, the import contracts, then every default test. With arguments, only pytest, and they are its:
# bash tests/run.sh -k radix; bash tests/run.sh -m slow; bash tests/run.sh tests/core;
# bash tests/run.sh -m oracle; bash tests/run.sh -m live.
# Paths start at the folder you are in, or at the repository.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/../requirements/setup.sh"
case " $* " in *" -m oracle "*) set_up vllm ;; esac # vLLM, SGLang and LMCache, several GB
set_up dev
here="$PWD"
unset PYTHONDONTWRITEBYTECODE # tests start many processes, which would else each compile all modules
cd "$root"

if (($#)); then
    arguments=() previous=""
    for argument in "$@"; do
        case "$argument" in
            -* | /*) ;;
            *) [[ $previous == -? || ! -e $here/${argument%%::*} ]] || argument="$here/$argument" ;;
        esac
        previous="$argument"
        arguments+=("$argument")
    done
    exec "$venv/bin/pytest" "${arguments[@]}"
fi

failed=""
check() {
    echo "== $*"
    "$venv/bin/$1" "${@:2}" || failed="$failed $1"
}
check ruff check
check ruff format --check
check mypy
check lint-imports
check pytest --numprocesses=auto --dist=worksteal
[[ -z $failed ]] || fail "failed:$failed"
