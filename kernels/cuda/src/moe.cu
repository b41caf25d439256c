// The kernels of a Mixture-of-Experts layer, by codec, instruction and type of activations.
#include "combine.cuh"
#include "decode.cuh"
#include "prefill.cuh"

#define KERNEL(name, ...) extern "C" __global__ void __launch_bounds__(__VA_ARGS__) name(const __grid_constant__ Params p)

// route: block 0 lists the work, block 1 + t prepares token t.
#define ROUTE(suffix, PREPARE)                                                                                         \
    KERNEL(route_small_##suffix, 256) {                                                                                \
        wait_for_previous();                                                                                           \
        let_next_start();                                                                                              \
        if (blockIdx.x > 0) {                                                                                          \
            PREPARE;                                                                                                   \
        } else if (p.mode == BEGIN) {                                                                                  \
            forget_pairs(p);                                                                                           \
        } else {                                                                                                       \
            route_small(p);                                                                                            \
        }                                                                                                              \
    }                                                                                                                  \
    KERNEL(route_large_##suffix, 1024, 1) {                                                                            \
        extern __shared__ i32 shared[];                                                                                \
        wait_for_previous();                                                                                           \
        let_next_start();                                                                                              \
        if (blockIdx.x > 0) {                                                                                          \
            PREPARE;                                                                                                   \
        } else if (p.mode == BEGIN) {                                                                                  \
            forget_pairs(p);                                                                                           \
        } else {                                                                                                       \
            route_large(p, shared);                                                                                    \
        }                                                                                                              \
    }

// Between route and the GEMMs of an admitted layer. Rows that are in the pool are multiplied meanwhile: those GEMMs wait
// for this kernel before the first row that is not, and at their end.
#define GATHER(name, ...)                                                                                              \
    KERNEL(name, GATHER_THREADS) {                                                                                     \
        wait_for_previous();                                                                                           \
        let_next_start();                                                                                              \
        copy_missing<__VA_ARGS__>(p);                                                                                  \
    }
GATHER(gather_missing, false)
GATHER(gather_ahead, true) // in its place where layers look ahead

// Beside a layer, one after the other: what the next one is likely to want, and its rows on their way.
extern "C" __global__ void __launch_bounds__(CHOICE_THREADS) choose_guesses(const __grid_constant__ Guess p) {
    let_next_start();
    choose_rows(p);
}
extern "C" __global__ void __launch_bounds__(GATHER_THREADS) fetch_guesses(const __grid_constant__ Guess p) {
    wait_for_previous();
    fetch_rows(p);
}

#define GEMMS(suffix, ...)                                                                                             \
    KERNEL(gate_up_decode_##suffix, DECODE_THREADS, __VA_ARGS__::BLOCKS) { gate_up_decode<__VA_ARGS__>(p); }    \
    KERNEL(down_decode_##suffix, DECODE_THREADS, __VA_ARGS__::BLOCKS) { down_decode<__VA_ARGS__>(p); }          \
    KERNEL(gate_up_prefill_##suffix, PREFILL_THREADS) { gemm_prefill<__VA_ARGS__, false>(p); }                         \
    KERNEL(down_prefill_##suffix, PREFILL_THREADS) { gemm_prefill<__VA_ARGS__, true>(p); }

ROUTE(plain, ) // verbatim rows multiply the activations as they are
#if !defined(HAS_MX) || defined(EMULATE_MX) // block-scaled instructions take their place where there are any
ROUTE(bf16, prepare_f16<Bf16>(p, blockIdx.x - 1))
ROUTE(f16, prepare_f16<F16>(p, blockIdx.x - 1))

GEMMS(w2_bf16, F16Path<W2, Bf16>)
GEMMS(w2_f16, F16Path<W2, F16>)
GEMMS(fp4_bf16, F16Path<Fp4, Bf16>)
GEMMS(fp4_f16, F16Path<Fp4, F16>)
#endif
GEMMS(bf16_bf16, Bf16Path)

KERNEL(combine_bf16, 128) { combine_token<Bf16>(p); }
KERNEL(combine_f16, 128) { combine_token<F16>(p); }

#if defined(HAS_MX)
ROUTE(bf16_mx, prepare_mx<Bf16>(p, blockIdx.x - 1))
ROUTE(f16_mx, prepare_mx<F16>(p, blockIdx.x - 1))
GEMMS(w2_bf16_mx, MxPath<W2, Bf16>)
GEMMS(w2_f16_mx, MxPath<W2, F16>)
GEMMS(fp4_bf16_mx, MxPath<Fp4, Bf16>)
GEMMS(fp4_f16_mx, MxPath<Fp4, F16>)
#endif
