// Copies rows from mapped host memory into slots of a device pool.
//
// The list of rows travels in the kernel's parameter, so a launch needs no staging memory and no copy before it. The
// struct stays below 4096 bytes, the parameter limit of every GPU and driver.

constexpr int kMaxRows = 200;
constexpr int kThreads = 512;
constexpr int kInFlight = 8;                                 // 16-byte loads in flight per thread
constexpr unsigned kChunk = kThreads * kInFlight;            // vectors that one block copies at a time: 64 KiB

struct GatherParams {
    unsigned long long dst[kMaxRows];
    unsigned long long src[kMaxRows];
    unsigned vectors[kMaxRows];                              // 16 bytes each
    unsigned rows;
    unsigned reserved;
};
static_assert(sizeof(GatherParams) <= 4096, "kernel parameters are limited to 4 KB");

struct alignas(16) Vector {
    unsigned x, y, z, w;
};

// The host may have rewritten the row since an earlier launch read it: a load at system scope cannot see a stale line.
// Over PCIe it is as fast as a non-coherent one.
__device__ __forceinline__ Vector load_system(const Vector* from) {
    Vector v;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from)
                 : "memory");
    return v;
}

extern "C" __global__ void __launch_bounds__(kThreads) gather_rows(const __grid_constant__ GatherParams p) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");       // the slots may still be read by the kernel before
#endif
    // Chunks of all rows are dealt to the blocks in turn; `first` is the block's next chunk, counted from row `r`.
    unsigned first = blockIdx.x;
    for (unsigned r = 0; r < p.rows; ++r) {
        const unsigned vectors = p.vectors[r];
        const unsigned chunks = (vectors + kChunk - 1) / kChunk;
        const Vector* const src = reinterpret_cast<const Vector*>(p.src[r]);
        Vector* const dst = reinterpret_cast<Vector*>(p.dst[r]);
        for (; first < chunks; first += gridDim.x) {
            const unsigned base = first * kChunk + threadIdx.x;
            Vector held[kInFlight];
#pragma unroll
            for (int u = 0; u < kInFlight; ++u) {
                const unsigned i = base + static_cast<unsigned>(u * kThreads);
                if (i < vectors) held[u] = load_system(src + i);
            }
#pragma unroll
            for (int u = 0; u < kInFlight; ++u) {
                const unsigned i = base + static_cast<unsigned>(u * kThreads);
                if (i < vectors) dst[i] = held[u];
            }
        }
        first -= chunks;
    }
}
