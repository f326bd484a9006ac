/* A stand-in for NVIDIA's driver library, for tests on machines without a GPU.
 *
 * It has the entry points that python_backend/transport/cuda.py calls, with the same rules where a caller can break
 * them:
 * - Device memory is a file in /dev/shm, so that another process can open it by its IPC handle. Addresses carry a
 *   mark, so that touching one from the host crashes, as it would with a GPU.
 * - Asynchronous work is done when somebody waits for it and not before: a missing wait shows as missing bytes.
 * - A context must be current; an IPC handle cannot be opened where it was made; a copy into another device's memory
 *   needs peer access.
 *
 * Environment: STANDIN_DEVICES (2), STANDIN_NO_PEER ("0-1,1-2": pairs without access), STANDIN_NO_IPC ("1": handles
 * cannot be opened), STANDIN_FAIL ("cuMemAlloc_v2=2@3": code 2 from the third call on; several with commas).
 * Built by tests/standin/build.py; not thread-safe beyond one lock around everything.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

typedef int CUresult;
typedef unsigned long long CUdeviceptr;
enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, INVALID_DEVICE = 101, INVALID_CONTEXT = 201,
       PEER_UNSUPPORTED = 217, INVALID_HANDLE = 400, NOT_READY = 600, PEER_NOT_ENABLED = 705,
       CAPTURE_UNSUPPORTED = 900 };
enum { MAX_BLOCKS = 256, MAX_DEVICES = 16, MAX_OPS = 1024 };
#define MARK 0x4000000000000000ULL
#define DEVICE_BYTES (1ULL << 30)

typedef struct { char name[48]; int device, is_export, is_used, has_peer_access; size_t size; char *host; } Block;
typedef struct Stream Stream;
typedef struct { Stream *stream; long sequence; double done_s; } Event;
typedef struct { enum { COPY, RECORD, WAIT } kind; void *to; const void *from; size_t size; Event *event; long sequence; Stream *other; } Op;
typedef struct { int count; Op ops[64]; } Graph;
struct Stream { Op ops[MAX_OPS]; long first, last; Graph *recording; };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Block blocks[MAX_BLOCKS];
static size_t allocated[MAX_DEVICES];
static int num_devices, is_ready, next_name;
static _Thread_local intptr_t current = -1; /* contexts are device numbers plus 1 */
static char no_peer[256], fail_text[512];
static struct { char name[64]; int count; } calls[128];

static int device_of(intptr_t context) { return (int)context - 1; }
static double now_s(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec + t.tv_nsec * 1e-9; }

/* The code that this call is to fail with, or 0. */
static CUresult injected(const char *name) {
    int count = 0;
    for (int i = 0; i < 128; i++) {
        if (!calls[i].name[0]) snprintf(calls[i].name, sizeof calls[i].name, "%s", name);
        if (!strcmp(calls[i].name, name)) { count = ++calls[i].count; break; }
    }
    for (const char *at = fail_text; (at = strstr(at, name)); at += strlen(name)) {
        int code = 0, from = 1;
        if (sscanf(at + strlen(name), "=%d@%d", &code, &from) >= 1 && count >= from) return code;
    }
    return OK;
}

#define ENTER(name) \
    pthread_mutex_lock(&lock); \
    CUresult result_ = is_ready ? injected(name) : NOT_INITIALIZED; \
    if (result_) { pthread_mutex_unlock(&lock); return result_; }
#define ENTER_IN_CONTEXT(name) ENTER(name) if (current < 0) { LEAVE(INVALID_CONTEXT); }
#define LEAVE(code) do { pthread_mutex_unlock(&lock); return (code); } while (0)

static int has_access(int one, int other) {
    char pair[16];
    if (one == other) return 1;
    snprintf(pair, sizeof pair, "%d-%d", one < other ? one : other, one < other ? other : one);
    return !strstr(no_peer, pair);
}

static Block *block_at(CUdeviceptr address, size_t size) {
    char *host = (char *)(uintptr_t)(address & ~MARK);
    if (!(address & MARK)) return NULL;
    for (int i = 0; i < MAX_BLOCKS; i++)
        if (blocks[i].is_used && host >= blocks[i].host && host + size <= blocks[i].host + blocks[i].size) return &blocks[i];
    return NULL;
}

static Block *map_block(const char *name, size_t size, int device, int is_new) {
    Block *block = NULL;
    for (int i = 0; i < MAX_BLOCKS && !block; i++) if (!blocks[i].is_used) block = &blocks[i];
    if (!block) return NULL;
    int file = shm_open(name, O_RDWR | (is_new ? O_CREAT | O_EXCL : 0), 0600);
    if (file < 0) return NULL;
    if (is_new && ftruncate(file, (off_t)size)) { close(file); shm_unlink(name); return NULL; }
    char *host = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (host == MAP_FAILED) return NULL;
    *block = (Block){.device = device, .is_export = is_new, .is_used = 1, .size = size, .host = host};
    snprintf(block->name, sizeof block->name, "%s", name);
    return block;
}

static void drop_block(Block *block) {
    munmap(block->host, block->size);
    if (block->is_export) { shm_unlink(block->name); allocated[block->device] -= block->size; }
    block->is_used = 0;
}

static void drop_all(void) { for (int i = 0; i < MAX_BLOCKS; i++) if (blocks[i].is_used) drop_block(&blocks[i]); }

/* Does a stream's work up to, not including, a place in its order. */
static void drain(Stream *stream, long until) {
    while (stream->first < until && stream->first < stream->last) {
        Op op = stream->ops[stream->first++ % MAX_OPS];
        if (op.kind == COPY) memmove(op.to, op.from, op.size);
        else if (op.kind == WAIT && op.other) drain(op.other, op.sequence);
        else if (op.kind == RECORD && op.event->sequence == op.sequence) op.event->done_s = now_s();
    }
}

static CUresult enqueue(Stream *stream, Op op) {
    if (!stream) return INVALID_HANDLE; /* the callers here never use the default stream */
    if (stream->recording) {
        if (stream->recording->count == 64) return INVALID_VALUE;
        stream->recording->ops[stream->recording->count++] = op;
        return OK;
    }
    if (stream->last - stream->first == MAX_OPS) drain(stream, stream->last);
    stream->ops[stream->last++ % MAX_OPS] = op;
    return OK;
}

/* The host address of device memory that the current device may touch; NULL with the reason. */
static char *reach(CUdeviceptr address, size_t size, CUresult *why) {
    Block *block = block_at(address, size);
    *why = !block ? INVALID_VALUE : OK;
    if (block && block->device != device_of(current) && !block->has_peer_access) *why = PEER_NOT_ENABLED;
    return *why ? NULL : (char *)(uintptr_t)(address & ~MARK);
}

CUresult cuInit(unsigned flags) {
    pthread_mutex_lock(&lock);
    const char *text = getenv("STANDIN_FAIL");
    snprintf(fail_text, sizeof fail_text, "%s", text ? text : "");
    text = getenv("STANDIN_NO_PEER");
    snprintf(no_peer, sizeof no_peer, "%s", text ? text : "");
    text = getenv("STANDIN_DEVICES");
    num_devices = text ? atoi(text) : 2;
    CUresult result = flags ? INVALID_VALUE : injected("cuInit");
    if (!result && !is_ready) { is_ready = 1; atexit(drop_all); }
    LEAVE(result);
}

/* For tests in the same process: what STANDIN_FAIL says in another. */
void standin_fail(const char *text) {
    pthread_mutex_lock(&lock);
    snprintf(fail_text, sizeof fail_text, "%s", text);
    memset(calls, 0, sizeof calls);
    pthread_mutex_unlock(&lock);
}

int standin_blocks(void) { int count = 0; for (int i = 0; i < MAX_BLOCKS; i++) count += blocks[i].is_used; return count; }

CUresult cuDriverGetVersion(int *version) { *version = 12080; return OK; }
CUresult cuDeviceGetCount(int *count) { ENTER("cuDeviceGetCount") *count = num_devices; LEAVE(OK); }
CUresult cuDeviceGet(int *device, int index) {
    ENTER("cuDeviceGet")
    if (index < 0 || index >= num_devices) LEAVE(INVALID_DEVICE);
    *device = index;
    LEAVE(OK);
}
CUresult cuDeviceGetName(char *name, int size, int device) { snprintf(name, size, "Stand-in %d", device); return OK; }
CUresult cuDeviceGetUuid_v2(char *uuid, int device) { memset(uuid, 0, 16); uuid[0] = 'S'; uuid[15] = (char)(device + 1); return OK; }
CUresult cuDeviceTotalMem_v2(size_t *size, int device) { (void)device; *size = DEVICE_BYTES; return OK; }
CUresult cuDeviceGetAttribute(int *value, int attribute, int device) {
    (void)device;
    *value = attribute == 75 ? 9 : attribute == 76 ? 0 : 1; /* compute capability 9.0; all else is there */
    return OK;
}
CUresult cuDeviceCanAccessPeer(int *can, int one, int other) { ENTER("cuDeviceCanAccessPeer") *can = one != other && has_access(one, other); LEAVE(OK); }
CUresult cuDevicePrimaryCtxRetain(intptr_t *context, int device) { ENTER("cuDevicePrimaryCtxRetain") *context = device + 1; LEAVE(OK); }
CUresult cuDevicePrimaryCtxRelease_v2(int device) { (void)device; return OK; }
CUresult cuCtxSetCurrent(intptr_t context) { current = context ? context : -1; return OK; }

CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    ENTER_IN_CONTEXT("cuMemGetInfo_v2")
    *total = DEVICE_BYTES;
    *free_bytes = DEVICE_BYTES - allocated[device_of(current)];
    LEAVE(OK);
}
CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t size) {
    ENTER_IN_CONTEXT("cuMemAlloc_v2")
    char name[48];
    int device = device_of(current);
    if (!size) LEAVE(INVALID_VALUE);
    if (allocated[device] + size > DEVICE_BYTES) LEAVE(OUT_OF_MEMORY);
    snprintf(name, sizeof name, "/standin_cuda.%d.%d", (int)getpid(), next_name++);
    Block *block = map_block(name, size, device, 1);
    if (!block) LEAVE(OUT_OF_MEMORY);
    allocated[device] += size;
    *address = (uintptr_t)block->host | MARK;
    LEAVE(OK);
}
CUresult cuMemFree_v2(CUdeviceptr address) {
    ENTER_IN_CONTEXT("cuMemFree_v2")
    Block *block = block_at(address, 1);
    if (!block || !block->is_export) LEAVE(INVALID_VALUE);
    drop_block(block);
    LEAVE(OK);
}

/* A handle: mark, device, size, name. */
typedef struct { char mark[8]; int device; int pid; uint64_t size; char name[40]; } Handle;

CUresult cuIpcGetMemHandle(char *handle, CUdeviceptr address) {
    ENTER_IN_CONTEXT("cuIpcGetMemHandle")
    Block *block = block_at(address, 1);
    if (!block || !block->is_export) LEAVE(INVALID_VALUE);
    Handle made = {.mark = "STANDIN", .device = block->device, .pid = (int)getpid(), .size = block->size};
    memcpy(made.name, block->name, sizeof made.name);
    memcpy(handle, &made, sizeof made);
    LEAVE(OK);
}
typedef struct { char bytes[64]; } HandleBytes;
CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *address, HandleBytes handle, unsigned flags) {
    ENTER_IN_CONTEXT("cuIpcOpenMemHandle_v2")
    Handle given;
    memcpy(&given, handle.bytes, sizeof given);
    if (getenv("STANDIN_NO_IPC") || strcmp(given.mark, "STANDIN")) LEAVE(INVALID_VALUE);
    if (given.pid == (int)getpid()) LEAVE(INVALID_CONTEXT);
    if (!has_access(given.device, device_of(current))) LEAVE(PEER_UNSUPPORTED);
    Block *block = map_block(given.name, given.size, given.device, 0);
    if (!block) LEAVE(INVALID_VALUE);
    block->has_peer_access = flags & 1; /* lazily enabled */
    *address = (uintptr_t)block->host | MARK;
    LEAVE(OK);
}
CUresult cuIpcCloseMemHandle(CUdeviceptr address) {
    ENTER_IN_CONTEXT("cuIpcCloseMemHandle")
    Block *block = block_at(address, 1);
    if (!block || block->is_export) LEAVE(INVALID_VALUE);
    drop_block(block);
    LEAVE(OK);
}

CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t size, Stream *stream) {
    ENTER_IN_CONTEXT("cuMemcpyDtoDAsync_v2")
    CUresult why;
    char *source = reach(from, size, &why), *target = why ? NULL : reach(to, size, &why);
    if (why) LEAVE(why);
    LEAVE(enqueue(stream, (Op){.kind = COPY, .to = target, .from = source, .size = size}));
}
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t size, Stream *stream) {
    ENTER_IN_CONTEXT("cuMemcpyHtoDAsync_v2")
    CUresult why;
    char *target = reach(to, size, &why);
    if (why) LEAVE(why);
    LEAVE(enqueue(stream, (Op){.kind = COPY, .to = target, .from = from, .size = size}));
}
CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t size, Stream *stream) {
    ENTER_IN_CONTEXT("cuMemcpyDtoHAsync_v2")
    CUresult why;
    char *source = reach(from, size, &why);
    if (why) LEAVE(why);
    LEAVE(enqueue(stream, (Op){.kind = COPY, .to = to, .from = source, .size = size}));
}
CUresult cuMemHostRegister_v2(void *address, size_t size, unsigned flags) { (void)address; (void)size; (void)flags; ENTER_IN_CONTEXT("cuMemHostRegister_v2") LEAVE(OK); }
CUresult cuMemHostUnregister(void *address) { (void)address; ENTER_IN_CONTEXT("cuMemHostUnregister") LEAVE(OK); }

CUresult cuStreamCreate(Stream **stream, unsigned flags) { (void)flags; ENTER_IN_CONTEXT("cuStreamCreate") *stream = calloc(1, sizeof **stream); LEAVE(*stream ? OK : OUT_OF_MEMORY); }
CUresult cuStreamDestroy_v2(Stream *stream) { ENTER("cuStreamDestroy_v2") drain(stream, stream->last); free(stream); LEAVE(OK); }
CUresult cuStreamSynchronize(Stream *stream) {
    ENTER_IN_CONTEXT("cuStreamSynchronize")
    if (stream->recording) LEAVE(CAPTURE_UNSUPPORTED);
    drain(stream, stream->last);
    LEAVE(OK);
}
/* A graph's copies keep the addresses that they were recorded with. */
CUresult cuStreamBeginCapture_v2(Stream *stream, int mode) {
    (void)mode;
    ENTER_IN_CONTEXT("cuStreamBeginCapture_v2")
    stream->recording = calloc(1, sizeof(Graph));
    LEAVE(stream->recording ? OK : OUT_OF_MEMORY);
}
CUresult cuStreamEndCapture(Stream *stream, Graph **graph) {
    ENTER_IN_CONTEXT("cuStreamEndCapture")
    *graph = stream->recording;
    stream->recording = NULL;
    LEAVE(*graph ? OK : INVALID_VALUE);
}
CUresult cuGraphInstantiateWithFlags(Graph **program, Graph *graph, unsigned long long flags) {
    (void)flags;
    ENTER_IN_CONTEXT("cuGraphInstantiateWithFlags")
    *program = malloc(sizeof(Graph));
    if (*program) **program = *graph;
    LEAVE(*program ? OK : OUT_OF_MEMORY);
}
CUresult cuGraphLaunch(Graph *program, Stream *stream) {
    ENTER_IN_CONTEXT("cuGraphLaunch")
    CUresult result = OK;
    for (int i = 0; i < program->count && !result; i++) result = enqueue(stream, program->ops[i]);
    LEAVE(result);
}
CUresult cuGraphDestroy(Graph *graph) { ENTER("cuGraphDestroy") free(graph); LEAVE(OK); }
CUresult cuGraphExecDestroy(Graph *program) { ENTER("cuGraphExecDestroy") free(program); LEAVE(OK); }
CUresult cuStreamWaitEvent(Stream *stream, Event *event, unsigned flags) {
    (void)flags;
    ENTER_IN_CONTEXT("cuStreamWaitEvent")
    LEAVE(enqueue(stream, (Op){.kind = WAIT, .other = event->stream, .sequence = event->sequence + 1}));
}
CUresult cuEventCreate(Event **event, unsigned flags) { (void)flags; ENTER_IN_CONTEXT("cuEventCreate") *event = calloc(1, sizeof **event); LEAVE(*event ? OK : OUT_OF_MEMORY); }
CUresult cuEventDestroy_v2(Event *event) { ENTER("cuEventDestroy_v2") if (event->stream) drain(event->stream, event->sequence + 1); free(event); LEAVE(OK); }
CUresult cuEventRecord(Event *event, Stream *stream) {
    ENTER_IN_CONTEXT("cuEventRecord")
    if (!stream) LEAVE(INVALID_HANDLE);
    event->stream = stream;
    event->sequence = stream->last;
    LEAVE(enqueue(stream, (Op){.kind = RECORD, .event = event, .sequence = event->sequence}));
}
CUresult cuEventQuery(Event *event) { ENTER("cuEventQuery") LEAVE(event->stream && event->stream->first <= event->sequence ? NOT_READY : OK); }
CUresult cuEventSynchronize(Event *event) { ENTER("cuEventSynchronize") if (event->stream) drain(event->stream, event->sequence + 1); LEAVE(OK); }
CUresult cuEventElapsedTime(float *milliseconds, Event *one, Event *other) {
    ENTER("cuEventElapsedTime")
    *milliseconds = (float)((other->done_s - one->done_s) * 1e3);
    LEAVE(OK);
}
static const struct { int code; const char *name; } names[] = {
    {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"}, {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"},
    {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED"}, {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"}, {PEER_UNSUPPORTED, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED"},
    {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE"}, {NOT_READY, "CUDA_ERROR_NOT_READY"},
    {PEER_NOT_ENABLED, "CUDA_ERROR_PEER_ACCESS_NOT_ENABLED"}, {719, "CUDA_ERROR_LAUNCH_FAILED"},
    {CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"},
};
CUresult cuGetErrorName(CUresult code, const char **name) {
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) if (names[i].code == code) { *name = names[i].name; return OK; }
    return INVALID_VALUE;
}
