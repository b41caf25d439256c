// How a lane turns its words of a row into operand A of the matrix instruction. The layout is described in
// kernels/codecs/layout.py.
//
// A code's byte becomes an E5M2 number by one AND and one OR. An E5M2 byte is the upper byte of an f16, so the same
// words serve two instructions: f16 m16n8k16 takes bytes 1 and 3 and bytes 0 and 2 of a word as pairs of f16, and
// block-scaled m16n8k32 takes all four as E5M2.
#pragma once
#include "common.cuh"


// A tile's scale of k-tile kb, from the word of its row: 2^(b - 127). Byte 0 reads as 0 and byte 255 as infinity.
template <int KB>
DEV float block_scale(u32 word) {
    constexpr u32 EXPONENT = 0x7F800000u;
    if (KB == 0) return bits_to_float((word << 23) & EXPONENT);
    if (KB == 1) return bits_to_float((word << 15) & EXPONENT);
    if (KB == 2) return bits_to_float((word << 7) & EXPONENT);
    return bits_to_float((word >> 1) & EXPONENT);
}

// Where one matrix of a row lies: `codes` and `scales` of its first tile row, and its k-tiles.
struct Matrix {
    const u8* codes;
    const u8* scales;
    i32 k_tiles;
};

// Codes of WORDS 32-bit words a tile, with block scales.
template <int WORDS>
struct CodeGroup {
    u32 q[GROUP_TILES * WORDS];
    u32 s0, s1; // scale words of rows g and g + 8

    // Group `group` of tile row `tile` as lane `lane` sees it; all four of its k-tiles exist.
    __device__ __forceinline__ void load(const Matrix& m, i32 tile, i32 group, i32 lane) {
        const uint4* at = (const uint4*)(codes_of(m, tile, group)) + lane;
#pragma unroll
        for (int w = 0; w < WORDS; w++) *(uint4*)(q + 4 * w) = load_stream(at + 32 * w);
        const u32* s = (const u32*)scales_of(m, tile, group);
        s0 = load_stream(s + (lane >> 2));
        s1 = load_stream(s + (lane >> 2) + 8);
    }

    // The last group of a K that is no multiple of 128: 1 to 3 k-tiles. Reads of 16 bytes become shorter ones: what
    // is left of GROUP_TILES / WORDS tiles lies together for each lane.
    __device__ __forceinline__ void load_tail(const Matrix& m, i32 tile, i32 group, i32 lane) {
        constexpr int TOGETHER = GROUP_TILES / WORDS;
        const u8* codes = codes_of(m, tile, group);
        const u8* scales = scales_of(m, tile, group);
        const i32 rest = m.k_tiles - group * GROUP_TILES;
        s0 = s1 = 0;
#pragma unroll
        for (int kb = 0; kb < GROUP_TILES - 1; kb++) {
            if (kb >= rest) break;
            const int part = kb / TOGETHER;
            const i32 width = min(TOGETHER, rest - part * TOGETHER);
            const u32* at = (const u32*)(codes + part * 512) + (lane * width + kb % TOGETHER) * WORDS;
#pragma unroll
            for (int i = 0; i < WORDS; i++) q[kb * WORDS + i] = at[i];
            s0 |= (u32)scales[(lane >> 2) * rest + kb] << (8 * kb);
            s1 |= (u32)scales[((lane >> 2) + 8) * rest + kb] << (8 * kb);
        }
    }

    DEV const u8* codes_of(const Matrix& m, i32 tile, i32 group) {
        return m.codes + (i64)tile * m.k_tiles * (128 * WORDS) + (i64)group * (512 * WORDS);
    }
    DEV const u8* scales_of(const Matrix& m, i32 tile, i32 group) {
        return m.scales + (i64)tile * m.k_tiles * TILE_ROWS + group * (GROUP_TILES * TILE_ROWS);
    }
};

struct W2 {
    static constexpr int WORDS = 1;
    static constexpr bool SCALED = true;
    static constexpr int UNIT_TILES = 4;    // decode: tiles of a unit of work
    static constexpr int STAGE_BLOCKS = 8;  // decode: groups of a tile that a warp asks for at once
    // Prefill: the next group's weights are asked for while this one is multiplied, at once or, where registers do not
    // hold two groups, each k-tile behind the one that it replaces.
    static constexpr bool PREFETCH = true;
    static constexpr float POST = 8.0f;     // decoded bytes are level * 2^-3
    typedef CodeGroup<1> Group;

    // Two A fragments of m16n8k16: k 0..15 and 16..31 of the tile.
    DEV void f16(const u32* q, int kb, u32 a[8]) {
        constexpr u32 MASK = 0x88008800u, ONE = 0x30003000u;
        u32 w = q[kb];
        a[0] = and_or(w, MASK, ONE);
        a[1] = and_or(w << 1, MASK, ONE);
        a[2] = and_or(w << 8, MASK, ONE);
        a[3] = and_or(w << 9, MASK, ONE);
        a[4] = and_or(w << 2, MASK, ONE);
        a[5] = and_or(w << 3, MASK, ONE);
        a[6] = and_or(w << 10, MASK, ONE);
        a[7] = and_or(w << 11, MASK, ONE);
    }
    // The A fragment of m16n8k32, four E5M2 a register.
    DEV void e5m2(const Group& g, int kb, u32 a[4]) {
        constexpr u32 MASK = 0x88888888u, ONE = 0x30303030u;
        u32 w = g.q[kb];
        a[0] = and_or(w, MASK, ONE);
        a[1] = and_or(w << 1, MASK, ONE);
        a[2] = and_or(w << 2, MASK, ONE);
        a[3] = and_or(w << 3, MASK, ONE);
    }
};

struct Fp4 {
    static constexpr int WORDS = 2;
    static constexpr bool SCALED = true;
    static constexpr int UNIT_TILES = 4;
    static constexpr int STAGE_BLOCKS = 4;
    static constexpr bool PREFETCH = true;
    static constexpr float POST = 16384.0f; // decoded bytes are value * 2^-14
    typedef CodeGroup<2> Group;

    DEV void f16(const u32* q, int kb, u32 a[8]) {
        constexpr u32 BOTH = 0x8E008E00u, SIGN = 0x80008000u, VALUE = 0x0E000E00u;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            u32 w = q[kb * 2 + i];
            a[4 * i + 0] = w & BOTH;
            a[4 * i + 1] = and_or(w << 7, SIGN, (w >> 3) & VALUE);
            a[4 * i + 2] = (w << 8) & BOTH;
            a[4 * i + 3] = and_or(w << 15, SIGN, (w << 5) & VALUE);
        }
    }
    DEV void e5m2(const Group& g, int kb, u32 a[4]) {
        constexpr u32 BOTH = 0x8E8E8E8Eu, SIGN = 0x80808080u, VALUE = 0x0E0E0E0Eu;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            u32 w = g.q[kb * 2 + i];
            a[2 * i + 0] = w & BOTH;
            a[2 * i + 1] = and_or(w << 7, SIGN, (w >> 3) & VALUE);
        }
    }
};

// Verbatim bf16 rows, row-major. Lane t takes k = 8 t .. 8 t + 7 of a k-tile: 16 bytes of each of its two rows.
struct Verbatim {
    static constexpr int WORDS = 0;
    static constexpr bool SCALED = false;
    static constexpr int UNIT_TILES = 2;
    static constexpr int STAGE_BLOCKS = 2;
    static constexpr bool PREFETCH = false;
    static constexpr float POST = 1.0f;
    struct Group {
        u32 q[GROUP_TILES * 8];
        __device__ __forceinline__ void load_tail(const Matrix& m, i32 tile, i32 group, i32 lane) {
            load(m, tile, group, lane);
        }
        __device__ __forceinline__ void load(const Matrix& m, i32 tile, i32 group, i32 lane) {
            i64 row_bytes = (i64)m.k_tiles * 64;
            const u8* low = m.codes + (i64)(tile * TILE_ROWS + (lane >> 2)) * row_bytes + (lane & 3) * 16;
            const u8* high = low + 8 * row_bytes;
#pragma unroll
            for (int kb = 0; kb < GROUP_TILES; kb++) {
                i32 kt = group * GROUP_TILES + kb;
                if (kt < m.k_tiles) {
                    *(uint4*)(q + 8 * kb) = load_stream((const uint4*)(low + kt * 64));
                    *(uint4*)(q + 8 * kb + 4) = load_stream((const uint4*)(high + kt * 64));
                }
            }
        }
        // Of a group all of whose k-tiles exist, one.
        template <int KB>
        __device__ __forceinline__ void load_part(const Matrix& m, i32 tile, i32 group, i32 lane) {
            const i64 row_bytes = (i64)m.k_tiles * 64;
            const u8* low = m.codes + (i64)(tile * TILE_ROWS + (lane >> 2)) * row_bytes + (lane & 3) * 16 +
                            (group * GROUP_TILES + KB) * 64;
            *(uint4*)(q + 8 * KB) = load_stream((const uint4*)low);
            *(uint4*)(q + 8 * KB + 4) = load_stream((const uint4*)(low + 8 * row_bytes));
        }
    };
    DEV void bf16(const Group& g, int kb, u32 a[8]) {
        const u32* low = g.q + 8 * kb;
        const u32* high = low + 4;
        a[0] = low[0], a[1] = high[0], a[2] = low[1], a[3] = high[1];
        a[4] = low[2], a[5] = high[2], a[6] = low[3], a[7] = high[3];
    }
};
