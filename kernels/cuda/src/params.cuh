// The one argument of every kernel of a layer. `ziggurat.kernels.cuda.params` mirrors it field by field.
#pragma once
#include "common.cuh"

struct Entry { // a resident expert and up to `entry_pairs` of its pairs
    i32 slot, begin, count, expert;
};

struct Params {
    const void* x;        // [T, H] 16-bit
    const float* weights; // [T, k]
    const void* ids;      // [T, k] i32 or i64
    const i32* slots;     // [E], -1 = absent
    const u8* pool;       // [slots, stride]
    const i32* live;      // [1] live tokens of the whole batch
    const u8* prefill;    // [T] or null
    i32* counts;          // [E, 2] or null; zeroed by the part of a batch whose `first` is 0
    i32* tally;           // [2] or null
    void* out;            // [T, H]
    void* activations;    // what the GEMM reads: [T, H] f16 or e4m3, permuted in blocks of 32
    u32* activation_scale; // f16: [T] reciprocal scale (float); mx: [T, ceil(H / 128)] words of UE8M0
    Entry* entries;
    i32* entry_count;
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
    float limit;
};
enum { WHOLE = 0, BEGIN = 1, ADD = 2 };

DEV i32 live_tokens(const Params& p) {
    i32 n = *p.live - p.first;
    return n < 0 ? 0 : (n > p.tokens ? p.tokens : n);
}
