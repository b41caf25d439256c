#!/usr/bin/env bash
# Kernels, transfers and decode steps. Results (JSON) and logs go to $OUT (default bench/h200/out); COMMIT names the
# commit where there is no git history. TRACES: a folder of more routing traces.
#   bench/h200/run_bench.sh [kernels|transfers|harness|packing|full ...]
set -uo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
parts=("$@")
[[ ${#parts[@]} -gt 0 ]] || parts=(kernels transfers harness)
harness=(python3 bench/harness/run.py --results "$OUT" "${commit[@]}")
for part in "${parts[@]}"; do
    case $part in
        kernels) step kernels 150 python3 bench/kernels.py --results "$OUT" "${commit[@]}" ;;
        packing)
            step packing 400 python3 bench/packing.py --device cuda:0 --output "$OUT/packing.json" "${commit[@]}"
            ;;
        transfers) step transfers 150 python3 bench/transfers.py --output "$OUT/transfers.json" "${commit[@]}" ;;
        harness)
            # The demo model's routing, its six layers stacked four times, with experts of DeepSeek-V4-Flash's size.
            step harness-recorded 120 "${harness[@]}" --label "recorded, demo" --tokens 1 8 \
                --trace bench/traces/demo_moe.npz --repeat-layers 4
            for trace in "${TRACES:-/nonexistent}"/flame_moe_290m.npz; do
                [[ ! -f $trace ]] || step harness-flame 120 "${harness[@]}" --label "recorded, flame" --tokens 1 \
                    --trace "$trace" --repeat-layers 3
            done
            step harness-ds4 180 "${harness[@]}" --label "deepseek-v4-flash, 10 layers" --layers 10 --tokens 1 8
            step harness-glm 120 "${harness[@]}" --shape glm-5.2 --label "glm-5.2, 4 layers" --layers 4 --tokens 1
            ;;
        full)
            # All of DeepSeek-V4-Flash: 72.6 GiB of rows in host memory and as many on the GPU.
            step harness-full 420 "${harness[@]}" --label "deepseek-v4-flash" --tokens 1 --dense-mb 150 \
                --coverage 100 25
            ;;
        *)
            echo "no part is called $part: kernels, transfers, harness, packing, full" >&2
            exit 2
            ;;
    esac
done
finish
