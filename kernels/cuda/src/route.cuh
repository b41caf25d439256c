// From a layer's routing to a list of work, and the activations as the matrix instructions want them. Block 0 makes the
// list; block 1 + t prepares token t. An admitted layer makes its experts resident first; entries whose rows are still to
// be copied then come last.
#pragma once
#include "admit.cuh"

DEV i32 expert_of(const Params& p, i32 pair) {
    i64 id = p.ids_are_64 ? ((const i64*)p.ids)[pair] : (i64)((const i32*)p.ids)[pair];
    return id < 0 || id >= p.experts ? -1 : (i32)id;
}

DEV bool is_prefill(const Params& p, i32 pair) { return p.prefill != nullptr && p.prefill[pair / p.top_k]; }

// Up to 256 pairs, one thread each. An entry holds up to 8 pairs of one expert, at 8 * its number.
DEV void route_small(const Params& p) {
    __shared__ i32 expert[256];
    __shared__ i32 rank[256];
    __shared__ u32 starts[2][8]; // of entries: rows in the pool, rows on their way
    __shared__ i32 missing, invalid, lacking;
    __shared__ ExpertSet used, absent;
    const i32 tid = threadIdx.x, lane = tid & 31, pairs = p.tokens * p.top_k, lives = live_tokens(p);
    const bool live = tid < lives * p.top_k;
    const i32 e = live ? expert_of(p, tid) : -1;
    i32 slot = e >= 0 ? p.slots[e] : -1;
    const bool lacked = e >= 0 && slot < 0;
    const Use use(p, e);
    const i32 clock = admitted(p) ? clock_now(p, lives > 0) : 0;
    expert[tid] = e;
    if (tid == 0) missing = invalid = lacking = 0;
    if (tid < MAX_EXPERTS / 32) used.words[tid] = absent.words[tid] = 0;
    __syncthreads();

    i32 before = 0, all = 0, decode = 0;
    for (i32 q = 0; q < pairs; q++) {
        const bool same = expert[q] == e;
        before += same && q < tid;
        all += same;
        decode += same && !is_prefill(p, q);
    }
    rank[tid] = before;
    bool arrives = false;
    if (admitted(p)) {
        if (e >= 0 && before == 0) {
            used.add(e);
            if (slot < 0) absent.add(e);
            use.note(p, clock, e, decode);
        }
        const bool lacks = __syncthreads_or(lacked);
        if (admit<8>(p, clock, lacks, used, absent) && lacked) {
            slot = slot_now(p, e);
            arrives = slot >= 0;
        }
    }
    const bool start = slot >= 0 && before % 8 == 0;
    const u32 here = __ballot_sync(~0u, start && !arrives), coming = __ballot_sync(~0u, start && arrives);
    if (lane == 0) starts[0][tid >> 5] = here, starts[1][tid >> 5] = coming;
    if (p.mode == WHOLE) {
        if (e >= 0 && before == 0 && p.counts) {
            atomicAdd(&p.counts[2 * e], all); // nobody else adds: it is the addition that need not be waited for
            if (decode) atomicAdd(&p.counts[2 * e + 1], decode);
        }
        if (e >= 0 && slot < 0) atomicAdd(&missing, 1);
        if (lacked) atomicAdd(&lacking, 1);
        if (live && e < 0) atomicAdd(&invalid, 1);
    }
    __syncthreads();

    i32 resident = 0;
    for (i32 w = 0; w < 8; w++) resident += __popc(starts[0][w]);
    if (slot >= 0) {
        // The pair that starts this pair's entry, and the number of entries before that.
        i32 opener = tid;
        for (i32 q = 0; q < tid; q++)
            if (expert[q] == e && rank[q] == (before & ~7)) opener = q;
        const u32* const alike = starts[arrives];
        i32 entry = arrives ? resident : 0;
        entry += __popc(alike[opener >> 5] & ((1u << (opener & 31)) - 1));
        for (i32 w = 0; w < (opener >> 5); w++) entry += __popc(alike[w]);
        p.pairs[entry * 8 + (before & 7)] = make_int2(tid, tid / p.top_k);
        if (start) p.entries[entry] = Entry{slot, entry * 8, min(8, all - before), e};
    }
    if (tid < pairs) {
        if (p.mode == WHOLE || slot >= 0) p.done[tid] = slot >= 0;
        if (p.mode == WHOLE || slot >= 0) p.hidden_amax[tid] = 0;
    }
    if (tid == 0) {
        i32 n = resident;
        for (i32 w = 0; w < 8; w++) n += __popc(starts[1][w]);
        p.entry_count[0] = n;
        p.entry_count[RESIDENT] = resident;
        if (p.mode == WHOLE && p.tally) {
            if (missing) atomicAdd(&p.tally[MISSING], missing);
            if (invalid) atomicAdd(&p.tally[INVALID], invalid);
            if (lacking && admitted(p)) atomicAdd(&p.tally[ABSENT], lacking);
        }
    }
}

constexpr i32 ROUTE_WARPS = 32;
constexpr i32 PREFILL_PAIRS = 64; // most pairs of an entry

// Any number of pairs, one block of 1024 threads: a stable counting sort by expert. Warp w owns the w-th part of the
// pairs; `cursor[e]` of a warp is where it writes its next pair of expert e.
DEV void route_large(const Params& p, i32* shared) {
    i32* cursor = shared;                                  // [warps][experts] counts, then write positions
    i32* total = cursor + ROUTE_WARPS * p.experts;         // [experts] all pairs
    i32* decode = total + p.experts;                       // [experts] pairs of tokens that are not prefill
    i32* slot_of = decode + p.experts;                     // [experts]
    i32* entry_at = slot_of + p.experts;                   // [experts] number of the first entry
    i32* begin_at = entry_at + p.experts;                  // [experts] first position
    __shared__ i32 missing, invalid, lacking;
    __shared__ ExpertSet used, absent;
    const i32 tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, threads = ROUTE_WARPS * 32;
    const i32 pairs = p.tokens * p.top_k, live = live_tokens(p) * p.top_k;
    const i32 clock = admitted(p) ? clock_now(p, live > 0) : 0;
    const i32 share = (((pairs + ROUTE_WARPS - 1) / ROUTE_WARPS) + 31) & ~31;
    for (i32 i = tid; i < (ROUTE_WARPS + 2) * p.experts; i += threads) cursor[i] = 0;
    for (i32 e = tid; e < p.experts; e += threads) slot_of[e] = p.slots[e];
    if (tid == 0) missing = invalid = lacking = 0;
    if (tid < MAX_EXPERTS / 32) used.words[tid] = absent.words[tid] = 0;
    __syncthreads();

    for (i32 i = warp * share + lane; i < min((warp + 1) * share, live); i += 32) {
        const i32 e = expert_of(p, i);
        if (e < 0) {
            atomicAdd(&invalid, 1);
            continue;
        }
        atomicAdd(&cursor[warp * p.experts + e], 1);
        if (!is_prefill(p, i)) atomicAdd(&decode[e], 1);
    }
    __syncthreads();
    bool lacks = false;
    for (i32 e = tid; e < p.experts; e += threads) { // counts to offsets within the expert
        const Use use(p, e);
        i32 sum = 0;
        for (i32 w = 0; w < ROUTE_WARPS; w++) {
            const i32 n = cursor[w * p.experts + e];
            cursor[w * p.experts + e] = sum;
            sum += n;
        }
        total[e] = sum;
        if (p.mode == WHOLE && p.counts && sum) {
            atomicAdd(&p.counts[2 * e], sum);
            if (decode[e]) atomicAdd(&p.counts[2 * e + 1], decode[e]);
        }
        if (slot_of[e] < 0 && sum) {
            lacks = true;
            atomicAdd(&lacking, sum);
        }
        if (sum && admitted(p)) {
            used.add(e);
            if (slot_of[e] < 0) absent.add(e);
            use.note(p, clock, e, decode[e]);
        }
    }
    lacks = __syncthreads_or(lacks);
    const bool admits = admitted(p) && admit<ROUTE_WARPS>(p, clock, lacks, used, absent);
    if (lacks) {
        for (i32 e = tid; e < p.experts; e += threads)
            if (slot_of[e] < 0 && total[e]) {
                if (admits) slot_of[e] = slot_now(p, e);
                if (slot_of[e] < 0) atomicAdd(&missing, total[e]);
            }
        __syncthreads();
    }
    if (warp == 0) { // where each expert with a slot begins, in ascending order; behind them those whose rows are to come
        i32 position = 0, entries = 0;
        for (i32 arriving = 0; arriving <= (i32)admits; arriving++) {
            for (i32 base = 0; base < p.experts; base += 32) {
                const i32 e = base + lane;
                const bool counts = e < p.experts && slot_of[e] >= 0 && absent.has(e) == (bool)arriving;
                const i32 n = counts ? total[e] : 0;
                const i32 m = (n + p.entry_pairs - 1) / p.entry_pairs;
                i32 n_sum = n, m_sum = m;
                for (i32 d = 1; d < 32; d <<= 1) {
                    const i32 a = __shfl_up_sync(~0u, n_sum, d), b = __shfl_up_sync(~0u, m_sum, d);
                    if (lane >= d) n_sum += a, m_sum += b;
                }
                if (n > 0) {
                    begin_at[e] = position + n_sum - n;
                    entry_at[e] = entries + m_sum - m;
                }
                position += __shfl_sync(~0u, n_sum, 31);
                entries += __shfl_sync(~0u, m_sum, 31);
            }
            if (lane == 0 && arriving == 0) p.entry_count[RESIDENT] = entries;
        }
        if (lane == 0) {
            p.entry_count[0] = entries;
            if (p.mode == WHOLE && p.tally) {
                if (missing) atomicAdd(&p.tally[MISSING], missing);
                if (invalid) atomicAdd(&p.tally[INVALID], invalid);
                if (lacking && admitted(p)) atomicAdd(&p.tally[ABSENT], lacking);
            }
        }
    }
    __syncthreads();
    for (i32 e = tid; e < p.experts; e += threads)
        if (slot_of[e] >= 0)
            for (i32 i = 0; i * p.entry_pairs < total[e]; i++)
                p.entries[entry_at[e] + i] = Entry{slot_of[e], begin_at[e] + i * p.entry_pairs,
                                                   min(p.entry_pairs, total[e] - i * p.entry_pairs), e};
    // Second look at the pairs, 32 at a time and in order, so that the sort is stable.
    for (i32 i = warp * share + lane; i < (warp + 1) * share; i += 32) {
        const i32 e = i < live ? expert_of(p, i) : -1;
        const bool resident = e >= 0 && slot_of[e] >= 0;
        const u32 same = __match_any_sync(~0u, e);
        if (resident) {
            const i32 at = begin_at[e] + cursor[warp * p.experts + e] + __popc(same & ((1u << lane) - 1));
            p.pairs[at] = make_int2(i, i / p.top_k);
        }
        if (i < pairs && (p.mode == WHOLE || resident)) {
            p.done[i] = resident;
            p.hidden_amax[i] = 0;
        }
        __syncwarp();
        if (resident && lane == 31 - __clz(same)) cursor[warp * p.experts + e] += __popc(same);
        __syncwarp();
    }
}

DEV void forget_pairs(const Params& p) {
    for (i32 i = threadIdx.x; i < p.tokens * p.top_k; i += blockDim.x) p.done[i] = 0;
}

// The largest magnitude of a row, as bits; every thread gets it. Bits of magnitudes order as the magnitudes do, and
// NaN comes above all.
DEV u32 block_amax(u32 bits) {
    __shared__ u32 part[32];
    bits = __reduce_max_sync(~0u, bits);
    if ((threadIdx.x & 31) == 0) part[threadIdx.x >> 5] = bits;
    __syncthreads();
    bits = 0;
    for (u32 w = 0; w < blockDim.x >> 5; w++) bits = max(bits, part[w]);
    return bits;
}

DEV u32 magnitude(float v) { return __float_as_uint(v) & 0x7FFFFFFFu; }

// Eight activations that belong to lane t of k-tile kt, as floats: k = 4 t .. 4 t + 3 and 16 more.
template <class Io>
DEV void load_eight(const u16* row, i32 chunk, float v[8]) {
    const u16* at = row + (chunk >> 2) * TILE_K + (chunk & 3) * 4;
    const uint2 a = *(const uint2*)at, b = *(const uint2*)(at + 16);
    v[0] = Io::low(a.x), v[1] = Io::high(a.x), v[2] = Io::low(a.y), v[3] = Io::high(a.y);
    v[4] = Io::low(b.x), v[5] = Io::high(b.x), v[6] = Io::low(b.y), v[7] = Io::high(b.y);
}

// Token t as f16, scaled by a power of two so that neither its largest nor its small values are lost.
template <class Io>
DEV void prepare_f16(const Params& p, i32 t) {
    const u16* row = (const u16*)p.x + (i64)t * p.hidden_size;
    uint4* out = (uint4*)((u16*)p.activations + (i64)t * p.hidden_size);
    float v[8];
    u32 amax = 0;
    for (i32 c = threadIdx.x; c < p.hidden_size / 8; c += blockDim.x) {
        load_eight<Io>(row, c, v);
#pragma unroll
        for (int i = 0; i < 8; i++) amax = max(amax, magnitude(v[i]));
    }
    amax = block_amax(amax);
    const PowerOfTwo s = scale_to_f16(amax);
    for (i32 c = threadIdx.x; c < p.hidden_size / 8; c += blockDim.x) {
        load_eight<Io>(row, c, v);
        out[c] = make_uint4(pack_f16(v[1] * s.up, v[3] * s.up), pack_f16(v[0] * s.up, v[2] * s.up),
                            pack_f16(v[5] * s.up, v[7] * s.up), pack_f16(v[4] * s.up, v[6] * s.up));
    }
    if (threadIdx.x == 0) p.activation_scale[t] = __float_as_uint(s.down);
}

#if defined(HAS_MX)
// MXFP8 (OCP Microscaling Formats v1.0): per 32 along K a shared exponent floor(log2(amax)) - 8, elements E4M3, round
// to nearest even, saturating. A block of zeros, and one too small, gets the smallest scale that E8M0 has; one with
// infinity or NaN gets NaN.
DEV u32 mx_scale(u32 amax_bits) {
    const i32 exponent = (i32)(amax_bits >> 23);
    if (exponent == 255) return 255;
    return exponent <= 8 ? 0 : exponent - 8;
}
DEV u32 e4m3x4(float a, float b, float c, float d) {
    u32 v;
    asm("{.reg .b16 l,h; cvt.rn.satfinite.e4m3x2.f32 l,%2,%1; cvt.rn.satfinite.e4m3x2.f32 h,%4,%3; mov.b32 %0,{l,h};}"
        : "=r"(v)
        : "f"(a), "f"(b), "f"(c), "f"(d));
    return v;
}
// Eight values of lane t of a k-tile to E4M3; the four lanes t of a tile are neighbours and call together.
DEV uint2 quantize_mx(const float v[8], u32& scale) {
    u32 amax = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) amax = max(amax, magnitude(v[i]));
    amax = max(amax, __shfl_xor_sync(~0u, amax, 1));
    amax = max(amax, __shfl_xor_sync(~0u, amax, 2));
    scale = mx_scale(amax);
    // 2^(127 - scale), in two steps since it may be subnormal or too large for one.
    const i32 shift = 127 - (i32)scale;
    const float once = __uint_as_float((u32)(127 + shift / 2) << 23);
    const float rest = __uint_as_float((u32)(127 + shift - shift / 2) << 23);
    float s[8];
#pragma unroll
    for (int i = 0; i < 8; i++) s[i] = scale == 255 ? v[i] : v[i] * once * rest;
    return make_uint2(e4m3x4(s[0], s[1], s[2], s[3]), e4m3x4(s[4], s[5], s[6], s[7]));
}

template <class Io>
DEV void prepare_mx(const Params& p, i32 t) {
    const u16* row = (const u16*)p.x + (i64)t * p.hidden_size;
    const i32 chunks = p.hidden_size / 8, words = (p.hidden_size + 127) / 128;
    uint2* out = (uint2*)((u8*)p.activations + (i64)t * p.hidden_size);
    u8* scales = (u8*)(p.activation_scale + (i64)t * words);
    for (i32 base = 0; base < chunks; base += blockDim.x) {
        const i32 c = base + threadIdx.x;
        float v[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        if (c < chunks) load_eight<Io>(row, c, v);
        u32 scale;
        const uint2 q = quantize_mx(v, scale);
        if (c < chunks) {
            out[c] = q;
            if ((c & 3) == 0) scales[c >> 2] = (u8)scale;
        }
    }
}
#endif
