// How activations reach operand B and a tile is multiplied: one struct for each kind of matrix instruction. A column of
// B is one pair. Columns beyond an entry's pairs repeat the last one; nobody stores what comes of them.
#pragma once
#include "codecs.cuh"
#include "mma.cuh"
#include "params.cuh"
#include "route.cuh"

DEV int2 column_pair(const Params& p, const Entry& entry, i32 column) { // pair and token
    if (p.direct) return make_int2(entry.begin, entry.begin / p.top_k);
    return p.pairs[entry.begin + min(column, entry.count - 1)];
}

// Eight hidden values of a lane, in f16_place order, as f16; scaled where some lane of the warp needs it.
template <class Io>
DEV uint4 hidden_to_f16(uint4 v, float up, bool scaled) {
    if (!scaled)
        return make_uint4(pack_f16(Io::low(v.x), Io::high(v.x)), pack_f16(Io::low(v.y), Io::high(v.y)),
                          pack_f16(Io::low(v.z), Io::high(v.z)), pack_f16(Io::low(v.w), Io::high(v.w)));
    return make_uint4(pack_f16(Io::low(v.x) * up, Io::high(v.x) * up), pack_f16(Io::low(v.y) * up, Io::high(v.y) * up),
                      pack_f16(Io::low(v.z) * up, Io::high(v.z) * up), pack_f16(Io::low(v.w) * up, Io::high(v.w) * up));
}

// One 16-bit hidden value to its place; returns the bits of the magnitude that it has after rounding.
template <class Io>
DEV u32 store_hidden_at(const Params& p, i32 pair, i32 place, float value) {
    const u32 packed = Io::pack(value, 0.0f);
    p.hidden[(i64)pair * p.inter + place] = (u16)packed;
    return magnitude(Io::low(packed));
}

// What paths with 16-bit columns share: a lane has eight numbers of a k-tile, 16 bytes, of the token of its column.
struct Columns16 {
    struct Activations {
        u32 b[GROUP_TILES][4];
    };
    // Prefill: a token's 128 k of a stage are 16 chunks of eight values, swizzled so that the reads of a quarter warp
    // meet no bank twice.
    static constexpr int STAGE_ROW = 256; // bytes
    typedef uint4 Chunk;
    DEV i32 chunk_offset(i32 token, i32 chunk) { return token * STAGE_ROW + (chunk ^ ((token & 1) << 2)) * 16; }
    struct Fragment {
        u32 b[4];
    };
    template <int KB>
    DEV Fragment fragment(const u8* shared, const u32* scales, i32 token, i32 lane) {
        Fragment f;
        *(uint4*)f.b = *(const uint4*)(shared + chunk_offset(token, KB * 4 + (lane & 3)));
        return f;
    }
};

// Codes with block scales, f16 m16n8k16 twice a k-tile. The scale multiplies each k-tile's sum in float32.
template <class CODEC, class IO>
struct F16Path : Columns16 {
    typedef CODEC Codec;
    typedef IO Io;
    static constexpr bool NEEDS_AMAX = true;
    static constexpr int BLOCKS = 4; // of a decode kernel on one multiprocessor

    struct Input { // of gate and up
        const u16* at;
        __device__ __forceinline__ Input(const Params& p, const Entry& entry, i32 lane) {
            at = (const u16*)p.activations + (i64)column_pair(p, entry, lane >> 2).y * p.hidden_size + (lane & 3) * 8;
        }
        __device__ __forceinline__ void ready() const {}
        __device__ __forceinline__ void fetch(Activations& x, i32 group, i32 count = GROUP_TILES) const {
#pragma unroll
            for (int kb = 0; kb < GROUP_TILES; kb++)
                if (kb < count)
                    *(uint4*)x.b[kb] = *(const uint4*)(at + (group * GROUP_TILES + kb) * TILE_K);
        }
        __device__ __forceinline__ void convert(Activations& x) const {}
    };
    struct Hidden { // of down
        const u16* at;
        const u32* amax;
        bool& waited;
        mutable float up;
        mutable bool scaled;
        __device__ __forceinline__ Hidden(const Params& p, const Entry& entry, i32 lane, bool& waited) : waited(waited) {
            const i32 pair = column_pair(p, entry, lane >> 2).x;
            at = p.hidden + (i64)pair * p.inter + (lane & 3) * 8;
            amax = p.hidden_amax + pair;
        }
        __device__ __forceinline__ void ready() const {
            if (!waited) {
                wait_for_previous();
                waited = true;
            }
            up = scale_hidden(load_fresh(amax)).up;
            scaled = __any_sync(~0u, up != 1.0f);
        }
        __device__ __forceinline__ void fetch(Activations& x, i32 group, i32 count = GROUP_TILES) const {
#pragma unroll
            for (int kb = 0; kb < GROUP_TILES; kb++)
                if (kb < count)
                    *(uint4*)x.b[kb] = load_fresh((const uint4*)(at + (group * GROUP_TILES + kb) * TILE_K));
        }
        __device__ __forceinline__ void convert(Activations& x) const {
            if (scaled) {
#pragma unroll
                for (int kb = 0; kb < GROUP_TILES; kb++) *(uint4*)x.b[kb] = hidden_to_f16<Io>(*(uint4*)x.b[kb], up, true);
            } else {
#pragma unroll
                for (int kb = 0; kb < GROUP_TILES; kb++) *(uint4*)x.b[kb] = hidden_to_f16<Io>(*(uint4*)x.b[kb], up, false);
            }
        }
    };

    typedef typename Codec::Group Operand;
    template <int KB>
    DEV void tile(const Operand& w, const Activations& x, float acc[4]) {
        u32 a[8];
        Codec::f16(w.q, KB, a);
        scaled(a, x.b[KB], block_scale<KB>(w.s0), block_scale<KB>(w.s1), acc);
    }
    DEV void scaled(const u32 a[8], const u32 b[4], float f0, float f1, float acc[4]) {
        float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        mma_f16(d, a, b[0], b[1]);
        mma_f16(d, a + 4, b[2], b[3]);
        acc[0] = __fmaf_rn(d[0], f0, acc[0]);
        acc[1] = __fmaf_rn(d[1], f0, acc[1]);
        acc[2] = __fmaf_rn(d[2], f1, acc[2]);
        acc[3] = __fmaf_rn(d[3], f1, acc[3]);
    }

    DEV float input_scale(const Params& p, i32 token) {
        return bits_to_float(p.activation_scale[token]) * Codec::POST;
    }
    DEV float hidden_scale(const Params& p, i32 pair) {
        return scale_hidden(load_fresh(p.hidden_amax + pair)).down * Codec::POST;
    }
    DEV u32 store_hidden(const Params& p, i32 pair, i32 channel, float value) {
        return store_hidden_at<Io>(p, pair, f16_place(channel), value);
    }

    struct Column { // source of one token's chunks: number of its first one
        u32 at;
        float up;
    };
    template <bool DOWN>
    DEV Column column(const Params& p, int2 pair) {
        if (DOWN) return Column{(u32)pair.x * (p.inter / 8), scale_hidden(load_fresh(p.hidden_amax + pair.x)).up};
        return Column{(u32)pair.y * (p.hidden_size / 8), 1.0f};
    }
    template <bool DOWN>
    DEV Chunk fetch(const Params& p, const Column& c, i32 k_chunk) {
        return load_fresh((const uint4*)(DOWN ? (const void*)p.hidden : p.activations) + (c.at + k_chunk));
    }
    template <bool DOWN>
    DEV void stage(u8* shared, u32* scales, const Column& c, i32 token, i32 chunk, Chunk v) {
        *(uint4*)(shared + chunk_offset(token, chunk)) = DOWN ? hidden_to_f16<Io>(v, c.up, true) : v;
    }
    struct Tile { // operand A of a k-tile, decoded once for all columns
        u32 a[8];
        float f0, f1;
        template <int KB>
        __device__ __forceinline__ void decode(const typename Codec::Group& w) {
            Codec::f16(w.q, KB, a);
            f0 = block_scale<KB>(w.s0), f1 = block_scale<KB>(w.s1);
        }
    };
    template <int KB>
    DEV void multiply(const Tile& t, const Fragment& f, float acc[4]) { scaled(t.a, f.b, t.f0, t.f1, acc); }
};

// Verbatim bf16 rows and bf16 activations, straight into the accumulators.
struct Bf16Path : Columns16 {
    typedef Verbatim Codec;
    typedef Bf16 Io;
    static constexpr bool NEEDS_AMAX = false;
    static constexpr int BLOCKS = 2;

    struct Input {
        const u16* at;
        __device__ __forceinline__ Input(const Params& p, const Entry& entry, i32 lane) {
            at = (const u16*)p.x + (i64)column_pair(p, entry, lane >> 2).y * p.hidden_size + (lane & 3) * 8;
        }
        __device__ __forceinline__ void ready() const {}
        __device__ __forceinline__ void fetch(Activations& x, i32 group, i32 count = GROUP_TILES) const {
#pragma unroll
            for (int kb = 0; kb < GROUP_TILES; kb++)
                if (kb < count)
                    *(uint4*)x.b[kb] = *(const uint4*)(at + (group * GROUP_TILES + kb) * TILE_K);
        }
        __device__ __forceinline__ void convert(Activations& x) const {}
    };
    struct Hidden {
        const u16* at;
        bool& waited;
        __device__ __forceinline__ Hidden(const Params& p, const Entry& entry, i32 lane, bool& waited) : waited(waited) {
            at = p.hidden + (i64)column_pair(p, entry, lane >> 2).x * p.inter + (lane & 3) * 8;
        }
        __device__ __forceinline__ void ready() const {
            if (!waited) {
                wait_for_previous();
                waited = true;
            }
        }
        __device__ __forceinline__ void fetch(Activations& x, i32 group, i32 count = GROUP_TILES) const {
#pragma unroll
            for (int kb = 0; kb < GROUP_TILES; kb++)
                if (kb < count)
                    *(uint4*)x.b[kb] = load_fresh((const uint4*)(at + (group * GROUP_TILES + kb) * TILE_K));
        }
        __device__ __forceinline__ void convert(Activations& x) const {}
    };

    typedef Verbatim::Group Operand;
    template <int KB>
    DEV void tile(const Verbatim::Group& w, const Activations& x, float acc[4]) {
        u32 a[8];
        Verbatim::bf16(w, KB, a);
        both(a, x.b[KB], acc);
    }
    DEV void both(const u32 a[8], const u32 b[4], float acc[4]) {
        mma_bf16(acc, a, b[0], b[1]);
        mma_bf16(acc, a + 4, b[2], b[3]);
    }

    DEV float input_scale(const Params&, i32) { return 1.0f; }
    DEV float hidden_scale(const Params&, i32) { return 1.0f; }
    DEV u32 store_hidden(const Params& p, i32 pair, i32 channel, float value) {
        return store_hidden_at<Bf16>(p, pair, channel, value);
    }

    struct Column {
        u32 at;
    };
    template <bool DOWN>
    DEV Column column(const Params& p, int2 pair) {
        return Column{DOWN ? (u32)pair.x * (p.inter / 8) : (u32)pair.y * (p.hidden_size / 8)};
    }
    template <bool DOWN>
    DEV Chunk fetch(const Params& p, const Column& c, i32 k_chunk) {
        return load_fresh((const uint4*)(DOWN ? (const void*)p.hidden : p.x) + (c.at + k_chunk));
    }
    template <bool DOWN>
    DEV void stage(u8* shared, u32* scales, const Column& c, i32 token, i32 chunk, Chunk v) {
        *(uint4*)(shared + chunk_offset(token, chunk)) = v;
    }
    struct Tile {
        u32 a[8];
        template <int KB>
        __device__ __forceinline__ void decode(const Verbatim::Group& w) {
            Verbatim::bf16(w, KB, a);
        }
    };
    template <int KB>
    DEV void multiply(const Tile& t, const Fragment& f, float acc[4]) { both(t.a, f.b, acc); }
};

#if defined(HAS_MX)
// Codes as E5M2, activations as MXFP8: block-scaled m16n8k32 does scales and sums.
template <class CODEC, class IO>
struct MxPath {
    typedef CODEC Codec;
    typedef IO Io;
    static constexpr bool NEEDS_AMAX = false;
    static constexpr int BLOCKS = 2; // what the shared memory of sm_120 has room for

    struct Activations {
        uint4 raw[GROUP_TILES]; // E4M3 in x and y; hidden values as they were stored before `convert`
        u32 scale;
    };
    struct Input {
        const u8* at;
        const u32* scales;
        __device__ __forceinline__ Input(const Params& p, const Entry& entry, i32 lane) {
            const i32 token = column_pair(p, entry, lane >> 2).y;
            at = (const u8*)p.activations + (i64)token * p.hidden_size + (lane & 3) * 8;
            scales = p.activation_scale + (i64)token * ((p.hidden_size + 127) / 128);
        }
        __device__ __forceinline__ void ready() const {}
        __device__ __forceinline__ void fetch(Activations& x, i32 group, i32 count = GROUP_TILES) const {
            x.scale = scales[group];
#pragma unroll
            for (int kb = 0; kb < GROUP_TILES; kb++)
                if (kb < count) {
                    const uint2 v = *(const uint2*)(at + (group * GROUP_TILES + kb) * TILE_K);
                    x.raw[kb].x = v.x, x.raw[kb].y = v.y;
                }
        }
        __device__ __forceinline__ void convert(Activations& x) const {}
    };
    DEV uint2 quantize(uint4 v, u32& scale) { // from f16_place order
        const float e[8] = {Io::low(v.y), Io::low(v.x), Io::high(v.y), Io::high(v.x),
                            Io::low(v.w), Io::low(v.z), Io::high(v.w), Io::high(v.z)};
        return quantize_mx(e, scale);
    }
    struct Hidden {
        const u16* at;
        bool& waited;
        __device__ __forceinline__ Hidden(const Params& p, const Entry& entry, i32 lane, bool& waited) : waited(waited) {
            at = p.hidden + (i64)column_pair(p, entry, lane >> 2).x * p.inter + (lane & 3) * 8;
        }
        __device__ __forceinline__ void ready() const {
            if (!waited) {
                wait_for_previous();
                waited = true;
            }
        }
        __device__ __forceinline__ void fetch(Activations& x, i32 group, i32 count = GROUP_TILES) const {
#pragma unroll
            for (int kb = 0; kb < GROUP_TILES; kb++)
                if (kb < count)
                    x.raw[kb] = load_fresh((const uint4*)(at + (group * GROUP_TILES + kb) * TILE_K));
        }
        __device__ __forceinline__ void convert(Activations& x) const { // of a tail, tiles that are not there too
            x.scale = 0;
#pragma unroll
            for (int kb = 0; kb < GROUP_TILES; kb++) {
                u32 scale;
                const uint2 v = quantize(x.raw[kb], scale);
                x.raw[kb].x = v.x, x.raw[kb].y = v.y;
                x.scale |= scale << (8 * kb);
            }
        }
    };

    typedef typename Codec::Group Operand;
    // Lane l gives the scales of row (l >> 2) + 8 (l & 1).
    DEV u32 scale_a(const typename Codec::Group& w) { return (threadIdx.x & 1) ? w.s1 : w.s0; }
    template <int KB>
    DEV void tile(const typename Codec::Group& w, const Activations& x, float acc[4]) {
        u32 a[4];
        Codec::e5m2(w, KB, a);
        const u32 b[2] = {x.raw[KB].x, x.raw[KB].y};
        mma_mx<KB>(acc, a, b, scale_a(w), x.scale);
    }

    DEV float input_scale(const Params&, i32) { return Codec::POST; }
    DEV float hidden_scale(const Params&, i32) { return Codec::POST; }
    DEV u32 store_hidden(const Params& p, i32 pair, i32 channel, float value) {
        return store_hidden_at<Io>(p, pair, f16_place(channel), value);
    }

    static constexpr int STAGE_ROW = 128;
    typedef uint4 Chunk;
    DEV i32 chunk_offset(i32 token, i32 chunk) {
        return token * STAGE_ROW + ((chunk >> 2) ^ (token & 3)) * 32 + (chunk & 3) * 8;
    }
    struct Column {
        u32 at, scales;
    };
    template <bool DOWN>
    DEV Column column(const Params& p, int2 pair) {
        if (DOWN) return Column{(u32)pair.x * (p.inter / 8), 0};
        return Column{(u32)pair.y * (p.hidden_size / 8), (u32)pair.y * ((p.hidden_size + 127) / 128)};
    }
    template <bool DOWN>
    DEV Chunk fetch(const Params& p, const Column& c, i32 k_chunk) {
        if (DOWN) return load_fresh((const uint4*)p.hidden + (c.at + k_chunk));
        const uint2 v = *((const uint2*)p.activations + (c.at + k_chunk));
        const u32 word = p.activation_scale[c.scales + (k_chunk >> 4)];
        return make_uint4(v.x, v.y, (word >> (8 * ((k_chunk >> 2) & 3))) & 255u, 0u);
    }
    template <bool DOWN>
    DEV void stage(u8* shared, u32* scales, const Column& c, i32 token, i32 chunk, Chunk v) {
        u32 scale = v.z;
        uint2 q = make_uint2(v.x, v.y);
        if (DOWN) q = quantize(v, scale);
        *(uint2*)(shared + chunk_offset(token, chunk)) = q;
        if ((chunk & 3) == 0) ((u8*)(scales + token))[chunk >> 2] = (u8)scale;
    }
    struct Tile {
        u32 a[4];
        u32 scale;
        template <int KB>
        __device__ __forceinline__ void decode(const typename Codec::Group& w) {
            Codec::e5m2(w, KB, a);
            scale = scale_a(w);
        }
    };
    struct Fragment {
        u32 b[2];
        u32 scale;
    };
    template <int KB>
    DEV Fragment fragment(const u8* shared, const u32* scales, i32 token, i32 lane) {
        Fragment f;
        *(uint2*)f.b = *(const uint2*)(shared + chunk_offset(token, KB * 4 + (lane & 3)));
        f.scale = scales[token];
        return f;
    }
    template <int KB>
    DEV void multiply(const Tile& t, const Fragment& f, float acc[4]) { mma_mx<KB>(acc, t.a, f.b, t.scale, f.scale); }
};
#endif
