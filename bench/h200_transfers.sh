#!/usr/bin/env bash
# The transfer benchmark and the GPU tests of the allocators on a machine with a GPU and without this package installed.
#   bash bench/h200_transfers.sh COMMIT OUTPUT_FOLDER
set -euo pipefail
cd "$(dirname "$0")/.."
commit=${1:?the commit of this tree}
output=${2:?a folder for the results}
export PYTHONPATH="$PWD/.ci/src:$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
timeout 180 python3 -m pytest -q -m gpu -p no:cacheprovider tests/allocators
timeout 120 python3 bench/transfers.py --commit "$commit" --output "$output/transfers.json"
