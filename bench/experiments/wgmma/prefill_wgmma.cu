#include "prefill_wgmma.cuh"
#define KERNEL(name, ...) extern "C" __global__ void __launch_bounds__(__VA_ARGS__) name(const __grid_constant__ Params p)
KERNEL(route_large_bf16, 1024) {
    extern __shared__ i32 shared[];
    wait_for_previous();
    let_next_start();
    if (blockIdx.x > 0) prepare_wide(p, blockIdx.x - 1);
    else route_large(p, shared);
}
#define GEMMS(suffix, ...)                                                                                             \
    KERNEL(gate_up_prefill_##suffix, WIDE_THREADS, 1) { gemm_wide<__VA_ARGS__, false>(p); }                         \
    KERNEL(down_prefill_##suffix, WIDE_THREADS, 1) { gemm_wide<__VA_ARGS__, true>(p); }
GEMMS(w2_bf16, W2, Bf16)
GEMMS(fp4_bf16, Fp4, Bf16)
