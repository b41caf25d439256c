#!/usr/bin/env bash
# vllm serve beside stock vLLM, and the identity gate on the GPU. Needs vLLM. Output goes to $OUT.
#   bench/h200/run_serve.sh [serve|replay|tests ...]
set -uo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
parts=("$@")
[[ ${#parts[@]} -gt 0 ]] || parts=(serve replay)
for part in "${parts[@]}"; do
    case $part in
        serve) step serve 330 python3 bench/serve.py --profile --results "$OUT" --logs "$OUT/servers.log" "${commit[@]}" ;;
        replay)
            step replay 330 python3 -m ziggurat.integration.cli.main replay bench/models/demo-moe-fp8 \
                -c bench/h200/tiers.yaml
            ;;
        tests)
            step vllm-tests 540 python3 -m pytest -q -m "gpu and vllm" -p no:cacheprovider --timeout 300 tests
            ;;
        *)
            echo "no part is called $part: serve, replay, tests" >&2
            exit 2
            ;;
    esac
done
finish
