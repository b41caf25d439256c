#!/usr/bin/env bash
# Inline misses: gathers inside a graph, decode and a prompt at DeepSeek-V4-Flash's size, churn, and servers. Output goes
# to $OUT; COMMIT names the commit where there is no git history.
#   bench/h200/run_inline.sh [gather|churn|host|ds4|ahead|small|serve ...]
# `ds4` takes 73 GiB of GPU memory and as much page-locked host memory, which takes a minute to lock; `small` is the same
# with fewer layers, to see whether everything works.
set -uo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
parts=("$@")
[[ ${#parts[@]} -gt 0 ]] || parts=(gather churn ds4)
inline=(python3 bench/harness/inline.py "${commit[@]}")
for part in "${parts[@]}"; do
    case $part in
        gather) step inline-gather 60 python3 bench/inline_gather.py --results "$OUT" "${commit[@]}" ;;
        churn) step inline-churn 90 "${inline[@]}" --parts churn --seconds 75 --results "$OUT" ;;
        host) step inline-host 90 python3 bench/host_cost.py --rounds 3 --results "$OUT" "${commit[@]}" ;;
        ds4) step inline-ds4 300 "${inline[@]}" --parts decode prompt timeline --seconds 240 --results "$OUT" ;;
        ahead) step inline-ahead 300 "${inline[@]}" --parts decode --lookahead 6 --layers 14 --dense-mb 150 --steps 48 \
                --warm 48 --batch-steps 16 --batch-warm 16 --seconds 200 --results "$OUT" ;;
        small)
            step inline-small 90 "${inline[@]}" --layers 4 --steps 32 --batch-steps 8 --batch-warm 8 --prompt-tokens 2048 \
                --churn-steps 500 --seconds 60 --results "$OUT/small"
            ;;
        serve)
            step inline-serve 570 python3 bench/serve.py --rounds 3 --single-tokens 256 --at-once 5 --seconds 400 \
                --profile --results "$OUT" --logs "$OUT/servers.log" "${commit[@]}"
            ;;
        *)
            echo "no part is called $part: gather, churn, host, ds4, ahead, small, serve" >&2
            exit 2
            ;;
    esac
done
finish
