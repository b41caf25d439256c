// A layer makes its own experts resident: the rules of `ziggurat.kernels.admission`, which says what happens in what
// order. Block 0 of the route kernel follows them before it lists the work; `gather_missing` then copies the rows.
#pragma once
#include "ahead.cuh"

constexpr i32 CANDIDATES = WARP; // slots of a look: a lane each
constexpr u32 HALF_LIFE = 64;
constexpr u32 HEAT_UNIT = 1u << 12, HEAT_MOST = 0x7FFFFFFFu;

DEV u32 decayed(u32 heat, u32 age) {
    const u32 halvings = age / HALF_LIFE, rest = age % HALF_LIFE;
    const u32 v = halvings > 31 ? 0u : heat >> halvings;
    return v - (u32)((u64)(v >> 1) * rest / HALF_LIFE);
}
DEV u32 heated(u32 heat, u32 age, i32 pairs) {
    const u64 sum = (u64)decayed(heat, age) + (u64)pairs * HEAT_UNIT;
    return sum < HEAT_MOST ? (u32)sum : HEAT_MOST;
}

// After `admit`; the row may still be on its way.
DEV i32 slot_now(const Params& p, i32 e) { return (i32)load_fresh((const u32*)p.slots + e); }

struct ExpertSet { // in shared memory
    u32 words[MAX_EXPERTS / 32];
    __device__ __forceinline__ bool has(i32 e) const { return words[e >> 5] >> (e & 31) & 1u; }
    __device__ __forceinline__ void add(i32 e) { atomicOr(&words[e >> 5], 1u << (e & 31)); }
};

// What it costs to take a slot: nothing if it is free, more the warmer its owner is, NEVER for slots in use.
constexpr u32 NEVER = ~0u;
DEV u32 cost_of(const Params& p, i32 owner, i32 clock, const ExpertSet& used) {
    const Admission& a = p.admission;
    if (owner == NOBODY) return 0;
    const i32 expert = owner - a.first_key;
    if (owner < 0 || (expert >= 0 && expert < p.experts && used.has(expert))) return NEVER;
    return 1 + decayed((u32)a.heat[owner], (u32)clock - (u32)a.last[owner]);
}

// The whole block of WARPS warps: the absent experts in ascending order. Costs do not change while a layer is admitted,
// except for slots just taken; so each warp prepares a look, and the first one goes through them.
template <int WARPS>
DEV void admit_absent(const Params& p, i32 clock, const ExpertSet& used, const ExpertSet& absent) {
    __shared__ u32 costs[WARPS][CANDIDATES];
    __shared__ i32 owners[WARPS][CANDIDATES];
    __shared__ i32 looked; // how many of these looks were used; negative: and no more are needed
    const Admission& a = p.admission;
    const i32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const i32 width = min(CANDIDATES, a.slots), most = (a.slots + CANDIDATES - 1) / CANDIDATES + 1;
    i32 hand = a.state[HAND];
    // Of the first warp: experts of a word that are still to be admitted, the places of all its experts, a lane each.
    i32 word = -1, place = -1, expert = -1, looks = 0, copies = 0;
    u32 rest = 0, head = (u32)a.state[LOG_HEAD];
    for (bool more = true; more;) {
        const i32 start = (hand + warp * CANDIDATES) % a.slots;
        const i32 mine = start + lane < a.slots ? start + lane : start + lane - a.slots;
        const i32 whose = lane < width ? a.owners[mine] : WITHHELD;
        owners[warp][lane] = whose;
        costs[warp][lane] = cost_of(p, whose, clock, used);
        __syncthreads();
        if (warp == 0) {
            i32 look = 0;
            while (true) {
                if (expert < 0) { // the next one
                    while (rest == 0 && ++word * 32 < p.experts) {
                        rest = absent.words[word];
                        place = rest >> lane & 1u ? a.places[a.first_key + word * 32 + lane] : -1;
                    }
                    if (rest == 0) {
                        more = false;
                        break;
                    }
                    expert = word * 32 + __ffs(rest) - 1;
                    looks = 0;
                }
                const i32 from = __shfl_sync(~0u, place, expert & 31);
                i32 slot = -1, evicted = NOBODY;
                while (from >= 0 && slot < 0 && looks < most && look < WARPS) {
                    const u32 cost = costs[look][lane], least = __reduce_min_sync(~0u, cost);
                    if (least != NEVER) {
                        const i32 first = __ffs(__ballot_sync(~0u, cost == least)) - 1;
                        slot = ((hand + look * CANDIDATES) % a.slots + first) % a.slots;
                        evicted = owners[look][first];
                        // The same slot in later looks, if they come around to it.
                        i32 at = slot - (hand + lane * CANDIDATES) % a.slots;
                        if (at < 0) at += a.slots;
                        if (lane > look && lane < WARPS && at < width) costs[lane][at] = NEVER;
                        __syncwarp();
                    }
                    look++, looks++;
                }
                if (from >= 0 && slot < 0 && looks < most) break; // out of looks
                const i32 key = a.first_key + expert;
                if (lane == 0) {
                    if (evicted >= 0) a.table[evicted] = -1;
                    if (slot >= 0) {
                        a.owners[slot] = key;
                        a.table[key] = slot;
                        a.copies[copies] = make_int2(from, slot);
                    }
                    a.log[head & a.log_mask] = make_int4(clock, key, slot, evicted);
                }
                copies += slot >= 0;
                head++;
                rest &= rest - 1;
                expert = -1;
            }
            if (lane == 0) looked = more ? look : ~look;
        }
        __syncthreads();
        more = looked >= 0;
        hand = (hand + (more ? looked : ~looked) * CANDIDATES) % a.slots;
    }
    if (threadIdx.x == 0) {
        a.state[HAND] = hand;
        a.state[LOG_HEAD] = (i32)head;
        a.state[COPIES] = copies;
    }
}

// The clock of this call; every thread of the block asks before a barrier, behind which one of them sets it.
DEV i32 clock_now(const Params& p, bool any_live) {
    return (i32)((u32)p.admission.state[CLOCK] + (any_live && p.admission.begins ? 1u : 0u));
}

// Heat of an expert, asked for long before it is needed.
struct Use {
    i32 heat, last;
    __device__ __forceinline__ Use(const Params& p, i32 e) : heat(0), last(0) {
        if (!admitted(p) || e < 0) return;
        heat = p.admission.heat[p.admission.first_key + e];
        last = p.admission.last[p.admission.first_key + e];
    }
    // Live pairs are routed to it, `pairs` of them not of a prompt.
    __device__ __forceinline__ void note(const Params& p, i32 clock, i32 e, i32 pairs) const {
        if (pairs <= 0) return;
        const i32 key = p.admission.first_key + e;
        p.admission.heat[key] = (i32)heated((u32)heat, (u32)clock - (u32)last, pairs);
        p.admission.last[key] = clock;
    }
};

// The whole block, behind a barrier that follows the last `used.add`, `absent.add` and `clock_now`: true if experts
// were absent, whose slots, for those that got one, are in the table now. `lacks`: some thread added one to `absent`.
template <int WARPS>
DEV bool admit(const Params& p, i32 clock, bool lacks, const ExpertSet& used, const ExpertSet& absent) {
    if (threadIdx.x == 0) p.admission.state[CLOCK] = clock;
    if (!lacks) {
        if (threadIdx.x == 0) p.admission.state[COPIES] = 0;
        return false;
    }
    admit_absent<WARPS>(p, clock, used, absent); // ends with a barrier behind all changes of the table
    return true;
}

// Rows of the copy list, arena -> pool. Chunks of all rows are dealt to the blocks in turn; `next` is the block's next
// one, counted from the current row. AHEAD: what was guessed and is in a spare comes from there, while the link is waited
// for.
template <bool AHEAD>
DEV void copy_missing(const Params& p) {
    __shared__ Wanted wanted;
    const i32 rows = (i32)load_fresh((const u32*)p.admission.state + COPIES);
    const u32 vectors = (u32)(p.stride / 16), chunk = blockDim.x * GATHER_LOADS, chunks = (vectors + chunk - 1) / chunk;
    const i32 guesses = AHEAD ? call_off(p, rows, chunks, wanted) : 0;
    Arrived arrived(p, wanted, guesses);
    u32 next = blockIdx.x;
    for (i32 r = 0; r < rows; r++) {
        for (i32 g = 0; AHEAD && g < guesses; g++)
            if (wanted.row[g] == r) next += wanted.chunks[g] * gridDim.x;
        if (next < chunks) {
            const uint2 copy = load_fresh((const uint2*)p.admission.copies + r); // place, slot
            const uint4* const from = (const uint4*)(p.admission.arena + (i64)copy.x * p.stride);
            uint4* const to = (uint4*)(const_cast<u8*>(p.pool) + (i64)copy.y * p.stride);
            for (; next < chunks; next += gridDim.x) {
                const u32 base = next * chunk + threadIdx.x;
                uint4 held[GATHER_LOADS];
#pragma unroll
                for (int i = 0; i < GATHER_LOADS; i++)
                    if (base + i * blockDim.x < vectors) held[i] = load_system(from + base + i * blockDim.x);
                if (AHEAD) arrived.copy<GATHER_LOADS / 2>(vectors, chunk);
#pragma unroll
                for (int i = 0; i < GATHER_LOADS; i++)
                    if (base + i * blockDim.x < vectors) to[base + i * blockDim.x] = held[i];
            }
        }
        next -= chunks;
    }
    while (AHEAD && arrived.copy<GATHER_LOADS>(vectors, chunk)) {}
}
