/* The CANN functions that must answer more than "0, done": there is one die of an Atlas A3, and it holds no data.
   Memory is refused, so a tensor that is not fake cannot exist on the device: else its ops would "compute" whatever lay
   in the buffer. Streams and events are names only. Some of these are looked up by name when the device is initialised,
   so the linker's list of symbols does not have them.
   Where CANN_CALLS names a file, every call of CANN appends "function ASCEND_RT_VISIBLE_DEVICES-as-it-is-now" to it.
   CANN_DIES says how many dies the machine has (1); ASCEND_RT_VISIBLE_DEVICES shows those that it lists.
   CANN's error codes: 107001 no such device, 207001 out of memory. */

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

void note_call(const char *function) {
    const char *path = getenv("CANN_CALLS"), *devices = getenv("ASCEND_RT_VISIBLE_DEVICES");
    FILE *calls = path ? fopen(path, "a") : NULL;
    if (!calls) return;
    fprintf(calls, "%s %s\n", function, devices ? devices : "unset");
    fclose(calls);
}

#define CALLED note_call(__func__);

static uint32_t visible_dies(void) {
    const char *devices = getenv("ASCEND_RT_VISIBLE_DEVICES"), *all = getenv("CANN_DIES");
    uint32_t count = 1;
    if (!devices) return all ? atoi(all) : 1;
    if (!*devices) return 0;
    while (*devices) count += *devices++ == ',';
    return count;
}

static char a_context, a_stream, an_event;

/* the device */
int aclrtGetDeviceCount(uint32_t *count) { CALLED *count = visible_dies(); return 0; }
int aclrtSetDevice(int32_t device) { CALLED return device == 0 ? 0 : 107001; }
int aclrtGetDevice(int32_t *device) { CALLED *device = 0; return 0; }
int aclrtGetCurrentContext(void **context) { CALLED *context = &a_context; return 0; }
const char *aclrtGetSocName(void) { CALLED return "Ascend910_9391"; }

/* settings that the start writes or reads */
int aclrtSetDeviceSatMode(int mode) { CALLED return 0; }
int aclrtSetOpWaitTimeout(uint32_t seconds) { CALLED return 0; }
int aclrtSetOpExecuteTimeOut(uint32_t seconds) { CALLED return 0; }
int aclSetCompileopt(int option, const char *value) { CALLED return 0; }
int aclrtGetSysParamOpt(int option, int64_t *value) { CALLED *value = 0; return 0; }
int aclrtCtxSetSysParamOpt(int option, int64_t value) { CALLED return 0; }
size_t aclGetCompileoptSize(int option) { CALLED return 1; }
int aclGetCompileopt(int option, char *value, size_t bytes) { CALLED value[0] = '\0'; return 0; }

/* streams and events */
int aclrtCreateStreamWithConfig(void **stream, uint32_t priority, uint32_t flags) { CALLED *stream = &a_stream; return 0; }
int aclrtCreateEventExWithFlag(void **event, uint32_t flags) { CALLED *event = &an_event; return 0; }

/* memory: 64 GiB, none of them to be had. Addresses are: torch_npu tries expandable segments by reserving some. */
static char addresses;
int aclrtGetMemInfo(int kind, size_t *free, size_t *total) { CALLED *free = 0; *total = (size_t)64 << 30; return 0; }
int aclrtMalloc(void **data, size_t bytes, int policy) { CALLED *data = NULL; return 207001; }
int aclrtMallocPhysical(void **handle, size_t bytes, const void *kind, uint64_t flags) { CALLED *handle = NULL; return 207001; }
int aclrtReserveMemAddress(void **data, size_t bytes, size_t align, void *at, uint64_t flags) { CALLED *data = &addresses; return 0; }
int aclrtMallocHost(void **data, size_t bytes) { CALLED *data = NULL; return 207001; }
int aclrtMallocAlign32(void **data, size_t bytes, int policy) { CALLED *data = NULL; return 207001; }
