// Expert GEMMs for many pairs: a block takes up to 64 pairs of one expert and 16 tiles of the matrix, two tiles a warp.
// Weights go from memory to registers and are decoded once for all columns; activations go through shared memory, one
// group of 128 k being multiplied while the next one is on its way.
#pragma once
#include "backend.cuh"

constexpr i32 PREFILL_WARPS = 8;
constexpr i32 PREFILL_THREADS = PREFILL_WARPS * 32;

template <class B, int N, int KB>
DEV void multiply_columns(const typename B::Codec::Group w[2], const u8* stage, const u32* scales, i32 lane,
                          float acc[2][N][4]) {
    no_loads_ahead();
    typename B::Tile tile[2];
    tile[0].template decode<KB>(w[0]);
    tile[1].template decode<KB>(w[1]);
#pragma unroll
    for (int n = 0; n < N; n++) {
        if (n % 2 == 0) no_loads_ahead();
        const typename B::Fragment f = B::template fragment<KB>(stage, scales, n * 8 + (lane >> 2), lane);
        B::template multiply<KB>(tile[0], f, acc[0][n]);
        B::template multiply<KB>(tile[1], f, acc[1][n]);
    }
}

struct PrefillUnit {
    Entry entry;
    i32 tile0, tile1;   // of this warp; beyond the matrix they repeat its last tile
    bool first, second; // whether they are to be stored
};

// Without room for two groups in registers: a k-tile of the next group in place of the one just multiplied.
template <class B, int KB>
DEV void replace_part(typename B::Codec::Group w[2], const Matrix& m, const PrefillUnit& u, i32 group, i32 full, i32 lane) {
    if constexpr (!B::Codec::PREFETCH) {
        no_loads_ahead();
        if (group + 1 < full) {
            w[0].template load_part<KB>(m, u.tile0, group + 1, lane);
            w[1].template load_part<KB>(m, u.tile1, group + 1, lane);
        }
    }
}

// N column tiles of 8 pairs; the pairs of an entry are no more than that.
template <class B, bool DOWN, int N>
DEV void prefill_unit(const Params& p, const Matrix& m, const PrefillUnit& u, u8 (*stages)[PREFILL_PAIRS * B::STAGE_ROW],
                      u32 (*stage_scales)[PREFILL_PAIRS]) {
    typedef typename B::Codec::Group Group;
    constexpr int CHUNKS = N * 8 * 16 / PREFILL_THREADS; // eight-value chunks of a stage that a thread moves
    constexpr bool PREFETCH = B::Codec::PREFETCH;
    const i32 tid = threadIdx.x, lane = tid & 31, chunk = tid & 15;
    const i32 full = m.k_tiles / GROUP_TILES, rest = m.k_tiles % GROUP_TILES, groups = full + (rest > 0);
    typename B::Column source[CHUNKS];
#pragma unroll
    for (int i = 0; i < CHUNKS; i++)
        source[i] = B::template column<DOWN>(p, column_pair(p, u.entry, (i * PREFILL_THREADS + tid) >> 4));
    typename B::Chunk moving[CHUNKS];
    Group w[2], next[2];
    float acc[2][N][4] = {};

    auto load = [&](i32 group, Group into[2]) {
        into[0].load(m, u.tile0, group, lane);
        into[1].load(m, u.tile1, group, lane);
    };
    auto fetch = [&](i32 group) {
        // In a last, smaller group whole k-tiles are repeated: nobody multiplies them.
        const i32 k_chunk = min(group * 16 + chunk, m.k_tiles * 4 - 4 + (chunk & 3));
#pragma unroll
        for (int i = 0; i < CHUNKS; i++) moving[i] = B::template fetch<DOWN>(p, source[i], k_chunk);
    };
    auto store = [&](i32 turn) {
#pragma unroll
        for (int i = 0; i < CHUNKS; i++)
            B::template stage<DOWN>(stages[turn], stage_scales[turn], source[i], (i * PREFILL_THREADS + tid) >> 4, chunk,
                                    moving[i]);
    };
    if (full > 0) load(0, w);
    fetch(0);
    store(0);
    __syncthreads();
    for (i32 group = 0; group < full; group++) {
        const i32 turn = group & 1;
        if (PREFETCH && group + 1 < full) load(group + 1, next);
        if (group + 1 < groups) fetch(group + 1);
        multiply_columns<B, N, 0>(w, stages[turn], stage_scales[turn], lane, acc);
        replace_part<B, 0>(w, m, u, group, full, lane);
        multiply_columns<B, N, 1>(w, stages[turn], stage_scales[turn], lane, acc);
        replace_part<B, 1>(w, m, u, group, full, lane);
        multiply_columns<B, N, 2>(w, stages[turn], stage_scales[turn], lane, acc);
        replace_part<B, 2>(w, m, u, group, full, lane);
        multiply_columns<B, N, 3>(w, stages[turn], stage_scales[turn], lane, acc);
        replace_part<B, 3>(w, m, u, group, full, lane);
        if (group + 1 < groups) store(turn ^ 1);
        if (PREFETCH && group + 1 < full) w[0] = next[0], w[1] = next[1];
        __syncthreads();
    }
    if (rest > 0) { // a last group of 1 to 3 k-tiles
        const i32 turn = full & 1;
        w[0].load_tail(m, u.tile0, full, lane);
        w[1].load_tail(m, u.tile1, full, lane);
        multiply_columns<B, N, 0>(w, stages[turn], stage_scales[turn], lane, acc);
        if (rest > 1) multiply_columns<B, N, 1>(w, stages[turn], stage_scales[turn], lane, acc);
        if (rest > 2) multiply_columns<B, N, 2>(w, stages[turn], stage_scales[turn], lane, acc);
        __syncthreads();
    }

    if (!u.first) return;
#pragma unroll
    for (int n = 0; n < N; n++) {
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const i32 column = n * 8 + (lane & 3) * 2 + c;
            const bool real = column < u.entry.count;
            const int2 pair = column_pair(p, u.entry, column);
            const float scale = DOWN ? B::hidden_scale(p, pair.x) : B::input_scale(p, pair.y);
            u32 amax = 0;
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const i32 r = 2 * h + c, line = (lane >> 2) + 8 * h;
                const float a = acc[0][n][r] * scale, b = acc[1][n][r] * scale;
                if (DOWN) {
                    float* out = p.partial + (i64)pair.x * p.hidden_size + line;
                    if (real) out[u.tile0 * TILE_ROWS] = a;
                    if (real && u.second) out[u.tile1 * TILE_ROWS] = b;
                } else if (real) {
                    amax = max(amax, B::store_hidden(p, pair.x, u.tile0 * TILE_ROWS + line, swiglu(a, b, p.limit)));
                }
            }
            if (!DOWN && B::NEEDS_AMAX) {
                amax = max(amax, __shfl_xor_sync(~0u, amax, 4));
                amax = max(amax, __shfl_xor_sync(~0u, amax, 8));
                amax = max(amax, __shfl_xor_sync(~0u, amax, 16));
                if (lane < 4 && real) atomicMax(&p.hidden_amax[pair.x], amax);
            }
        }
    }
}

template <class B, bool DOWN>
DEV void gemm_prefill(const Params& p) {
    __shared__ __align__(16) u8 stages[2][PREFILL_PAIRS * B::STAGE_ROW];
    __shared__ u32 stage_scales[2][PREFILL_PAIRS];
    if (DOWN)
        wait_for_previous();
    else
        wait_for_list(p);
    let_next_start();
    const i32 warp = threadIdx.x >> 5;
    const i32 matrix_tiles = (DOWN ? p.hidden_size : p.inter) / TILE_ROWS;
    const i32 per_block = DOWN ? 2 * PREFILL_WARPS : PREFILL_WARPS;
    const i32 blocks = (matrix_tiles + per_block - 1) / per_block, units = *p.entry_count * blocks;
    Matrix m;
    m.k_tiles = (DOWN ? p.inter : p.hidden_size) / TILE_K;
    for (i32 unit = blockIdx.x; unit < units; unit += gridDim.x) {
        const i32 number = unit / blocks, block = unit - number * blocks;
        if (!DOWN && number >= p.entry_count[RESIDENT]) wait_for_previous(); // for a row that is still on its way
        const i32 wanted = DOWN ? block * per_block + 2 * warp : block * per_block + warp;
        PrefillUnit u;
        u.entry = p.entries[number];
        u.tile0 = min(wanted, matrix_tiles - 1);
        u.tile1 = DOWN ? min(wanted + 1, matrix_tiles - 1) : matrix_tiles + u.tile0;
        u.first = wanted < matrix_tiles;
        u.second = DOWN && wanted + 1 < matrix_tiles;
        const u8* row = p.pool + (i64)u.entry.slot * p.stride;
        m.codes = DOWN ? row + p.w2_codes : row;
        m.scales = row + (DOWN ? p.w2_scales : p.w13_scales);
        if (u.entry.count <= PREFILL_PAIRS / 2)
            prefill_unit<B, DOWN, PREFILL_PAIRS / 16>(p, m, u, stages, stage_scales);
        else
            prefill_unit<B, DOWN, PREFILL_PAIRS / 8>(p, m, u, stages, stage_scales);
    }
    if (!DOWN) wait_for_previous(); // whoever waits for this kernel relies on all before it
}
