// Expert GEMMs for many pairs: a block takes up to 64 pairs of one expert and 16 tiles of the matrix, two tiles a warp.
// Weights go from memory to registers and are decoded once for all columns; activations go through shared memory, one
// group of 128 k being multiplied while the next one is on its way.
#pragma once
#include "backend.cuh"

constexpr i32 PREFILL_WARPS = 8;
constexpr i32 PREFILL_THREADS = PREFILL_WARPS * 32;
constexpr i32 COLUMN_TILES = PREFILL_PAIRS / 8;
constexpr i32 CHUNKS = PREFILL_PAIRS * 16 / PREFILL_THREADS; // eight-value chunks of a stage that a thread moves

template <class B, int KB>
DEV void multiply_columns(const typename B::Codec::Group w[2], const u8* stage, const u32* scales, i32 columns,
                          i32 lane, float acc[2][COLUMN_TILES][4]) {
    typename B::Tile tile[2];
    tile[0].template decode<KB>(w[0]);
    tile[1].template decode<KB>(w[1]);
#pragma unroll
    for (int n = 0; n < COLUMN_TILES; n++)
        if (n < columns) {
            const typename B::Fragment f = B::template fragment<KB>(stage, scales, n * 8 + (lane >> 2), lane);
            B::template multiply<KB>(tile[0], f, acc[0][n]);
            B::template multiply<KB>(tile[1], f, acc[1][n]);
        }
}

template <class B, bool DOWN>
DEV void gemm_prefill(const Params& p) {
    __shared__ __align__(16) u8 stages[2][PREFILL_PAIRS * B::STAGE_ROW];
    __shared__ u32 stage_scales[2][PREFILL_PAIRS];
    wait_for_previous();
    let_next_start();
    typedef typename B::Codec::Group Group;
    const i32 tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    const i32 matrix_tiles = (DOWN ? p.hidden_size : p.inter) / TILE_ROWS;
    const i32 per_block = DOWN ? 2 * PREFILL_WARPS : PREFILL_WARPS;
    const i32 blocks = (matrix_tiles + per_block - 1) / per_block, units = *p.entry_count * blocks;
    Matrix m;
    m.k_tiles = (DOWN ? p.inter : p.hidden_size) / TILE_K;
    const i32 groups = (m.k_tiles + GROUP_TILES - 1) / GROUP_TILES;
    for (i32 unit = blockIdx.x; unit < units; unit += gridDim.x) {
        const i32 number = unit / blocks, block = unit - number * blocks;
        const Entry entry = p.entries[number];
        const u8* row = p.pool + (i64)entry.slot * p.stride;
        m.codes = DOWN ? row + p.w2_codes : row;
        m.scales = row + (DOWN ? p.w2_scales : p.w13_scales);
        // Tiles beyond the matrix repeat its last one; they are not stored.
        const i32 wanted = DOWN ? block * per_block + 2 * warp : block * per_block + warp;
        const i32 tile0 = min(wanted, matrix_tiles - 1);
        const i32 tile1 = DOWN ? min(wanted + 1, matrix_tiles - 1) : matrix_tiles + tile0;
        const i32 columns = (entry.count + 7) / 8;

        typename B::Column source[CHUNKS];
#pragma unroll
        for (int i = 0; i < CHUNKS; i++)
            source[i] = B::template column<DOWN>(p, column_pair(p, entry, (i * PREFILL_THREADS + tid) >> 4));
        const i32 chunk = tid & 15;
        typename B::Chunk moving[CHUNKS];
        constexpr bool PREFETCH = B::Codec::PREFETCH;
        Group w[2], next[2];
        float acc[2][COLUMN_TILES][4] = {};

        auto load = [&](i32 group, Group into[2]) {
            if (group < m.k_tiles / GROUP_TILES) {
                into[0].load(m, tile0, group, lane);
                into[1].load(m, tile1, group, lane);
            } else {
                into[0].load_tail(m, tile0, group, lane);
                into[1].load_tail(m, tile1, group, lane);
            }
        };
        auto fetch = [&](i32 group) {
            // All lanes of a k-tile stay together: its shuffles need them.
            const i32 k_chunk = min(group * 16 + chunk, m.k_tiles * 4 - 4 + (chunk & 3));
#pragma unroll
            for (int i = 0; i < CHUNKS; i++)
                if (((i * PREFILL_THREADS + tid) >> 4) < columns * 8)
                    moving[i] = B::template fetch<DOWN>(source[i], k_chunk);
        };
        auto store = [&](i32 turn) {
#pragma unroll
            for (int i = 0; i < CHUNKS; i++)
                B::template stage<DOWN>(stages[turn], stage_scales[turn], source[i], (i * PREFILL_THREADS + tid) >> 4,
                                        chunk, moving[i]);
        };
        if (PREFETCH) load(0, w);
        fetch(0);
        store(0);
        __syncthreads();
        for (i32 group = 0; group < groups; group++) {
            const i32 turn = group & 1, rest = m.k_tiles - group * GROUP_TILES;
            if (!PREFETCH) load(group, w);
            if (group + 1 < groups) {
                if (PREFETCH) load(group + 1, next);
                fetch(group + 1);
            }
            const u8* stage = stages[turn];
            const u32* scales = stage_scales[turn];
            multiply_columns<B, 0>(w, stage, scales, columns, lane, acc);
            if (rest > 1) multiply_columns<B, 1>(w, stage, scales, columns, lane, acc);
            if (rest > 2) multiply_columns<B, 2>(w, stage, scales, columns, lane, acc);
            if (rest > 3) multiply_columns<B, 3>(w, stage, scales, columns, lane, acc);
            if (group + 1 < groups) {
                store(turn ^ 1);
                if (PREFETCH) w[0] = next[0], w[1] = next[1];
            }
            __syncthreads();
        }

        if (wanted >= matrix_tiles) continue;
        const bool second = !DOWN || wanted + 1 < matrix_tiles;
#pragma unroll
        for (int n = 0; n < COLUMN_TILES; n++) {
            if (n >= columns) break;
#pragma unroll
            for (int c = 0; c < 2; c++) {
                const i32 column = n * 8 + (lane & 3) * 2 + c;
                const bool real = column < entry.count;
                const i32 pair = column_pair(p, entry, column);
                u32 amax = 0;
#pragma unroll
                for (int h = 0; h < 2; h++) {
                    const i32 r = 2 * h + c, line = (lane >> 2) + 8 * h;
                    if (DOWN) {
                        float* out = p.partial + (i64)pair * p.hidden_size;
                        const float scale = B::hidden_scale(p, pair);
                        if (real) out[tile0 * TILE_ROWS + line] = acc[0][n][r] * scale;
                        if (real && second) out[tile1 * TILE_ROWS + line] = acc[1][n][r] * scale;
                    } else if (real) {
                        const float scale = B::input_scale(p, pair / p.top_k);
                        const float value = swiglu(acc[0][n][r] * scale, acc[1][n][r] * scale, p.limit);
                        amax = max(amax, B::store_hidden(p, pair, tile0 * TILE_ROWS + line, value));
                    }
                }
                if (!DOWN && B::NEEDS_AMAX) {
                    amax = max(amax, __shfl_xor_sync(~0u, amax, 4));
                    amax = max(amax, __shfl_xor_sync(~0u, amax, 8));
                    amax = max(amax, __shfl_xor_sync(~0u, amax, 16));
                    if (lane < 4 && real) atomicMax(&p.hidden_amax[pair], amax);
                }
            }
        }
    }
}
