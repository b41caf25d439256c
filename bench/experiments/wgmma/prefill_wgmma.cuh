// Expert GEMMs for many pairs on Hopper: a block takes up to 128 pairs of one expert and 16 tiles of its matrix, two for
// each warp of two warpgroups. A third warpgroup brings weights (bulk copies) and activations (gathered copies) into a
// ring in shared memory, units ahead of the ones that multiply. Weights become bf16 in registers, scale and all (a level
// or an e2m1 value times a power of two is a bf16 number), and are operand A; activations are operand B as they are. So
// every product is exact, and nothing but the sums is rounded.
//
// Takes K in whole groups of 128, and whole blocks of 16 tiles; bf16 activations. Other shapes go through prefill.cuh.
#pragma once
#include "backend.cuh"
#include "wgmma_bf16.cuh"

constexpr i32 WIDE_THREADS = 384; // two warpgroups that multiply, then one that copies
constexpr i32 WIDE_PAIRS = 128;   // of an entry
constexpr i32 WIDE_TILES = 16;    // of a unit
constexpr i32 WIDE_STEP = 16;     // pairs are rounded up to whole steps

// Barriers in shared memory that count arrivals and bytes.
DEV u32 shared_address(const void* at) { return (u32)__cvta_generic_to_shared(at); }
DEV void barrier_init(u32 at, u32 arrivals) { asm volatile("mbarrier.init.shared::cta.b64 [%0],%1;" ::"r"(at), "r"(arrivals) : "memory"); }
DEV void barrier_arrive(u32 at) { asm volatile("mbarrier.arrive.shared::cta.b64 _,[%0];" ::"r"(at) : "memory"); }
DEV void barrier_expect(u32 at, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _,[%0],%1;" ::"r"(at), "r"(bytes) : "memory");
}
DEV void barrier_arrive_after_copies(u32 at) { // once this thread's cp.async so far have landed
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(at) : "memory");
}
DEV void barrier_wait(u32 at, u32 parity) {
    asm volatile("{\n.reg .pred p;\n"
                 "WAIT:\nmbarrier.try_wait.parity.shared::cta.b64 p,[%0],%1;\n@p bra DONE;\nbra WAIT;\nDONE:\n}" ::"r"(at),
                 "r"(parity)
                 : "memory");
}
DEV void bulk_copy(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0],[%1],%2,[%3];" ::"r"(to), "l"(from),
                 "r"(bytes), "r"(barrier)
                 : "memory");
}
DEV void copy_16(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global.L2::256B [%0],[%1],16;" ::"r"(to), "l"(from) : "memory");
}
template <int REGISTERS>
DEV void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }
template <int REGISTERS>
DEV void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS)); }

// Where channel c lies: operand B's order, in blocks of 32. Of 16 channels, odd ones come first, then even ones.
DEV i32 wide_place(i32 c) { return (c & ~31) + ((c >> 4) & 1) * 16 + ((c & 1) ^ 1) * 8 + ((c & 15) >> 1); }

DEV u32 times_plus(u32 a, u32 b, u32 c) { // on the pipe that logic does not use
    u32 d;
    asm("mad.lo.u32 %0,%1,%2,%3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
DEV u32 blend(u32 a, u32 mask, u32 b) { // a where the mask is set
    u32 d;
    asm("lop3.b32 %0,%1,%2,%3,0xB8;" : "=r"(d) : "r"(a), "r"(mask), "r"(b));
    return d;
}

// A k-tile of 16 rows as two A fragments of m64n..k16, scaled; b0 and b1 are the scale bytes of rows g and g + 8.
template <class Codec>
struct WideDecoder;
template <>
struct WideDecoder<W2> {
    static constexpr float POST = 1.0f;
    // The exponent of a bf16 is a scale byte as it is, and 2 more for level 4.
    DEV void decode(const u32* q, int kb, u32 b0, u32 b1, u32 a[8]) {
        const u32 w = q[kb], s0 = b0 * 0x00800080u, s1 = b1 * 0x00800080u;
        const u32 high = blend(w, 0xF000F000u, w >> 3); // sign of register r in bit 15 - r, level in bit 8 - r
        const u32 low = blend(w << 3, 0x07F007F0u, w);  // sign in bit 10 - r, level in bit 3 - r
        a[0] = (high & 0x81008100u) + s0;
        a[1] = times_plus(high & 0x40804080u, 2, s1);
        a[2] = times_plus(low & 0x04080408u, 32, s0);
        a[3] = times_plus(low & 0x02040204u, 64, s1);
        a[4] = times_plus(high & 0x20402040u, 4, s0);
        a[5] = times_plus(high & 0x10201020u, 8, s1);
        a[6] = times_plus(low & 0x01020102u, 128, s0);
        a[7] = times_plus(low & 0x00810081u, 256, s1);
    }
};
template <>
struct WideDecoder<Fp4> {
    static constexpr float POST = 4294967296.0f; // 2^32
    // A magnitude code in bits 8..6 is the value times 2^-126; scaled by 2^(byte - 127 + 126 - 32), for bytes up to 160.
    DEV void decode(const u32* q, int kb, u32 b0, u32 b1, u32 a[8]) {
        constexpr u32 VALUE = 0x01C001C0u, SIGN = 0x80008000u, ONE = 0x00010001u;
        const u32 s0 = times_plus(b0, 0x00800080u, 94 * 0x00800080u), s1 = times_plus(b1, 0x00800080u, 94 * 0x00800080u);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const u32 w = q[kb * 2 + i], third = w >> 3;
            a[4 * i + 0] = times((third & VALUE) | (w & SIGN), s0);
            a[4 * i + 1] = times(times_plus(w & (ONE << 8), 128, (w >> 6) & VALUE), s1);
            a[4 * i + 2] = times(times_plus(w & (ONE * 128), 256, (w & (ONE * 14)) * 32), s0);
            a[4 * i + 3] = times(times_plus(w & ONE, 32768, (w & (ONE * 112)) * 4), s1);
        }
    }
    DEV u32 times(u32 a, u32 b) {
        u32 d;
        asm("mul.rn.bf16x2 %0,%1,%2;" : "=r"(d) : "r"(a), "r"(b));
        return d;
    }
};

template <class Codec>
struct Wide {
    static constexpr int WORDS = Codec::WORDS;
    static constexpr int ACTIVATIONS = WIDE_PAIRS * 256, CODES = WIDE_TILES * 512 * WORDS, SCALES = WIDE_TILES * 64;
    static constexpr int STAGES = WORDS == 1 ? 5 : 4; // of 128 k
    static constexpr int AT_CODES = STAGES * ACTIVATIONS, AT_SCALES = AT_CODES + STAGES * CODES;
    static constexpr int AT_PAIRS = AT_SCALES + STAGES * SCALES, AT_BARRIERS = AT_PAIRS + 2 * (2 * WIDE_PAIRS + 4) * 4;
    static constexpr int BYTES = AT_BARRIERS + (2 * STAGES + 4) * 8 + 1024;
};
struct WideTable { // of a unit
    i32 pair[WIDE_PAIRS];
    u32 row[WIDE_PAIRS]; // where the pair's activations begin, in units of 16 bytes
    i32 count, tile, unused[2];
};

struct WideUnits {
    i32 blocks, units, groups;
    DEV i32 of(i32 size) { return size / (WIDE_TILES * TILE_ROWS); }
};

extern __shared__ __align__(1024) u8 wide_memory[];

// What copies: warp 0 weights, warps 1 and 2 activations.
template <class Codec, bool DOWN>
DEV void wide_copy(const Params& p, i32 blocks, i32 units, u32 memory, WideTable* tables) {
    typedef Wide<Codec> W;
    const i32 thread = threadIdx.x - 256, lane = thread & 31, warp = thread >> 5;
    const i32 k_tiles = (DOWN ? p.inter : p.hidden_size) / TILE_K, groups = k_tiles / GROUP_TILES;
    const u32 full = memory + W::AT_BARRIERS, empty = full + W::STAGES * 8, table_full = empty + W::STAGES * 8,
              table_empty = table_full + 16;
    i32 stage = 0, phase = 0;
    if (warp == 0) {
        const i32 slot = lane & 15; // tile of the unit; lanes from 16 on copy scales
        const i32 step = lane < 16 ? 512 * W::WORDS : 64;
        for (i32 unit = blockIdx.x; unit < units; unit += gridDim.x) {
            const i32 number = unit / blocks, block = unit - number * blocks;
            const u8* row = p.pool + (i64)p.entries[number].slot * p.stride;
            const i32 tile = DOWN ? block * 16 + slot : block * 8 + (slot & 7) + (slot >> 3) * (p.inter / TILE_ROWS);
            const u8* from = lane < 16 ? row + (DOWN ? p.w2_codes : 0) + (i64)tile * k_tiles * (128 * W::WORDS)
                                       : row + (DOWN ? p.w2_scales : p.w13_scales) + (i64)tile * k_tiles * TILE_ROWS;
            for (i32 group = 0; group < groups; group++) {
                barrier_wait(empty + stage * 8, phase ^ 1);
                if (lane == 0) barrier_expect(full + stage * 8, W::CODES + W::SCALES);
                __syncwarp();
                bulk_copy(memory + (lane < 16 ? W::AT_CODES + stage * W::CODES : W::AT_SCALES + stage * W::SCALES) + slot * step,
                          from, step, full + stage * 8);
                from += step;
                if (++stage == W::STAGES) stage = 0, phase ^= 1;
            }
        }
    } else if (warp < 3) {
        const i32 mine = thread - 32, chunk = mine & 15, first = mine >> 4;
        const u8* x = (const u8*)(DOWN ? (const void*)p.hidden : p.activations) + chunk * 16;
        i32 turn = 0, table_phase = 0;
        for (i32 unit = blockIdx.x; unit < units; unit += gridDim.x) {
            const i32 number = unit / blocks, block = unit - number * blocks;
            const Entry entry = p.entries[number];
            WideTable& table = tables[turn];
            const i32 columns = (entry.count + WIDE_STEP - 1) & ~(WIDE_STEP - 1);
            barrier_wait(table_empty + turn * 8, table_phase ^ 1);
            for (i32 i = mine; i < columns; i += 64) {
                const int2 pair = column_pair(p, entry, i);
                table.pair[i] = pair.x;
                table.row[i] = (u32)(DOWN ? pair.x * (p.inter / 8) : pair.y * (p.hidden_size / 8));
            }
            asm volatile("bar.sync 1,64;" ::: "memory");
            if (mine == 0) table.count = entry.count, table.tile = block * (DOWN ? 16 : 8);
            barrier_arrive(table_full + turn * 8);
            for (i32 group = 0; group < groups; group++) {
                barrier_wait(empty + stage * 8, phase ^ 1);
                const u32 to = memory + stage * W::ACTIVATIONS + (chunk >> 3) * (WIDE_PAIRS * 128) + first * 128;
                const u32 even = to + ((chunk & 7) ^ first) * 16, odd = to + ((chunk & 7) ^ (first + 4)) * 16;
                const u32* row = table.row + first;
                const u8* at = x + group * 256;
                for (i32 i = 0; i < columns; i += 16) {
#pragma unroll
                    for (i32 j = 0; j < 4; j++)
                        copy_16((j & 1 ? odd : even) + (i + 4 * j) * 128, at + (u64)row[i + 4 * j] * 16);
                }
                barrier_arrive_after_copies(full + stage * 8);
                if (++stage == W::STAGES) stage = 0, phase ^= 1;
            }
            turn ^= 1;
            if (turn == 0) table_phase ^= 1;
        }
    }
}

struct WideRing {
    u32 memory, full, empty;
    i32 stage, phase;
};

template <int N>
DEV void wide_step(float (*acc0)[4], float (*acc1)[4], const u32* a0, const u32* a1, u64 b) {
    wgmma_fence();
    Wgmma<N>::run(acc0, a0, b);
    Wgmma<N>::run(acc1, a1, b);
    Wgmma<N>::run(acc0, a0 + 4, b + 2);
    Wgmma<N>::run(acc1, a1 + 4, b + 2);
    wgmma_commit();
}

// acc += weights x activations of one unit, for N columns.
template <class Codec, bool DOWN>
DEV void wide_multiply(i32 columns, i32 groups, WideRing& ring, i32 lane, i32 warp, float (*acc0)[4], float (*acc1)[4]) {
    typedef Wide<Codec> W;
    typedef WideDecoder<Codec> D;
    constexpr int WORDS = W::WORDS;
    const i32 slot0 = DOWN ? 2 * warp : warp, slot1 = DOWN ? 2 * warp + 1 : warp + 8;
    const u8* memory = wide_memory + (ring.memory - shared_address(wide_memory));
    const u8 *codes0 = memory + W::AT_CODES + slot0 * (512 * WORDS) + lane * 16, *codes1 = codes0 + (slot1 - slot0) * (512 * WORDS);
    const u8 *scales0 = memory + W::AT_SCALES + slot0 * 64 + (lane >> 2) * 4, *scales1 = scales0 + (slot1 - slot0) * 64;
    u32 before = 0;
    for (i32 group = 0; group < groups; group++) {
        barrier_wait(ring.full + ring.stage * 8, ring.phase);
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        u32 q0[4 * WORDS], q1[4 * WORDS];
#pragma unroll
        for (int w = 0; w < WORDS; w++) {
            *(uint4*)(q0 + 4 * w) = *(const uint4*)(codes0 + ring.stage * W::CODES + w * 512);
            *(uint4*)(q1 + 4 * w) = *(const uint4*)(codes1 + ring.stage * W::CODES + w * 512);
        }
        const u32* s0 = (const u32*)(scales0 + ring.stage * W::SCALES);
        const u32* s1 = (const u32*)(scales1 + ring.stage * W::SCALES);
        u32 s00 = s0[0], s01 = s0[8], s10 = s1[0], s11 = s1[8];
        u32 at = ring.memory + ring.stage * W::ACTIVATIONS;
#pragma unroll 1
        for (int half = 0; half < 2; half++) { // not unrolled: ptxas would unfold all of a group first, and run out of registers
#pragma unroll
            for (int kb = 0; kb < 2; kb++) {
                u32 a0[8], a1[8];
                D::decode(q0, kb, __byte_perm(s00, 0, 0x4440 + kb), __byte_perm(s01, 0, 0x4440 + kb), a0);
                D::decode(q1, kb, __byte_perm(s10, 0, 0x4440 + kb), __byte_perm(s11, 0, 0x4440 + kb), a1);
                const u64 b = (u64)(((at + kb * 64) & 0x3FFFFu) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62); // 128-byte swizzle
#define COLUMNS(N) wide_step<N>(acc0, acc1, a0, a1, b);
                if (columns > 64) {
                    if (columns > 96) {
                        if (columns > 112) COLUMNS(128) else COLUMNS(112)
                    } else {
                        if (columns > 80) COLUMNS(96) else COLUMNS(80)
                    }
                } else {
                    if (columns > 32) {
                        if (columns > 48) COLUMNS(64) else COLUMNS(48)
                    } else {
                        if (columns > 16) COLUMNS(32) else COLUMNS(16)
                    }
                }
#undef COLUMNS
                wgmma_wait<1>();
                if (kb == 0 && half == 0 && group > 0 && lane == 0) barrier_arrive(before); // the group before has been read
            }
#pragma unroll
            for (int w = 0; w < 2 * WORDS; w++) q0[w] = q0[2 * WORDS + w], q1[w] = q1[2 * WORDS + w];
            at += WIDE_PAIRS * 128;
            s00 >>= 16, s01 >>= 16, s10 >>= 16, s11 >>= 16;
        }
        before = ring.empty + ring.stage * 8;
        if (++ring.stage == W::STAGES) ring.stage = 0, ring.phase ^= 1;
    }
    wgmma_wait<0>();
    if (lane == 0) barrier_arrive(before);
}

DEV float quick_swiglu(float gate, float up, float limit) { // within a few units in the last place of float32
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : (up < -limit ? -limit : up);
    return __fdividef(gate, 1.0f + __expf(-gate)) * up;
}

// 16 channels of 8 columns: v[column][h], rows g and g + 8 of columns 2 t and 2 t + 1. Each lane stores four channels
// of one column, 8 bytes.
template <class Io>
DEV void store_channels(u16* hidden, const i32* pairs, i32 inter, i32 place, i32 column, i32 count, i32 lane, const float v[2][2]) {
    const u32 both[2] = {Io::pack(v[0][0], v[0][1]), Io::pack(v[1][0], v[1][1])};
    const bool second = lane & 8, high = lane & 16; // bits 1 and 2 of g
    const u32 other = __shfl_xor_sync(~0u, second ? both[0] : both[1], 8), own = second ? both[1] : both[0];
    // Channels g & ~2 and g | 2 of the column that this lane keeps, for rows g and g + 8.
    const u32 a = second ? other : own, b = second ? own : other;
    const u32 low = __byte_perm(a, b, 0x5410), up = __byte_perm(a, b, 0x7632);
    const u32 got = __shfl_xor_sync(~0u, high ? low : up, 16), kept = high ? up : low;
    column += (lane & 3) * 2 + (second ? 1 : 0);
    if (column < count)
        *(uint2*)(hidden + (i64)pairs[column] * inter + place + ((lane & 4) ? 0 : 8) + (high ? 4 : 0)) =
            high ? make_uint2(got, kept) : make_uint2(kept, got);
}

template <class Codec, class Io, bool DOWN>
DEV void wide_store(const Params& p, const WideTable& table, i32 lane, i32 warp, float (*acc0)[4], float (*acc1)[4]) {
    constexpr float POST = WideDecoder<Codec>::POST;
    const i32 tile = table.tile + (DOWN ? 2 * warp : warp), count = table.count;
#pragma unroll
    for (int n = 0; n < WIDE_PAIRS / 8; n++) {
        if (n * 8 >= count) break;
        if (DOWN) {
#pragma unroll
            for (int c = 0; c < 2; c++) {
                const i32 column = n * 8 + (lane & 3) * 2 + c;
                if (column < count) {
                    float* out = p.partial + (i64)table.pair[column] * p.hidden_size + tile * TILE_ROWS + (lane >> 2);
                    out[0] = acc0[n][c] * POST, out[8] = acc0[n][2 + c] * POST;
                    out[16] = acc1[n][c] * POST, out[24] = acc1[n][2 + c] * POST;
                }
            }
        } else {
            float v[2][2];
#pragma unroll
            for (int c = 0; c < 2; c++)
#pragma unroll
                for (int h = 0; h < 2; h++)
                    v[c][h] = quick_swiglu(acc0[n][2 * h + c] * POST, acc1[n][2 * h + c] * POST, p.limit);
            store_channels<Io>(p.hidden, table.pair, p.inter, tile * TILE_ROWS, n * 8, count, lane, v);
        }
    }
}

template <class Codec, class Io, bool DOWN>
DEV void gemm_wide(const Params& p) {
    typedef Wide<Codec> W;
    const u32 base = (shared_address(wide_memory) + 1023) & ~1023u;
    const u32 full = base + W::AT_BARRIERS, empty = full + W::STAGES * 8, table_full = empty + W::STAGES * 8,
              table_empty = table_full + 16;
    WideTable* tables = (WideTable*)(wide_memory + (base - shared_address(wide_memory)) + W::AT_PAIRS);
    if (threadIdx.x == 0) {
        for (i32 i = 0; i < W::STAGES; i++) barrier_init(full + i * 8, 1 + 64), barrier_init(empty + i * 8, 8);
        for (i32 i = 0; i < 2; i++) barrier_init(table_full + i * 8, 64), barrier_init(table_empty + i * 8, 8);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    wait_for_previous();
    let_next_start();
    const i32 blocks = WideUnits::of(DOWN ? p.hidden_size : 2 * p.inter), units = *p.entry_count * blocks;
    if (threadIdx.x >= 256) {
        give_registers<40>();
        wide_copy<Codec, DOWN>(p, blocks, units, base, tables);
        return;
    }
    take_registers<232>();
    // Through a shuffle, so that ptxas keeps them instead of asking for the thread's number in the innermost loop.
    const i32 lane = __shfl_sync(~0u, threadIdx.x & 31, threadIdx.x & 31), warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);
    const i32 groups = (DOWN ? p.inter : p.hidden_size) / (TILE_K * GROUP_TILES);
    WideRing ring{base, full, empty, 0, 0};
    i32 turn = 0, table_phase = 0;
    for (i32 unit = blockIdx.x; unit < units; unit += gridDim.x) {
        barrier_wait(table_full + turn * 8, table_phase);
        const WideTable& table = tables[turn];
        float acc0[WIDE_PAIRS / 8][4], acc1[WIDE_PAIRS / 8][4];
#pragma unroll
        for (int n = 0; n < WIDE_PAIRS / 8; n++)
#pragma unroll
            for (int r = 0; r < 4; r++) acc0[n][r] = acc1[n][r] = 0.0f;
        wide_multiply<Codec, DOWN>(__shfl_sync(~0u, table.count, 0), groups, ring, lane, warp, acc0, acc1);
        wide_store<Codec, Io, DOWN>(p, table, lane, warp, acc0, acc1);
        __syncwarp();
        if (lane == 0) barrier_arrive(table_empty + turn * 8);
        turn ^= 1;
        if (turn == 0) table_phase ^= 1;
    }
}

// Token t in operand B's order.
DEV void prepare_wide(const Params& p, i32 t) {
    const u16* row = (const u16*)p.x + (i64)t * p.hidden_size;
    u32* out = (u32*)((u16*)p.activations + (i64)t * p.hidden_size);
    for (i32 c = threadIdx.x; c < p.hidden_size / 16; c += blockDim.x) { // 16 channels
        const uint4 a = ((const uint4*)row)[2 * c], b = ((const uint4*)row)[2 * c + 1];
        ((uint4*)out)[2 * c] = make_uint4(__byte_perm(a.x, a.y, 0x7632), __byte_perm(a.z, a.w, 0x7632), __byte_perm(b.x, b.y, 0x7632), __byte_perm(b.z, b.w, 0x7632));
        ((uint4*)out)[2 * c + 1] = make_uint4(__byte_perm(a.x, a.y, 0x5410), __byte_perm(a.z, a.w, 0x5410), __byte_perm(b.x, b.y, 0x5410), __byte_perm(b.z, b.w, 0x5410));
    }
}
