// The weighted sum of a token's experts: in float32, in the order of its choices, rounded once.
#pragma once
#include "backend.cuh"

// Block (b, t): four channels a thread of token t.
template <class Io>
DEV void combine_token(const Params& p) {
    wait_for_previous();
    const i32 t = blockIdx.y, c = (blockIdx.x * blockDim.x + threadIdx.x) * 4;
    if (c < p.hidden_size) {
        float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        if (t < live_tokens(p))
            for (i32 j = 0; j < p.top_k; j++) {
                const i32 pair = t * p.top_k + j;
                if (!p.done[pair]) continue;
                const float weight = p.weights[pair];
                const uint4 v = load_fresh((const uint4*)(p.partial + (i64)pair * p.hidden_size + c));
                sum[0] = __fmaf_rn(weight, bits_to_float(v.x), sum[0]);
                sum[1] = __fmaf_rn(weight, bits_to_float(v.y), sum[1]);
                sum[2] = __fmaf_rn(weight, bits_to_float(v.z), sum[2]);
                sum[3] = __fmaf_rn(weight, bits_to_float(v.w), sum[3]);
            }
        *(uint2*)((u16*)p.out + (i64)t * p.hidden_size + c) =
            make_uint2(Io::pack(sum[0], sum[1]), Io::pack(sum[2], sum[3]));
    }
}
