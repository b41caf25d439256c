// One block of a CUDA kernel on the CPU: every thread is a fiber that runs until it has to meet others, in an order that
// the caller chooses, so that what only a lucky order makes right shows. Enough of CUDA for the route kernel.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#define __device__
#define __forceinline__ inline
#define __noinline__
#define __shared__ static
#define __align__(bytes)

struct Index { unsigned x, y, z; };
static Index threadIdx, blockIdx, blockDim, gridDim;
struct int2 { int x, y; };
struct int4 { int x, y, z, w; };
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
static int2 make_int2(int x, int y) { return int2{x, y}; }
static int4 make_int4(int x, int y, int z, int w) { return int4{x, y, z, w}; }
static uint2 make_uint2(unsigned x, unsigned y) { return uint2{x, y}; }
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return uint4{x, y, z, w}; }

enum { MOST_THREADS = 1024, STACK = 1 << 16 };
static ucontext_t scheduler, fibers[MOST_THREADS];
static bool ended[MOST_THREADS];
static void (*body)();

// Threads that meet: each gives a value and sees everybody's, once all are there.
struct Meeting {
    unsigned size, arrived, turn;
    uint64_t given[MOST_THREADS], seen[2][MOST_THREADS];
};
static Meeting block, warps[MOST_THREADS / 32];
static bool moved;

static const uint64_t* meet(Meeting& m, unsigned place, uint64_t value) {
    const unsigned turn = m.turn;
    m.given[place] = value;
    moved = true;
    if (++m.arrived == m.size) {
        memcpy(m.seen[turn & 1], m.given, m.size * sizeof(uint64_t));
        m.arrived = 0;
        m.turn++;
    }
    while (m.turn == turn) swapcontext(&fibers[threadIdx.x], &scheduler);
    return m.seen[turn & 1];
}
static void run_thread() {
    body();
    ended[threadIdx.x] = moved = true;
    swapcontext(&fibers[threadIdx.x], &scheduler);
}
// order: 0 ascending, 1 descending, else some other. Stops the process if nobody can go on.
static void run_block(unsigned threads, int order, void (*kernel)()) {
    static char* const stacks = (char*)malloc((size_t)MOST_THREADS * STACK);
    body = kernel;
    blockDim = Index{threads, 1, 1};
    block.size = threads;
    block.arrived = 0;
    for (unsigned t = 0; t < threads; t++) {
        warps[t / 32].size = threads - t / 32 * 32 < 32 ? threads - t / 32 * 32 : 32;
        warps[t / 32].arrived = 0;
        ended[t] = false;
        getcontext(&fibers[t]);
        fibers[t].uc_stack.ss_sp = stacks + (size_t)t * STACK;
        fibers[t].uc_stack.ss_size = STACK;
        fibers[t].uc_link = nullptr;
        makecontext(&fibers[t], run_thread, 0);
    }
    for (bool running = true; running;) {
        running = moved = false;
        for (unsigned i = 0; i < threads; i++) {
            const unsigned t = order == 0 ? i : order == 1 ? threads - 1 - i : (i * 37 + (unsigned)order) % threads;
            if (ended[t]) continue;
            running = true;
            threadIdx = Index{t, 0, 0};
            swapcontext(&scheduler, &fibers[t]);
        }
        if (running && !moved) {
            fprintf(stderr, "threads wait for each other forever\n");
            abort();
        }
    }
}

static unsigned lane() { return threadIdx.x & 31; }
static const uint64_t* in_warp(uint64_t value) { return meet(warps[threadIdx.x / 32], lane(), value); }
static void __syncthreads() { meet(block, threadIdx.x, 0); }
static int __syncthreads_or(int value) {
    const uint64_t* all = meet(block, threadIdx.x, value != 0);
    for (unsigned t = 0; t < block.size; t++)
        if (all[t]) return 1;
    return 0;
}
static void __syncwarp() { in_warp(0); }
static unsigned __ballot_sync(unsigned, int value) {
    const uint64_t* all = in_warp(value != 0);
    unsigned bits = 0;
    for (unsigned l = 0; l < 32; l++) bits |= (unsigned)all[l] << l;
    return bits;
}
template <class T> static T __shfl_sync(unsigned, T value, int from) { return (T)in_warp((uint64_t)value)[from & 31]; }
template <class T> static T __shfl_up_sync(unsigned, T value, unsigned by) {
    const uint64_t* all = in_warp((uint64_t)value);
    return lane() >= by ? (T)all[lane() - by] : value;
}
template <class T> static T __shfl_xor_sync(unsigned, T value, int mask) { return (T)in_warp((uint64_t)value)[lane() ^ mask]; }
static unsigned __reduce_min_sync(unsigned, unsigned value) {
    const uint64_t* all = in_warp(value);
    for (unsigned l = 0; l < 32; l++) value = all[l] < value ? (unsigned)all[l] : value;
    return value;
}
static unsigned __reduce_max_sync(unsigned, unsigned value) {
    const uint64_t* all = in_warp(value);
    for (unsigned l = 0; l < 32; l++) value = all[l] > value ? (unsigned)all[l] : value;
    return value;
}
static unsigned __match_any_sync(unsigned, int value) {
    const uint64_t* all = in_warp((uint64_t)(unsigned)value);
    unsigned bits = 0;
    for (unsigned l = 0; l < 32; l++) bits |= (unsigned)(all[l] == (uint64_t)(unsigned)value) << l;
    return bits;
}
static int __ffs(unsigned v) { return __builtin_ffs((int)v); }
static int __popc(unsigned v) { return __builtin_popcount(v); }
static int __clz(unsigned v) { return v ? __builtin_clz(v) : 32; }
template <class T> static T atomicAdd(T* at, T value) { T old = *at; *at += value; return old; }
template <class T> static T atomicOr(T* at, T value) { T old = *at; *at |= value; return old; }
template <class T> static T atomicExch(T* at, T value) { T old = *at; *at = value; return old; }
template <class T> static T atomicCAS(T* at, T expected, T value) { T old = *at; if (old == expected) *at = value; return old; }
static void __threadfence() {}
template <class T> static T min(T a, T b) { return a < b ? a : b; }
template <class T> static T max(T a, T b) { return a > b ? a : b; }
static unsigned __float_as_uint(float f) { unsigned u; memcpy(&u, &f, 4); return u; }
static float __uint_as_float(unsigned u) { float f; memcpy(&f, &u, 4); return f; }
static float __fadd_rn(float a, float b) { return a + b; }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fdiv_rn(float a, float b) { return a / b; }
static float fminf(float a, float b) { return a < b ? a : b; }
static float fmaxf(float a, float b) { return a > b ? a : b; }
static uint64_t __cvta_generic_to_shared(const void* at) { return (uint64_t)at; }
