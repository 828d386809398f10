#!/usr/bin/env bash
# bash requirements/compile.sh: compiles the simulator for the sources as they are (see compiled=always).
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/setup.sh"
set_up compile
exec "$venv/bin/python" -c "from spanlab.compiled import build; build()"
