// The one argument of every kernel of a layer. `ziggurat.kernels.cuda.params` mirrors it field by field.
#pragma once
#include "common.cuh"

struct Entry { // a resident expert and up to `entry_pairs` of its pairs
    i32 slot, begin, count, expert;
};

struct Admission { // the tensors of `ziggurat.kernels.admission`, seen by one of its layers
    i32* table; // [L, E]; null: the host decides what is resident
    i32* owners;
    i32* heat;
    i32* last;
    const i32* places;
    int2* copies;
    i32* state;
    int4* log;
    const u8* arena;
    u32 log_mask;
    i32 slots;
    i32 first_key; // of the layer: its number times E
    i32 begins;    // whether it is the layer that begins a pass
};
enum { CLOCK = 0, HAND = 1, LOG_HEAD = 2, COPIES = 3 }; // words of `state`
struct Ahead { // the tensors of `ziggurat.kernels.lookahead`, seen by the layer that is guessed
    i32* words;    // null: nobody looks ahead, and `gather_missing` runs
    int2* rows;    // [spares] place, key
    i32* progress; // [2, spares, lanes] chunks that blocks have begun, and done
    u8* spare;     // [spares, stride]
    i32 spares, lanes;
    i32 layers, layer;
};
enum { NOBODY = -1, WITHHELD = -2 }; // owners of slots without a row, and of those that are never used

struct Params {
    const void* x;        // [T, H] 16-bit
    const float* weights; // [T, k]
    const void* ids;      // [T, k] i32 or i64
    const i32* slots;     // [E], -1 = absent
    const u8* pool;       // [slots, stride]
    const i32* live;      // [1] live tokens of the whole batch
    const u8* prefill;    // [T] or null
    i32* counts;          // [E, 2] or null; added to
    i32* tally;           // [2], of an admitted layer [3], or null; added to
    void* out;            // [T, H]
    void* activations;    // what the GEMM reads: [T, H] f16 or e4m3, permuted in blocks of 32
    u32* activation_scale; // f16: [T] reciprocal scale (float); mx: [T, ceil(H / 128)] words of UE8M0
    Entry* entries;
    i32* entry_count; // [2]: entries; of these, the ones that come first and whose rows are in the pool
    int2* pairs;      // pair and token, by entry
    u8* done;         // [T * k] 1 = the pair's contribution is in `partial`
    u16* hidden;      // [T * k, I]
    u32* hidden_amax; // [T * k] bits of the largest magnitude
    float* partial;   // [T * k, H]
    i64 stride;       // of the pool
    i64 w13_scales, w2_codes, w2_scales; // offsets in a row
    i32 tokens;       // T of this call
    i32 first;        // number of its first token in the batch
    i32 top_k, experts, hidden_size, inter;
    i32 ids_are_64;
    i32 mode; // 0: whole layer, 1: begin, 2: add
    i32 entry_pairs; // 8 (decode) or 64 (prefill)
    i32 direct;      // the pairs are the entries: decode GEMMs of one token, in a layer that is not admitted
    float limit;
    Admission admission;
    Ahead ahead;
};
struct Guess { // of what runs beside a layer; all as the next layer sees it
    Admission admission;
    Ahead ahead;
    const void* ids; // [T, width] i32 or i64
    const i32* live; // [1]
    i64 stride;
    i32 tokens, width, experts;
    i32 ids_are_64;
};
enum { WHOLE = 0, BEGIN = 1, ADD = 2 };
constexpr i32 RESIDENT = 1; // word of entry_count
enum { MISSING = 0, INVALID = 1, ABSENT = 2 }; // words of tally; ABSENT: had no slot when its layer began

constexpr i32 MAX_EXPERTS = 1024;

DEV bool admitted(const Params& p) { return p.admission.table != nullptr; }

DEV i32 live_tokens(const Params& p) {
    i32 n = *p.live - p.first;
    return n < 0 ? 0 : (n > p.tokens ? p.tokens : n);
}

DEV i32 load_acquire(const i32* at) { // what is read from now on is no older, not even in the L1
    i32 v;
    asm volatile("ld.acquire.gpu.global.s32 %0,[%1];" : "=r"(v) : "l"(at) : "memory");
    return v;
}
// Gate and up: the kernel before is route. In an admitted layer it is the gather, which lets this one start when route
// has ended; so there is nothing to wait for.
DEV void wait_for_list(const Params& p) {
    if (admitted(p))
        load_acquire(p.entry_count);
    else
        wait_for_previous();
}
