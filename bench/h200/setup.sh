#!/usr/bin/env bash
# Installs this checkout, editable, into the python3 on the path. On a machine without a package index the wheels that
# it lacks can lie in a folder (bench/h200/wheels.sh fetches them elsewhere).
#   bench/h200/setup.sh [WHEELS]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
wheels=${1:-.gpu/wheels}
pip=(python3 -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --disable-pip-version-check)
export PIP_ROOT_USER_ACTION=ignore
# setuptools only builds this package, in an environment of its own, and is not installed.
build=(--no-build-isolation)
for wheel in "$wheels"/*.whl; do
    case ${wheel##*/} in
        '*.whl') ;;
        setuptools-*) build=(--find-links "$wheels") ;;
        *) "${pip[@]}" "$wheel" ;;
    esac
done
"${pip[@]}" "${build[@]}" --editable .
python3 - <<'PYTHON'
import importlib.metadata as metadata

import torch

import ziggurat.integration.cli.main  # imports every dependency of the command line

gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU"
vllm = next((d.version for d in metadata.distributions() if d.metadata["Name"] == "vllm"), "none")
print(f"ziggurat {metadata.version('ziggurat')}, torch {torch.__version__}, vLLM {vllm}, {gpu}")
PYTHON
