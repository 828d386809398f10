#!/usr/bin/env bash
# bash requirements/pin.sh [--upgrade]: writes every requirements/*.txt anew from pyproject.toml. Needs uv.
# uv.lock names download addresses, so git ignores it; without it, or with --upgrade, everything moves to the newest.
set -euo pipefail
cd "$(dirname -- "${BASH_SOURCE[0]}")/.."

pin() {
    local file="requirements/$1.txt"
    {
        echo "# Made by bash requirements/pin.sh from pyproject.toml; not to be edited."
        uv export --quiet --frozen --format requirements-txt --no-header --no-emit-project "${@:2}"
    } >"$file.new"
    if grep '://' "$file.new"; then exit 1; fi
    mv "$file.new" "$file"
}

uv lock "$@"
pin sim
pin cluster --extra cluster
pin engine --extra cluster --extra engine --group torch-needs --prune torch
pin answers --extra cluster --extra engine --extra answers --group torch-needs --prune torch
pin dev --extra cluster --extra engine --group torch-needs --group dev --prune torch
pin compile --group compile
pin build --only-group build
pin uv --only-group uv
# torch apart, without hashes: which build of it is right, only the machine knows (requirements/setup.sh)
uv export --quiet --frozen --format requirements-txt --no-header --no-hashes --no-emit-project --extra engine |
    grep '^torch==' >requirements/torch.txt
