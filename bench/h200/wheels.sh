#!/usr/bin/env bash
# Fetches the wheels that a GPU machine with torch, transformers and their company usually lacks, for Python 3.12 on
# x86-64, so that bench/h200/setup.sh can install without a package index.
#   bench/h200/wheels.sh [FOLDER] [NAME==VERSION ...]
set -euo pipefail
folder=${1:-.gpu/wheels}
shift || true
packages=("$@")
[[ ${#packages[@]} -gt 0 ]] || packages=(annotated-types==0.8.0 pydantic==2.14.4 pydantic-core==2.50.5 setuptools==80.9.0 typing-inspection==0.4.5)
mkdir -p "$folder"
python3 -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
    --dest "$folder" "${packages[@]}"
ls "$folder"
