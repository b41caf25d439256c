// Expert GEMMs for a few pairs an expert: all that counts is that each row's bytes stream through once.
//
// A block takes a unit: an entry (up to 8 pairs) and 4 tiles (2 of verbatim rows) of 16 rows of its matrix. Its 4 warps split K. Every
// warp has its own ring of two stages in shared memory: while it multiplies one stage, the next one, of the same unit
// or of the block's next unit, is on its way. The four partial sums are added in order at the end, so a result depends
// on nothing but its own pair. Blocks stay and take unit after unit.
#pragma once
#include "backend.cuh"

constexpr i32 DECODE_WARPS = 4;
constexpr i32 DECODE_THREADS = DECODE_WARPS * 32;

// The groups [first, last) of 128 k that a warp multiplies; `full` of them have all four k-tiles.
struct Share {
    i32 first, full, last;
    __device__ __forceinline__ Share(i32 k_tiles, i32 warp) {
        const i32 groups = (k_tiles + GROUP_TILES - 1) / GROUP_TILES;
        first = warp * groups / DECODE_WARPS;
        last = (warp + 1) * groups / DECODE_WARPS;
        full = min(last, k_tiles / GROUP_TILES);
    }
};

// An entry of the list of work. With one token (`direct`) there is no need for a list: its pairs are the entries, known
// before the route kernel has run, so that weights can be asked for at once. A pair without a slot has no columns then.
DEV i32 entry_count(const Params& p) { return p.direct ? p.tokens * p.top_k : *p.entry_count; }
template <bool AWAIT> // rows that are still on their way
DEV Entry entry_at(const Params& p, i32 number) {
    if (!p.direct) {
        if (AWAIT && number >= p.entry_count[RESIDENT]) wait_for_previous();
        return p.entries[number];
    }
    const i32 e = number < live_tokens(p) * p.top_k ? expert_of(p, number) : -1;
    const i32 slot = e < 0 ? -1 : p.slots[e];
    return Entry{max(slot, 0), number, slot >= 0, e};
}

// A unit's place: tile i of it is tile `first + tile_offset(i)` of the matrix.
struct Unit {
    Entry entry;
    i32 block, first, valid;
    Matrix m;
};

// Units of gate and up: COUNT / 2 consecutive tiles of the gate and the same ones of the up projection. Both numbers of
// tiles are even.
template <int COUNT>
struct GateUpUnits {
    static constexpr int TILES = COUNT;
    static constexpr bool AWAIT = true;
    DEV i32 blocks(const Params& p) { return p.inter / TILE_ROWS / (COUNT / 2); }
    DEV i32 k_tiles(const Params& p) { return p.hidden_size / TILE_K; }
    DEV void locate(const Params& p, Unit& u) {
        u.m.codes = p.pool + (i64)u.entry.slot * p.stride;
        u.m.scales = u.m.codes + p.w13_scales;
        u.first = u.block * (COUNT / 2);
        u.valid = COUNT;
    }
    DEV i32 tile_offset(const Params& p, const Unit&, i32 i) {
        return i % (COUNT / 2) + (i >= COUNT / 2 ? p.inter / TILE_ROWS : 0);
    }
};
// Units of down: consecutive tiles. Those beyond the matrix repeat its last one and are not stored.
template <int COUNT>
struct DownUnits {
    static constexpr int TILES = COUNT;
    static constexpr bool AWAIT = false;
    DEV i32 blocks(const Params& p) { return (p.hidden_size / TILE_ROWS + COUNT - 1) / COUNT; }
    DEV i32 k_tiles(const Params& p) { return p.inter / TILE_K; }
    DEV void locate(const Params& p, Unit& u) {
        const u8* row = p.pool + (i64)u.entry.slot * p.stride;
        u.m.codes = row + p.w2_codes;
        u.m.scales = row + p.w2_scales;
        u.first = u.block * COUNT;
        u.valid = min(COUNT, p.hidden_size / TILE_ROWS - u.first);
    }
    DEV i32 tile_offset(const Params&, const Unit& u, i32 i) { return min(i, u.valid - 1); }
};

// The units of a block, one after the other, without a division for each.
template <class Units>
struct Walk {
    i32 entries, entry, block;

    __device__ __forceinline__ Walk(const Params& p, i32 entries) : entries(entries) {
        const i32 blocks = Units::blocks(p);
        entry = (i32)blockIdx.x / blocks;
        block = (i32)blockIdx.x - entry * blocks;
    }
    __device__ __forceinline__ bool valid() const { return entry < entries; }
    __device__ __forceinline__ void advance(const Params& p) {
        const i32 blocks = Units::blocks(p);
        block += gridDim.x;
        if (block >= blocks) {
            const i32 more = block < 4 * blocks ? 1 + (block >= 2 * blocks) + (block >= 3 * blocks) : block / blocks;
            entry += more;
            block -= more * blocks;
        }
    }
    __device__ __forceinline__ Unit unit(const Params& p) const {
        Unit u;
        u.entry = entry_at<Units::AWAIT>(p, entry);
        u.block = block;
        u.m.k_tiles = Units::k_tiles(p);
        Units::locate(p, u);
        return u;
    }
};

// A warp's stream of code groups through shared memory: two stages of GROUPS groups of TILES tiles.
template <class B, class Units>
struct Ring {
    typedef typename B::Codec Codec;
    static constexpr int TILES = Units::TILES, WORDS = Codec::WORDS;
    static constexpr int GROUPS = Codec::STAGE_BLOCKS / TILES > 0 ? Codec::STAGE_BLOCKS / TILES : 1; // of a stage
    static constexpr int PIECES = GROUPS * 4; // copies of 16 bytes that hold a tile's scales of a stage
    static constexpr int CODES = TILES * GROUPS * 512 * WORDS, STAGE = CODES + TILES * GROUPS * 64;
    static constexpr int BYTES = 2 * STAGE; // of a warp

    const Params& p;
    const Share& share;
    u8* stages;
    i32 lane;
    Walk<Units> ahead;
    const u8* codes;  // where this lane's next copies of tile 0 begin
    const u8* scales; // and its copy of scales
    i32 offset[TILES - 1]; // from tile 0 to the others, in bytes
    i32 next_base, turn;

    __device__ __forceinline__ Ring(const Params& p, const Share& share, u8* shared, i32 warp, i32 lane,
                                    const Walk<Units>& walk)
        : p(p), share(share), stages(shared + warp * BYTES), lane(lane), ahead(walk), turn(0) {
        enter();
        issue(0);
    }

    __device__ __forceinline__ bool any() const { return ahead.valid() && share.first < share.full; }

    // The first stage of the unit that `ahead` points at.
    __device__ __forceinline__ void enter() {
        next_base = share.first;
        if (!any()) return;
        const Unit u = ahead.unit(p);
        codes = Codec::Group::codes_of(u.m, u.first, next_base) + lane * 16;
        const i32 tile_bytes = u.m.k_tiles * (128 * WORDS);
#pragma unroll
        for (int i = 1; i < TILES; i++) offset[i - 1] = Units::tile_offset(p, u, i) * tile_bytes;
        scales = Codec::Group::scales_of(u.m, u.first + Units::tile_offset(p, u, min(lane / PIECES, TILES - 1)), next_base) +
                 lane % PIECES * 16;
    }

    __device__ __forceinline__ void issue(i32 into) {
        if (any()) {
            u8* stage = stages + into * STAGE;
            const i32 count = min(GROUPS, share.full - next_base);
            if (count == GROUPS) {
                copy_codes<GROUPS>(stage + lane * 16);
            } else {
#pragma unroll
                for (int a = 0; a < GROUPS - 1; a++)
                    if (a < count) copy_group(stage + lane * 16, a);
            }
            if (lane < TILES * PIECES && lane % PIECES < count * 4) copy_async(stage + CODES + lane * 16, scales);
            codes += GROUPS * 512 * WORDS;
            scales += GROUPS * 64;
            next_base += GROUPS;
            if (next_base >= share.full) {
                ahead.advance(p);
                enter();
            }
        }
        copies_issued();
    }
    template <int COUNT>
    __device__ __forceinline__ void copy_codes(u8* to) const {
#pragma unroll
        for (int a = 0; a < COUNT; a++) copy_group(to, a);
    }
    __device__ __forceinline__ void copy_group(u8* to, int a) const {
#pragma unroll
        for (int i = 0; i < TILES; i++)
#pragma unroll
            for (int w = 0; w < WORDS; w++)
                copy_async(to + ((i * GROUPS + a) * WORDS + w) * 512,
                           codes + (i > 0 ? offset[i - 1] : 0) + (a * WORDS + w) * 512);
    }

    // Asks for the stage after the current one and waits for the current one.
    __device__ __forceinline__ void arrive() {
        issue(turn ^ 1);
        copies_arrived<1>();
        __syncwarp();
    }
    __device__ __forceinline__ void read(typename B::Operand& g, int i, int a) const {
        const u8* stage = stages + turn * STAGE;
#pragma unroll
        for (int w = 0; w < WORDS; w++)
            *(uint4*)(g.q + 4 * w) = *(const uint4*)(stage + ((i * GROUPS + a) * WORDS + w) * 512 + lane * 16);
        const u32* words = (const u32*)(stage + CODES) + (i * GROUPS + a) * 16;
        g.s0 = words[lane >> 2];
        g.s1 = words[(lane >> 2) + 8];
    }
    __device__ __forceinline__ void done() { // before the stage is written again
        __syncwarp();
        turn ^= 1;
    }
};

// One tile's group, `count` k-tiles of it.
template <class B>
DEV void multiply_group(const typename B::Operand& w, const typename B::Activations& x, float acc[4],
                        i32 count = GROUP_TILES) {
    B::template tile<0>(w, x, acc);
    if (count > 1) B::template tile<1>(w, x, acc);
    if (count > 2) B::template tile<2>(w, x, acc);
    if (count > 3) B::template tile<3>(w, x, acc);
}

// A last group of 1 to 3 k-tiles, straight from memory.
template <class B, class Units, class Source>
DEV void multiply_tail(const Params& p, const Unit& u, const Share& share, i32 lane, const Source& source,
                       float acc[Units::TILES][4]) {
    if (share.full >= share.last) return;
    source.ready();
    typename B::Activations x;
    source.fetch(x, share.full, u.m.k_tiles - share.full * GROUP_TILES);
    source.convert(x);
#pragma unroll
    for (int i = 0; i < Units::TILES; i++) {
        typename B::Operand w;
        w.load_tail(u.m, u.first + Units::tile_offset(p, u, i), share.full, lane);
        multiply_group<B>(w, x, acc[i], u.m.k_tiles - share.full * GROUP_TILES);
    }
}

// acc[i] += tile i of the unit x the activations, over this warp's part of K, through the ring.
template <class B, class Units, class Source>
DEV void multiply_streamed(Ring<B, Units>& ring, const Unit& u, const Share& share, i32 lane,
                           const Source& source, float acc[Units::TILES][4]) {
    constexpr int TILES = Units::TILES, GROUPS = Ring<B, Units>::GROUPS;
    typename B::Activations next; // a group ahead of the one being multiplied
    for (i32 base = share.first; base < share.full; base += GROUPS) {
        if (base == share.first) {
            source.ready();
            source.fetch(next, base);
        }
        ring.arrive();
#pragma unroll
        for (int a = 0; a < GROUPS; a++)
            if (base + a < share.full) {
                typename B::Activations x = next;
                if (base + a + 1 < share.full) source.fetch(next, base + a + 1);
                source.convert(x);
#pragma unroll
                for (int i = 0; i < TILES; i++) {
                    no_loads_ahead();
                    typename B::Operand w;
                    ring.read(w, i, a);
                    multiply_group<B>(w, x, acc[i]);
                }
            }
        ring.done();
    }
    multiply_tail<B, Units>(ring.p, u, share, lane, source, acc);
}

// The same straight from memory to registers: for rows of 16-bit numbers, long enough to hide their own latency.
template <class B, class Units, class Source>
DEV void multiply_direct(const Params& p, const Unit& u, const Share& share, i32 lane, const Source& source,
                         float acc[Units::TILES][4]) {
    constexpr int TILES = Units::TILES;
    for (i32 group = share.first; group < share.full; group++) {
        typename B::Operand w[TILES];
#pragma unroll
        for (int i = 0; i < TILES; i++) w[i].load(u.m, u.first + Units::tile_offset(p, u, i), group, lane);
        source.ready();
        typename B::Activations x;
        source.fetch(x, group);
        source.convert(x);
#pragma unroll
        for (int i = 0; i < TILES; i++) multiply_group<B>(w[i], x, acc[i]);
    }
    multiply_tail<B, Units>(p, u, share, lane, source, acc);
}

// How a unit is multiplied: through a ring where rows are packed.
template <class B, class Units, bool STREAMED = B::Codec::SCALED>
struct Multiplier {
    Ring<B, Units> ring;
    __device__ __forceinline__ Multiplier(const Params& p, const Share& share, u8* shared, i32 warp, i32 lane,
                                          const Walk<Units>& walk)
        : ring(p, share, shared, warp, lane, walk) {}
    template <class Source>
    __device__ __forceinline__ void run(const Unit& u, const Share& share, i32 lane,
                                        const Source& source, float acc[Units::TILES][4]) {
        multiply_streamed<B, Units>(ring, u, share, lane, source, acc);
    }
};
template <class B, class Units>
struct Multiplier<B, Units, false> {
    const Params& p;
    __device__ __forceinline__ Multiplier(const Params& p, const Share&, u8*, i32, i32, const Walk<Units>&) : p(p) {}
    template <class Source>
    __device__ __forceinline__ void run(const Unit& u, const Share& share, i32 lane,
                                        const Source& source, float acc[Units::TILES][4]) {
        multiply_direct<B, Units>(p, u, share, lane, source, acc);
    }
};

// The warps' partial sums, and their total in order. place = register * 32 + lane, so thread tid of the 128 has place
// tid: register tid / 32 of lane tid % 32.
template <int TILES>
DEV void exchange(float (*shared)[TILES][128], const float acc[TILES][4], i32 warp, i32 lane) {
#pragma unroll
    for (int i = 0; i < TILES; i++)
#pragma unroll
        for (int r = 0; r < 4; r++) shared[warp][i][r * 32 + lane] = acc[i][r];
}
template <int TILES>
DEV float sum_of_warps(float (*shared)[TILES][128], i32 tile, i32 place) {
    float sum = shared[0][tile][place];
#pragma unroll
    for (int w = 1; w < DECODE_WARPS; w++) sum = __fadd_rn(sum, shared[w][tile][place]);
    return sum;
}

extern __shared__ __align__(16) u8 ring_memory[];

template <class B>
DEV void gate_up_decode(const Params& p) {
    typedef GateUpUnits<B::Codec::UNIT_TILES> Units;
    constexpr int TILES = Units::TILES, HALF = TILES / 2;
    __shared__ float shared[DECODE_WARPS][TILES][128];
    const i32 tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    const Share share(Units::k_tiles(p), warp);
    if (!p.direct) wait_for_list(p);
    Walk<Units> walk(p, entry_count(p));
    Multiplier<B, Units> multiplier(p, share, ring_memory, warp, lane, walk);
    if (p.direct) wait_for_previous();
    let_next_start();
    for (; walk.valid(); walk.advance(p)) {
        const Unit u = walk.unit(p);
        float acc[TILES][4] = {};
        typename B::Input source(p, u.entry, lane);
        multiplier.run(u, share, lane, source, acc);
        __syncthreads(); // the sums of the unit before have been read
        exchange<TILES>(shared, acc, warp, lane);
        __syncthreads();
        // This thread sums register `warp` of each warp's lane `lane`.
        const i32 column = (lane & 3) * 2 + (warp & 1), line = (lane >> 2) + 8 * (warp >> 1);
        const int2 pair = column_pair(p, u.entry, column);
        const float scale = B::input_scale(p, pair.y);
        u32 amax = 0;
        if (column < u.entry.count) {
#pragma unroll
            for (int i = 0; i < HALF; i++) {
                const float gate = sum_of_warps<TILES>(shared, i, tid) * scale;
                const float up = sum_of_warps<TILES>(shared, HALF + i, tid) * scale;
                const float value = swiglu(gate, up, p.limit);
                amax = max(amax, B::store_hidden(p, pair.x, (u.first + i) * TILE_ROWS + line, value));
            }
        }
        if (B::NEEDS_AMAX) { // the lanes of one token are 4 apart
            amax = max(amax, __shfl_xor_sync(~0u, amax, 4));
            amax = max(amax, __shfl_xor_sync(~0u, amax, 8));
            amax = max(amax, __shfl_xor_sync(~0u, amax, 16));
            if (lane < 4 && column < u.entry.count) atomicMax(&p.hidden_amax[pair.x], amax);
        }
    }
    wait_for_previous(); // whoever waits for this kernel relies on all before it
}

template <class B>
DEV void down_decode(const Params& p) {
    typedef DownUnits<B::Codec::UNIT_TILES> Units;
    constexpr int TILES = Units::TILES;
    __shared__ float shared[DECODE_WARPS][TILES][128];
    const i32 tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
    // The list of work is older than the kernel before this one, whose blocks had all waited for it; so weights may
    // be asked for while that kernel still runs, unless there are rows that it had to wait for itself. `Hidden` waits
    // before it reads what that kernel writes.
    const Share share(Units::k_tiles(p), warp);
    if (admitted(p)) {
        const uint2 count = load_fresh((const uint2*)p.entry_count);
        if (count.x > count.y) wait_for_previous();
    }
    Walk<Units> walk(p, entry_count(p));
    Multiplier<B, Units> multiplier(p, share, ring_memory, warp, lane, walk);
    bool waited = false;
    for (; walk.valid(); walk.advance(p)) {
        const Unit u = walk.unit(p);
        float acc[TILES][4] = {};
        typename B::Hidden source(p, u.entry, lane, waited);
        multiplier.run(u, share, lane, source, acc);
        if (!waited) { // a warp that has no part of K
            wait_for_previous();
            waited = true;
        }
        let_next_start();
        __syncthreads();
        exchange<TILES>(shared, acc, warp, lane);
        __syncthreads();
        const i32 column = (lane & 3) * 2 + (warp & 1), line = (lane >> 2) + 8 * (warp >> 1);
        const int2 pair = column_pair(p, u.entry, column);
        if (column < u.entry.count) {
            const float scale = B::hidden_scale(p, pair.x);
            float* out = p.partial + (i64)pair.x * p.hidden_size + line;
#pragma unroll
            for (int i = 0; i < TILES; i++) {
                const i32 row = (u.block * TILES + i) * TILE_ROWS;
                if (row < p.hidden_size) out[row] = sum_of_warps<TILES>(shared, i, tid) * scale;
            }
        }
    }
    if (!waited) wait_for_previous();
}
