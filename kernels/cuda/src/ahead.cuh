// Look-ahead: the rules of `ziggurat.kernels.lookahead`. Two kernels beside a layer choose rows of the next one and bring
// them into spares; that layer's gather calls them off and takes over from where they are.
#pragma once
#include "params.cuh"

constexpr i32 MOST_SPARES = 8;
constexpr i32 CHOICE_THREADS = 256; // a guess each
constexpr i32 TAKEN = 1 << 30;      // in `begun`: no chunk is begun any more
enum { AHEAD_COUNT, AHEAD_VALID, AHEAD_CALLED_OFF, AHEAD_GUESSED, AHEAD_MATCHED, AHEAD_FETCHED, AHEAD_USED };

DEV i32 tag_of(const Admission& a, const Ahead& h) {
    return (i32)(load_fresh((const u32*)a.state + CLOCK) * (u32)h.layers + (u32)h.layer);
}
DEV i32* begun_by(const Ahead& h, i32 row) { return h.progress + row * h.lanes; }
DEV i32* done_by(const Ahead& h, i32 row) { return h.progress + (h.spares + row) * h.lanes; }

// One block of CHOICE_THREADS. Nobody reads what it writes before the tag is there, nor while it writes.
DEV void choose_rows(const Guess& p) {
    __shared__ i32 wanted[CHOICE_THREADS];
    __shared__ u32 firsts[CHOICE_THREADS / 32];
    const Admission& a = p.admission;
    const Ahead& h = p.ahead;
    const i32 tid = threadIdx.x, lane = tid & 31, candidates = p.tokens * p.width;
    const i32 token = tid % p.tokens, rank = tid / p.tokens;
    i32 key = -1, place = -1;
    if (tid < candidates && token < *p.live) {
        const i32 at = token * p.width + rank;
        const i64 id = p.ids_are_64 ? ((const i64*)p.ids)[at] : (i64)((const i32*)p.ids)[at];
        if (id >= 0 && id < p.experts) key = a.first_key + (i32)id;
        if (key >= 0 && a.table[key] < 0) place = a.places[key];
    }
    wanted[tid] = place >= 0 ? key : -1;
    for (i32 i = tid; i < 2 * h.spares * h.lanes; i += blockDim.x) h.progress[i] = 0;
    __syncthreads();
    bool chosen = place >= 0;
    for (i32 q = 0; q < min(tid, candidates); q++) chosen = chosen && wanted[q] != key;
    const u32 bits = __ballot_sync(~0u, chosen);
    if (lane == 0) firsts[tid >> 5] = bits;
    __syncthreads();
    i32 number = __popc(bits & ((1u << lane) - 1)), all = 0;
    for (i32 w = 0; w < CHOICE_THREADS / 32; w++) {
        if (w < tid >> 5) number += __popc(firsts[w]);
        all += __popc(firsts[w]);
    }
    if (chosen && number < h.spares) h.rows[number] = make_int2(place, key);
    __syncthreads();
    if (tid == 0) {
        const i32 count = min(all, h.spares);
        h.words[AHEAD_COUNT] = count;
        h.words[AHEAD_GUESSED] += count;
        __threadfence();
        atomicExch(h.words + AHEAD_VALID, tag_of(a, h));
    }
}

constexpr i32 GATHER_THREADS = 512; // at most
constexpr i32 GATHER_LOADS = 8;     // of 16 bytes, in flight per thread

// The host may have put another row into a place since a launch read it last: a load at system scope sees no stale line.
DEV uint4 load_system(const uint4* at) {
    uint4 v;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3},[%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(at)
                 : "memory");
    return v;
}

// Any number of blocks, with as many threads as the gather's have. Each serves lanes of its own: a lane of a row is what
// one of the gather's blocks would copy of it, every `lanes`-th chunk.
DEV void fetch_rows(const Guess& p) {
    __shared__ i32 mine; // whether the block goes on
    const Ahead& h = p.ahead;
    const u32 vectors = (u32)(p.stride / 16), chunk = blockDim.x * GATHER_LOADS, chunks = (vectors + chunk - 1) / chunk;
    const i32 count = (i32)load_fresh((const u32*)h.words + AHEAD_COUNT);
    i32 fetched = 0;
    if (threadIdx.x == 0) mine = load_acquire(h.words + AHEAD_CALLED_OFF) != tag_of(p.admission, h);
    __syncthreads();
    bool on = mine;
    for (i32 g = 0; on && g < count; g++) {
        const i64 place = load_fresh((const uint2*)h.rows + g).x;
        const uint4* const from = (const uint4*)(p.admission.arena + place * p.stride);
        uint4* const to = (uint4*)(h.spare + (i64)g * p.stride);
        for (i32 lane = blockIdx.x; on && lane < h.lanes; lane += gridDim.x) {
            i32* const begun_here = begun_by(h, g) + lane;
            i32* const done_here = done_by(h, g) + lane;
            i32 begun = 0;
            for (u32 next = lane; next < chunks; next += h.lanes) {
                __syncthreads(); // all have read `mine`, and stored the chunk before
                if (threadIdx.x == 0) {
                    if (begun > 0) {
                        __threadfence();
                        atomicExch(done_here, begun);
                    }
                    mine = atomicCAS(begun_here, begun, begun + 1) == begun;
                }
                __syncthreads();
                on = mine;
                if (!on) break;
                const u32 base = next * chunk + threadIdx.x;
                uint4 held[GATHER_LOADS];
#pragma unroll
                for (int i = 0; i < GATHER_LOADS; i++)
                    if (base + i * blockDim.x < vectors) held[i] = load_system(from + base + i * blockDim.x);
#pragma unroll
                for (int i = 0; i < GATHER_LOADS; i++)
                    if (base + i * blockDim.x < vectors) to[base + i * blockDim.x] = held[i];
                begun++;
            }
            __syncthreads();
            if (threadIdx.x == 0 && begun > 0) {
                __threadfence();
                atomicExch(done_here, begun);
            }
            fetched += begun;
        }
    }
    if (threadIdx.x == 0 && fetched > 0) atomicAdd(h.words + AHEAD_FETCHED, fetched);
}

// Rows that were guessed, as a block of the layer's gather sees them. In shared memory.
struct Wanted {
    i32 place[MOST_SPARES];
    i32 row[MOST_SPARES];   // of the copy list, negative: nobody wants it
    i32 slot[MOST_SPARES];
    u32 first[MOST_SPARES]; // chunk of this block's
    i32 chunks[MOST_SPARES]; // of this block's that are in the spare
};

// The whole block: no guess is followed any more. How many there were; those that are wanted have arrived as far as
// `wanted` says. Chunks of the copy list are dealt to the blocks in turn, a row's behind those of the row before.
DEV i32 call_off(const Params& p, i32 rows, u32 chunks, Wanted& wanted) {
    __shared__ i32 valid;
    const Ahead& h = p.ahead;
    const i32 tid = threadIdx.x;
    if (tid == 0) {
        const i32 tag = tag_of(p.admission, h);
        if (blockIdx.x == 0) atomicExch(h.words + AHEAD_CALLED_OFF, tag);
        __threadfence();
        valid = load_acquire(h.words + AHEAD_VALID) == tag;
    }
    __syncthreads();
    const i32 count = valid ? (i32)load_fresh((const u32*)h.words + AHEAD_COUNT) : 0;
    if (tid < count) {
        wanted.place[tid] = (i32)load_fresh((const uint2*)h.rows + tid).x;
        wanted.row[tid] = -1;
    }
    __syncthreads();
    for (i32 r = tid; r < rows; r += blockDim.x) {
        const uint2 copy = load_fresh((const uint2*)p.admission.copies + r);
        for (i32 g = 0; g < count; g++)
            if (wanted.place[g] == (i32)copy.x) wanted.row[g] = r, wanted.slot[g] = (i32)copy.y;
    }
    __syncthreads();
    if (tid < count) {
        atomicOr(begun_by(h, tid) + blockIdx.x, TAKEN);
        if (wanted.row[tid] >= 0) {
            const u32 before = (u32)wanted.row[tid] * chunks % gridDim.x;
            const u32 first = (blockIdx.x + gridDim.x - before) % gridDim.x;
            const i32 begun = atomicOr(begun_by(h, tid) + first, TAKEN) & ~TAKEN;
            while (load_acquire(done_by(h, tid) + first) < begun) {}
            wanted.first[tid] = first;
            wanted.chunks[tid] = begun;
            if (begun > 0) atomicAdd(h.words + AHEAD_USED, begun);
            if (blockIdx.x == 0) atomicAdd(h.words + AHEAD_MATCHED, 1);
        }
    }
    __syncthreads();
    return count;
}

// A block's chunks that are in spares, one after the other.
struct Arrived {
    const Params& p;
    const Wanted& wanted;
    i32 count, row, chunk;

    __device__ __forceinline__ Arrived(const Params& p, const Wanted& wanted, i32 count)
        : p(p), wanted(wanted), count(count), row(0), chunk(0) {}

    // Copies the next one, WIDE loads in flight per thread. False if there was none.
    template <int WIDE>
    __device__ __forceinline__ bool copy(u32 vectors, u32 size) {
        while (row < count && (wanted.row[row] < 0 || chunk >= wanted.chunks[row])) row++, chunk = 0;
        if (row >= count) return false;
        const uint4* const from = (const uint4*)(p.ahead.spare + (i64)row * p.stride);
        uint4* const to = (uint4*)(const_cast<u8*>(p.pool) + (i64)wanted.slot[row] * p.stride);
        const u32 base = (wanted.first[row] + chunk * gridDim.x) * size + threadIdx.x;
#pragma unroll
        for (int part = 0; part < GATHER_LOADS; part += WIDE) {
            uint4 held[WIDE];
#pragma unroll
            for (int i = 0; i < WIDE; i++) {
                const u32 at = base + (part + i) * blockDim.x;
                if (at < vectors) held[i] = load_fresh(from + at);
            }
#pragma unroll
            for (int i = 0; i < WIDE; i++) {
                const u32 at = base + (part + i) * blockDim.x;
                if (at < vectors) to[at] = held[i];
            }
        }
        chunk++;
        return true;
    }
};
