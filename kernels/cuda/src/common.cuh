// Types and single instructions that every kernel uses. No headers: the text goes through NVRTC as it is.
#pragma once
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;
#define DEV static __device__ __forceinline__

constexpr int WARP = 32;
constexpr int TILE_ROWS = 16;  // rows of a weight tile: M of the matrix instruction
constexpr int TILE_K = 32;     // k of a weight tile
constexpr int GROUP_TILES = 4; // k-tiles of a group: what a lane reads of 2-bit codes at once, and one word of scales

DEV u32 and_or(u32 a, u32 mask, u32 bits) { // (a & mask) | bits
    u32 d;
    asm("lop3.b32 %0,%1,%2,%3,0xEA;" : "=r"(d) : "r"(a), "r"(mask), "r"(bits));
    return d;
}

// Weights are read once: past the L1, and with the larger fetch from memory to the L2.
DEV uint4 load_stream(const uint4* at) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3},[%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at));
    return v;
}
DEV u32 load_stream(const u32* at) {
    u32 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::256B.u32 %0,[%1];" : "=r"(v) : "l"(at));
    return v;
}

// Past the L1, for what the kernel before this one has written.
DEV uint4 load_fresh(const uint4* at) {
    uint4 v;
    asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
    return v;
}
DEV uint2 load_fresh(const uint2* at) {
    uint2 v;
    asm volatile("ld.global.cg.v2.u32 {%0,%1},[%2];" : "=r"(v.x), "=r"(v.y) : "l"(at));
    return v;
}
DEV u32 load_fresh(const u32* at) {
    u32 v;
    asm volatile("ld.global.cg.u32 %0,[%1];" : "=r"(v) : "l"(at));
    return v;
}

// 16 bytes from global to shared memory, past registers and L1. Groups of copies are waited for in order.
DEV void copy_async(void* shared, const void* global) {
    u32 at = (u32)__cvta_generic_to_shared(shared);
    asm volatile("cp.async.cg.shared.global.L2::256B [%0],[%1],16;" ::"r"(at), "l"(global) : "memory");
}
DEV void copies_issued() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LATER>
DEV void copies_arrived() { // all but the last LATER groups
    asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory");
}

// Programmatic dependent launch: the next kernel's blocks may start, and this kernel waits for the one before. Every
// thread of every kernel waits before it reads what another kernel wrote or writes what another one reads.
DEV void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
DEV void let_next_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Keeps the compiler from moving loads up across this point, which would hold more registers than there are.
DEV void no_loads_ahead() { asm volatile("" ::: "memory"); }

DEV float bits_to_float(u32 v) { return __uint_as_float(v); }

// Two floats to two 16-bit numbers, round to nearest even; `low` lands in the lower half.
DEV u32 pack_f16(float low, float high) {
    u32 d;
    asm("cvt.rn.f16x2.f32 %0,%1,%2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}
DEV u32 pack_bf16(float low, float high) {
    u32 d;
    asm("cvt.rn.bf16x2.f32 %0,%1,%2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}

// The 16-bit type of activations.
struct Bf16 {
    DEV float low(u32 v) { return __uint_as_float(v << 16); }
    DEV float high(u32 v) { return __uint_as_float(v & 0xFFFF0000u); }
    DEV u32 pack(float low, float high) { return pack_bf16(low, high); }
};
struct F16 {
    DEV float low(u32 v) {
        float f;
        asm("{.reg .b16 l,h; mov.b32 {l,h},%1; cvt.f32.f16 %0,l;}" : "=f"(f) : "r"(v));
        return f;
    }
    DEV float high(u32 v) {
        float f;
        asm("{.reg .b16 l,h; mov.b32 {l,h},%1; cvt.f32.f16 %0,h;}" : "=f"(f) : "r"(v));
        return f;
    }
    DEV u32 pack(float low, float high) { return pack_f16(low, high); }
};

// A power of two that brings a largest magnitude into [2^14, 2^15), and its reciprocal: both exact, and never
// subnormal, so that multiplying by one and later by the other changes nothing but the exponent.
struct PowerOfTwo {
    float up, down;
};
// What hidden activations are multiplied by: 1 where f16 holds them well as they are (the largest is between 2^-6 and
// 2^15), which saves the multiplication.
DEV PowerOfTwo scale_to_f16(u32 amax_bits);
DEV PowerOfTwo scale_hidden(u32 amax_bits) {
    const i32 exponent = (i32)(amax_bits >> 23);
    if (exponent >= 127 - 6 && exponent < 127 + 15) return PowerOfTwo{1.0f, 1.0f};
    return scale_to_f16(amax_bits);
}
DEV PowerOfTwo scale_to_f16(u32 amax_bits) {
    i32 exponent = (i32)(amax_bits >> 23);     // biased
    i32 shift = 127 + 14 - exponent;           // log2 of `up`
    if (amax_bits == 0u || exponent == 255) shift = 0; // nothing to scale; infinity and NaN stay what they are
    shift = shift > 126 ? 126 : (shift < -126 ? -126 : shift);
    return PowerOfTwo{__uint_as_float((u32)(127 + shift) << 23), __uint_as_float((u32)(127 - shift) << 23)};
}

// exp(v) in plain float32 multiplications and additions, so that a CPU computes the same bits. Coefficients: Cephes
// expf (S. Moshier). v outside [-87, 88] is cut, which a quotient by 1 + exp(v) does not notice.
DEV float exp_plain(float v) {
    v = fminf(fmaxf(v, -87.0f), 88.0f);
    float n = __fadd_rn(__fadd_rn(__fmul_rn(v, 1.44269504f), 12582912.0f), -12582912.0f);
    float r = __fadd_rn(v, -__fmul_rn(n, 0.693359375f));
    r = __fadd_rn(r, __fmul_rn(n, 2.12194440e-4f));
    float p = 1.9875691500e-4f;
    p = __fadd_rn(__fmul_rn(p, r), 1.3981999507e-3f);
    p = __fadd_rn(__fmul_rn(p, r), 8.3334519073e-3f);
    p = __fadd_rn(__fmul_rn(p, r), 4.1665795894e-2f);
    p = __fadd_rn(__fmul_rn(p, r), 1.6666665459e-1f);
    p = __fadd_rn(__fmul_rn(p, r), 5.0000001201e-1f);
    p = __fadd_rn(__fadd_rn(__fmul_rn(__fmul_rn(p, r), r), r), 1.0f);
    return __fmul_rn(p, __uint_as_float((u32)((i32)n + 127) << 23));
}

// SwiGLU with optional clamp (limit = infinity: none): gate at most limit, up within +-limit. NaN goes through.
static __device__ __noinline__ float swiglu(float gate, float up, float limit) {
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : (up < -limit ? -limit : up);
    float silu = __fdiv_rn(gate, __fadd_rn(1.0f, exp_plain(-gate)));
    return __fmul_rn(silu, up);
}

// Where channel c of the activations lies within its block of 32: the eight numbers that lane t needs of a k-tile lie
// together, in the order in which the f16 decoders give the weights (bytes 1, 3, 0, 2 of each half).
DEV i32 f16_place(i32 c) {
    i32 j = c & 3;
    i32 order = (j & 1) ? (j >> 1) : 2 + (j >> 1);
    return (c & ~31) + ((c >> 2) & 3) * 8 + ((c >> 4) & 1) * 4 + order;
}
