/* A CUDA driver that registers nothing, for tests of the calls that are made of it. It keeps what it was given, and fails on demand. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

static int failing, depth, mode = 1, inside, has_attributes = 1;
static char failing_call[64];
static uintptr_t address;
static size_t nbytes;
static unsigned flags;
static int device = -1;

void fail(const char *call, int code) { strncpy(failing_call, call, 63); failing = code; }
void attributes(int there) { has_attributes = there; }
int depth_now(void) { return depth; }
int mode_now(void) { return mode; }
int was_inside(void) { return inside; }
int device_now(void) { return device; }
uintptr_t address_now(void) { return address; }
size_t nbytes_now(void) { return nbytes; }
unsigned flags_now(void) { return flags; }

#define CALL if (failing && !strcmp(failing_call, __func__)) return failing
/* Of calls that need a context, in a mode that leaves other threads' captures whole. */
#define IN_CONTEXT inside = depth == 1 && mode == 2; if (!inside) return 201

int cuInit(unsigned f) { CALL; return f; }
int cuDeviceGet(int *d, int ordinal) { CALL; *d = ordinal + 40; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int d) { CALL; device = d; *value = has_attributes && (attribute == 100 || attribute == 113); return 0; }
int cuDevicePrimaryCtxRetain(void **context, int d) { CALL; device = d; *context = (void *)0x7fedcba987654320; return 0; }
int cuCtxPushCurrent_v2(void *context) { CALL; if (context != (void *)0x7fedcba987654320) return 201; depth++; return 0; }
int cuCtxPopCurrent_v2(void **context) { CALL; depth--; *context = 0; return 0; }
int cuThreadExchangeStreamCaptureMode(int *m) { CALL; int before = mode; mode = *m; *m = before; return 0; }
int cuMemHostRegister_v2(void *p, size_t n, unsigned f) { CALL; IN_CONTEXT; address = (uintptr_t)p; nbytes = n; flags = f; return 0; }
int cuMemHostUnregister(void *p) { CALL; IN_CONTEXT; if ((uintptr_t)p != address) return 713; address = 0; return 0; }
int cuMemHostGetDevicePointer_v2(uint64_t *d, void *p, unsigned f) { CALL; IN_CONTEXT; *d = (uintptr_t)p + 0x100000000000; return f; }
int cuGetErrorName(int code, const char **name) { *name = code == 801 ? "CUDA_ERROR_NOT_SUPPORTED" : code == 999 ? 0 : "CUDA_ERROR_OTHER"; return 0; }
