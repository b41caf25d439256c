// The block-scaled matrix instruction of sm_120 (kind::mxf8f6f4, scale_vec::1X, m16n8k32, E5M2 x E4M3) in integer
// arithmetic, so that the data path of its kernels runs on any GPU. The model of its sums, and where it comes from, is in
// kernels/cpu/block_scaled.py; the two agree bit for bit. `mx_sum` is plain C++ too: tests compile it for the host.
#pragma once
#if defined(__CUDACC__)
#include "common.cuh"
#define MX_FUNCTION static __device__ __noinline__
#else
#define MX_FUNCTION static
#endif

constexpr int MX_FRACTION = 25; // bits that a term keeps below the exponent of the largest one
constexpr u32 MX_NAN = 0x7FFFFFFFu;
constexpr u32 MX_INFINITY = 0x7F800000u;

struct MxFactor { // value = number * 2^exponent
    int number, exponent;
    bool nan, infinite;
};
MX_FUNCTION MxFactor mx_e5m2(u32 byte) {
    const int field = (int)(byte >> 2) & 31, fraction = (int)byte & 3, number = field ? 4 + fraction : fraction;
    return MxFactor{byte & 0x80u ? -number : number, (field ? field : 1) - 15 - 2, field == 31 && fraction != 0,
                    field == 31 && fraction == 0};
}
MX_FUNCTION MxFactor mx_e4m3(u32 byte) {
    const int field = (int)(byte >> 3) & 15, fraction = (int)byte & 7, number = field ? 8 + fraction : fraction;
    return MxFactor{byte & 0x80u ? -number : number, (field ? field : 1) - 7 - 3, (byte & 0x7Fu) == 0x7Fu, false};
}

// number * 2^shift, cut off toward zero. |number| < 2^24, and only a zero is ever shifted far to the left.
MX_FUNCTION i64 mx_shifted(i64 number, int shift) {
    if (number == 0) return 0;
    const i64 size = number < 0 ? -number : number;
    const i64 moved = shift >= 0 ? size << shift : (shift > -64 ? size >> -shift : 0);
    return number < 0 ? -moved : moved;
}

// Bits of float32 c + sum of a[k] b[k], k = 0..31 in the bytes of eight words, under two UE8M0 scales.
MX_FUNCTION u32 mx_sum(const u32* a, const u32* b, u32 scale_a, u32 scale_b, u32 c) {
    const int c_field = (int)(c >> 23) & 255;
    const int c_number = (int)(c & 0x7FFFFFu) | (c_field ? 0x800000 : 0), c_exponent = (c_field ? c_field : 1) - 127;
    const int scale = (int)scale_a + (int)scale_b - 254;
    bool nan = scale_a == 255u || scale_b == 255u || (c_field == 255 && (c & 0x7FFFFFu) != 0u);
    bool plus = c == MX_INFINITY, minus = c == (MX_INFINITY | 0x80000000u);
    const int nothing = -(1 << 20);
    int largest = c_number ? c_exponent : nothing; // of exponents before normalization, which is 1.xx to 3.xx
    for (int k = 0; k < 32; k++) {
        const MxFactor x = mx_e5m2((a[k >> 2] >> (8 * (k & 3))) & 255u), y = mx_e4m3((b[k >> 2] >> (8 * (k & 3))) & 255u);
        nan = nan || x.nan || y.nan || (x.infinite && y.number == 0);
        if (x.infinite) {
            if ((x.number < 0) == (y.number < 0))
                plus = true;
            else
                minus = true;
        }
        const int exponent = x.exponent + 2 + y.exponent + 3 + scale;
        if (x.number != 0 && y.number != 0 && exponent > largest) largest = exponent;
    }
    if (nan || (plus && minus)) return MX_NAN;
    if (plus || minus) return plus ? MX_INFINITY : MX_INFINITY | 0x80000000u;
    if (largest == nothing) return 0u;

    i64 sum = mx_shifted(c >> 31 ? -(i64)c_number : (i64)c_number, MX_FRACTION - 23 + c_exponent - largest);
    for (int k = 0; k < 32; k++) {
        const MxFactor x = mx_e5m2((a[k >> 2] >> (8 * (k & 3))) & 255u), y = mx_e4m3((b[k >> 2] >> (8 * (k & 3))) & 255u);
        if (x.number != 0 && y.number != 0)
            sum += mx_shifted((i64)(x.number * y.number), MX_FRACTION + x.exponent + y.exponent + scale - largest);
    }
    if (sum == 0) return 0u;

    // sum * 2^(largest - MX_FRACTION), rounded toward zero.
    const u32 sign = sum < 0 ? 0x80000000u : 0u;
    const u64 size = (u64)(sum < 0 ? -sum : sum);
    int top = 0;
    while (size >> top > 1u) top++;
    const int exponent = top + largest - MX_FRACTION;
    if (exponent > 127) return sign | MX_INFINITY;
    const int unit = (exponent < -126 ? -126 : exponent) - 23; // exponent of the last bit kept
    const int shift = unit - (largest - MX_FRACTION);
    const u32 kept = (u32)(shift >= 0 ? (shift < 64 ? size >> shift : 0u) : size << -shift);
    return sign | (exponent < -126 ? kept : ((u32)(exponent + 127) << 23) | (kept & 0x7FFFFFu));
}

#if defined(__CUDACC__)
// The instruction for a whole warp, with its registers. Lane 4 g + t holds of A rows g (a.x, a.z) and g + 8 (a.y, a.w), of
// B column g, both at k = 4 t and, in the later registers, 16 + 4 t; of C and D columns 2 t and 2 t + 1 of rows g and
// g + 8. With thread-ids 0 the scale of row m is lane 4 (m % 8) + m / 8's, that of column n lane 4 n's.
MX_FUNCTION float4 mx_warp(float4 c, uint4 a, uint2 b, u32 scale_a, u32 scale_b, int byte) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    u32 rows[2][8], columns[2][8], row_scales[2], column_scales[2];
    for (int j = 0; j < 4; j++) {
        rows[0][j] = __shfl_sync(~0u, a.x, 4 * g + j), rows[0][4 + j] = __shfl_sync(~0u, a.z, 4 * g + j);
        rows[1][j] = __shfl_sync(~0u, a.y, 4 * g + j), rows[1][4 + j] = __shfl_sync(~0u, a.w, 4 * g + j);
        for (int i = 0; i < 2; i++) {
            columns[i][j] = __shfl_sync(~0u, b.x, 4 * (2 * t + i) + j);
            columns[i][4 + j] = __shfl_sync(~0u, b.y, 4 * (2 * t + i) + j);
        }
    }
    for (int i = 0; i < 2; i++) {
        row_scales[i] = (__shfl_sync(~0u, scale_a, 4 * g + i) >> (8 * byte)) & 255u;
        column_scales[i] = (__shfl_sync(~0u, scale_b, 4 * (2 * t + i)) >> (8 * byte)) & 255u;
    }
    float4 d;
    d.x = __uint_as_float(mx_sum(rows[0], columns[0], row_scales[0], column_scales[0], __float_as_uint(c.x)));
    d.y = __uint_as_float(mx_sum(rows[0], columns[1], row_scales[0], column_scales[1], __float_as_uint(c.y)));
    d.z = __uint_as_float(mx_sum(rows[1], columns[0], row_scales[1], column_scales[0], __float_as_uint(c.z)));
    d.w = __uint_as_float(mx_sum(rows[1], columns[1], row_scales[1], column_scales[1], __float_as_uint(c.w)));
    return d;
}
DEV void mma_mx_emulated(float d[4], const u32 a[4], const u32 b[2], u32 scale_a, u32 scale_b, int byte) {
    const float4 r = mx_warp(make_float4(d[0], d[1], d[2], d[3]), make_uint4(a[0], a[1], a[2], a[3]),
                             make_uint2(b[0], b[1]), scale_a, scale_b, byte);
    d[0] = r.x, d[1] = r.y, d[2] = r.z, d[3] = r.w;
}
#endif
