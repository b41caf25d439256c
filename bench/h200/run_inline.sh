#!/usr/bin/env bash
# Inline misses: gathers inside a graph, decode and a prompt with DeepSeek-V4-Flash's experts, churn, vLLM's offloaders
# under the same layers, and servers. Output goes to $OUT; COMMIT names the commit where there is no git history.
#   bench/h200/run_inline.sh [gather|churn|host|decode|full|offloaders|ahead|small|serve ...]
# `decode` is 14 of the 43 layers, 24 GiB of GPU memory and as much page-locked host memory. `full` is all of them, 73 GiB
# of each, which take their time to lock. `offloaders` is 16 layers and needs vLLM and 60 GiB of host memory. `small` is a
# few layers of everything, to see whether it works.
set -uo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
parts=("$@")
[[ ${#parts[@]} -gt 0 ]] || parts=(gather churn decode)
inline=(python3 bench/harness/inline.py "${commit[@]}")
for part in "${parts[@]}"; do
    case $part in
        gather) step inline-gather 60 python3 bench/inline_gather.py --results "$OUT" "${commit[@]}" ;;
        churn) step inline-churn 90 "${inline[@]}" --parts churn --seconds 75 --results "$OUT" ;;
        host) step inline-host 90 python3 bench/host_cost.py --rounds 3 --results "$OUT" "${commit[@]}" ;;
        decode)
            step inline-decode 240 "${inline[@]}" --parts decode prompt timeline --layers 14 --dense-mb 150 --steps 48 \
                --warm 48 --batch-steps 16 --batch-warm 16 --seconds 150 --results "$OUT"
            ;;
        full)
            step inline-full 280 "${inline[@]}" --parts decode --name inline_full --tokens 1 8 --coverage 50 25 19 \
                --routing mapped --dense-mb 150 --steps 24 --warm 48 --batch-steps 8 --batch-warm 16 --seconds 220 \
                --results "$OUT"
            ;;
        offloaders)
            step inline-offloaders 290 "${inline[@]}" --parts decode offloaders --layers 16 --coverage 50 25 19 \
                --routing mapped --dense-mb 150 --steps 24 --warm 48 --batch-steps 12 --batch-warm 16 --seconds 230 \
                --results "$OUT"
            ;;
        ahead) step inline-ahead 300 "${inline[@]}" --parts decode --lookahead 6 --layers 14 --dense-mb 150 --steps 48 \
                --warm 48 --batch-steps 16 --batch-warm 16 --seconds 200 --results "$OUT" ;;
        small)
            small=("${inline[@]}" --layers 4 --steps 32 --batch-steps 8 --batch-warm 8 --results "$OUT/small")
            step inline-small 90 "${small[@]}" --prompt-tokens 2048 --churn-steps 500 --seconds 60
            step offloaders-small 90 "${small[@]}" --parts decode offloaders --routing mapped --seconds 60
            ;;
        serve)
            step inline-serve 570 python3 bench/serve.py --rounds 3 --single-tokens 256 --at-once 5 --seconds 400 \
                --profile --results "$OUT" --logs "$OUT/servers.log" "${commit[@]}"
            ;;
        *)
            echo "no part is called $part: gather, churn, host, decode, full, offloaders, ahead, small, serve" >&2
            exit 2
            ;;
    esac
done
finish
