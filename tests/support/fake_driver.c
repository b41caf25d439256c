// A CUDA driver of one imaginary GPU, for tests of loading and launching on machines without one.
//
// It runs nothing: it checks what it is given, keeps the last launch for the test to look at, and answers as the real
// one does. Layouts are those of cuda.h (CUlaunchConfig, CUlaunchAttribute). What the GPU is comes from the environment:
// FAKE_CAPABILITY (90), FAKE_VERSION (13000), FAKE_DEVICES (1), FAKE_INIT (0), FAKE_PARAMETER (bytes of a kernel's struct).
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define OK 0
#define INVALID_VALUE 1
#define NOT_INITIALIZED 3
#define NO_DEVICE 100
#define INVALID_DEVICE 101
#define INVALID_CONTEXT 201
#define NO_BINARY 209
#define NOT_FOUND 500
#define SHARED_LIMIT 227232

typedef struct { int id; char pad[4]; union { int number; char space[64]; } value; } Attribute;
typedef struct {
    unsigned grid[3], block[3], shared;
    void *stream;
    Attribute *attributes;
    unsigned count;
} Config;

typedef struct {
    unsigned launches, loads, grid[3], block[3], shared, attributes;
    int attribute, allowed;
    uint64_t stream, function;
    unsigned char parameter[8192];
    unsigned allowed_shared, function_loads, contexts_left;
} Record;

Record fake_record;
static int initialized, depth;
static char names[64][128];
static int named;

static int number(const char *name, int otherwise) {
    const char *text = getenv(name);
    return text ? atoi(text) : otherwise;
}

int cuInit(unsigned flags) { (void)flags; initialized = 1; return number("FAKE_INIT", OK); }
// NVRTC asks for a table of functions of the driver it finds, and uses none if the table says that it is empty.
int cuGetExportTable(const void **table, const void *id) { static const size_t size = sizeof size; (void)id; *table = &size; return OK; }
int cuDriverGetVersion(int *version) { *version = number("FAKE_VERSION", 13000); return OK; }
int cuDeviceGetCount(int *count) { *count = number("FAKE_DEVICES", 1); return initialized ? OK : NOT_INITIALIZED; }
int cuDeviceGet(int *device, int ordinal) {
    *device = ordinal;
    return ordinal >= 0 && ordinal < number("FAKE_DEVICES", 1) ? OK : INVALID_DEVICE;
}
int cuDeviceGetName(char *name, int length, int device) { (void)device; strncpy(name, "Imaginary", (size_t)length); return OK; }
int cuDeviceGetAttribute(int *value, int which, int device) {
    int capability = number("FAKE_CAPABILITY", 90);
    (void)device;
    if (which == 75) *value = capability / 10;
    else if (which == 76) *value = capability % 10;
    else if (which == 97) *value = SHARED_LIMIT;
    else return INVALID_VALUE;
    return OK;
}
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)(intptr_t)(0x1000 + device); return OK; }
int cuCtxPushCurrent_v2(void *context) { if (!context) return INVALID_CONTEXT; depth++; return OK; }
int cuCtxPopCurrent_v2(void **context) { *context = (void *)0x1000; fake_record.contexts_left = (unsigned)--depth; return OK; }

// A fatbin starts with this word, a cubin is an ELF file.
int cuLibraryLoadData(void **library, const void *code, void *a, void *b, unsigned c, void *d, void *e, unsigned f) {
    (void)a; (void)b; (void)c; (void)d; (void)e; (void)f;
    if (memcmp(code, "\x50\xed\x55\xba", 4) && memcmp(code, "\x7f" "ELF", 4)) return NO_BINARY;
    fake_record.loads++;
    *library = (void *)(intptr_t)(0x2000 + fake_record.loads);
    return OK;
}
int cuLibraryGetKernel(void **kernel, void *library, const char *name) {
    (void)library;
    if (!strcmp(name, "missing")) return NOT_FOUND;
    strncpy(names[named], name, sizeof names[0] - 1);
    *kernel = names[named++ % 64];
    return OK;
}
int cuKernelGetFunction(void **function, void *kernel) {
    if (depth < 1) return INVALID_CONTEXT;
    *function = kernel;
    return OK;
}
int cuFuncLoad(void *function) { (void)function; fake_record.function_loads++; return OK; }
int cuKernelGetParamInfo(void *kernel, size_t index, size_t *offset, size_t *size) {
    (void)kernel;
    if (index) return INVALID_VALUE;
    *offset = 0;
    *size = (size_t)number("FAKE_PARAMETER", 4008);
    return OK;
}
int cuKernelSetAttribute(int which, int value, void *kernel, int device) {
    (void)kernel; (void)device;
    if (which != 8 || value + 1001 > SHARED_LIMIT) return INVALID_VALUE;
    fake_record.allowed_shared = (unsigned)value;
    return OK;
}
// Number 1 is static shared memory: 1001 bytes.
int cuFuncGetAttribute(int *value, int which, void *function) { (void)function; *value = 1000 + which; return OK; }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *function, int threads, size_t shared) {
    (void)function; (void)shared;
    *blocks = 2048 / threads;
    return depth < 1 ? INVALID_CONTEXT : OK;
}
int cuLaunchKernelEx(const Config *config, void *function, void **parameters, void **extra) {
    if (extra || !config->grid[0] || config->block[0] * config->block[1] * config->block[2] > 1024) return INVALID_VALUE;
    if (config->shared + 1001 > 49152 && config->shared > fake_record.allowed_shared) return INVALID_VALUE;
    fake_record.launches++;
    memcpy(fake_record.grid, config->grid, sizeof config->grid);
    memcpy(fake_record.block, config->block, sizeof config->block);
    fake_record.shared = config->shared;
    fake_record.stream = (uint64_t)(uintptr_t)config->stream;
    fake_record.function = (uint64_t)(uintptr_t)function;
    fake_record.attributes = config->count;
    fake_record.attribute = config->count ? config->attributes[0].id : 0;
    fake_record.allowed = config->count ? config->attributes[0].value.number : 0;
    memcpy(fake_record.parameter, parameters[0], (size_t)number("FAKE_PARAMETER", 4008));
    return OK;
}

// How cuda.bindings finds functions: by their plain names, of which some are defined with the suffix of their version.
int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status) {
    Dl_info self;
    char versioned[160];
    (void)version; (void)flags;
    dladdr((void *)cuInit, &self);
    void *library = dlopen(self.dli_fname, RTLD_NOW);
    snprintf(versioned, sizeof versioned, "%s_v2", name);
    *function = dlsym(library, strcmp(name, "cuGetProcAddress") && dlsym(library, name) ? name : versioned);
    if (status) *status = *function ? 0 : 1;
    return *function ? OK : NOT_FOUND;
}

int cuGetErrorName(int status, const char **name) {
    *name = status == INVALID_VALUE     ? "CUDA_ERROR_INVALID_VALUE"
            : status == NO_DEVICE       ? "CUDA_ERROR_NO_DEVICE"
            : status == INVALID_DEVICE  ? "CUDA_ERROR_INVALID_DEVICE"
            : status == INVALID_CONTEXT ? "CUDA_ERROR_INVALID_CONTEXT"
            : status == NO_BINARY       ? "CUDA_ERROR_NO_BINARY_FOR_GPU"
            : status == NOT_FOUND       ? "CUDA_ERROR_NOT_FOUND"
                                        : "CUDA_ERROR_UNKNOWN";
    return OK;
}
int cuGetErrorString(int status, const char **text) { (void)status; *text = "as the fake driver says"; return OK; }
