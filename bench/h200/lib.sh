# Shared by the scripts beside it: where output goes, and steps that may fail without stopping the others.
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
OUT=${OUT:-bench/h200/out}
mkdir -p "$OUT"
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
commit=()
[[ -z ${COMMIT:-} ]] || commit=(--commit "$COMMIT")
report=()

# step NAME SECONDS COMMAND...: run it for so long at most, its output to the screen and to $OUT/NAME.log. It is
# interrupted, not ended, so that pytest still says what has failed by then.
step() {
    local name=$1 limit=$2 started=$SECONDS status=0
    shift 2
    printf '\n== %s\n' "$name"
    timeout --signal=INT --kill-after=20 "$limit" "$@" > >(tee "$OUT/$name.log") 2>&1 || status=$?
    report+=("$(printf '%-24s status %-4s %4d s' "$name" "$status" $((SECONDS - started)))")
    [[ $status == 0 ]] || failed=1
}

# finish: what every step did; the status is 1 if any failed.
finish() {
    printf '\n== summary (%d s)\n' "$SECONDS"
    printf '%s\n' "${report[@]}" | tee "$OUT/summary.txt"
    exit "${failed:-0}"
}
