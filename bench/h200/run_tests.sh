#!/usr/bin/env bash
# The GPU tests, then every kernel under compute-sanitizer. Logs go to $OUT (default bench/h200/out). WORKERS: tests that
# run at once.
#   bench/h200/run_tests.sh [pytest|memcheck|racecheck ...]
set -uo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
parts=("$@")
[[ ${#parts[@]} -gt 0 ]] || parts=(pytest memcheck racecheck)
for part in "${parts[@]}"; do
    case $part in
        pytest)
            # Hundreds of tests, half of whose time is a processor's: several at once where pytest-xdist is installed.
            workers=()
            ! python3 -c 'import xdist' 2>/dev/null || workers=(-n "${WORKERS:-8}" --dist worksteal)
            # A thread for each, or as many times more as there are processors make them wait for each other.
            step pytest 570 env OMP_NUM_THREADS=1 python3 -m pytest -q -m "gpu and not vllm" -p no:cacheprovider --timeout 300 "${workers[@]}" tests
            ;;
        memcheck | racecheck | synccheck | initcheck)
            # Without torch's cache every tensor is an allocation of its own, so that an access past its end shows.
            step "$part" 240 env PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
                compute-sanitizer --tool "$part" --error-exitcode 9 --target-processes all \
                python3 bench/h200/sanitize.py
            ;;
        *)
            echo "no part is called $part: pytest, memcheck, racecheck, synccheck, initcheck" >&2
            exit 2
            ;;
    esac
done
finish
