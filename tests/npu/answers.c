/* The CANN functions that must answer more than "0, done": there is one die of an Atlas A3, and it holds no data.
   Memory is refused, so a tensor that is not fake cannot exist on the device: else its ops would "compute" whatever lay
   in the buffer. Streams and events are names only. Some of these are looked up by name when the device is initialised,
   so the linker's list of symbols does not have them.
   Where CANN_CALLS names a file, every call of CANN appends "function ASCEND_RT_VISIBLE_DEVICES-as-it-is-now" to it.
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

static char a_context, a_stream, an_event;

/* the device */
int aclrtGetDeviceCount(uint32_t *count) { note_call("aclrtGetDeviceCount"); *count = 1; return 0; }
int aclrtSetDevice(int32_t device) { note_call("aclrtSetDevice"); return device == 0 ? 0 : 107001; }
int aclrtGetDevice(int32_t *device) { note_call("aclrtGetDevice"); *device = 0; return 0; }
int aclrtGetCurrentContext(void **context) { note_call("aclrtGetCurrentContext"); *context = &a_context; return 0; }
const char *aclrtGetSocName(void) { note_call("aclrtGetSocName"); return "Ascend910_9391"; }

/* settings that the start writes or reads */
int aclrtSetDeviceSatMode(int mode) { note_call("aclrtSetDeviceSatMode"); return 0; }
int aclrtSetOpWaitTimeout(uint32_t seconds) { note_call("aclrtSetOpWaitTimeout"); return 0; }
int aclrtSetOpExecuteTimeOut(uint32_t seconds) { note_call("aclrtSetOpExecuteTimeOut"); return 0; }
int aclSetCompileopt(int option, const char *value) { note_call("aclSetCompileopt"); return 0; }
int aclrtGetSysParamOpt(int option, int64_t *value) { note_call("aclrtGetSysParamOpt"); *value = 0; return 0; }
int aclrtCtxSetSysParamOpt(int option, int64_t value) { note_call("aclrtCtxSetSysParamOpt"); return 0; }
size_t aclGetCompileoptSize(int option) { note_call("aclGetCompileoptSize"); return 1; }
int aclGetCompileopt(int option, char *value, size_t bytes) { note_call("aclGetCompileopt"); value[0] = '\0'; return 0; }

/* streams and events */
int aclrtCreateStreamWithConfig(void **stream, uint32_t priority, uint32_t flags) { note_call("aclrtCreateStreamWithConfig"); *stream = &a_stream; return 0; }
int aclrtCreateEventExWithFlag(void **event, uint32_t flags) { note_call("aclrtCreateEventExWithFlag"); *event = &an_event; return 0; }

/* memory: 64 GiB, none of them to be had */
int aclrtGetMemInfo(int kind, size_t *free, size_t *total) { note_call("aclrtGetMemInfo"); *free = 0; *total = (size_t)64 << 30; return 0; }
int aclrtMalloc(void **data, size_t bytes, int policy) { note_call("aclrtMalloc"); *data = NULL; return 207001; }
int aclrtMallocPhysical(void **handle, size_t bytes, const void *kind, uint64_t flags) { note_call("aclrtMallocPhysical"); *handle = NULL; return 207001; }
int aclrtReserveMemAddress(void **data, size_t bytes, size_t align, void *at, uint64_t flags) { note_call("aclrtReserveMemAddress"); *data = NULL; return 207001; }
int aclrtMallocHost(void **data, size_t bytes) { note_call("aclrtMallocHost"); *data = NULL; return 207001; }
int aclrtMallocAlign32(void **data, size_t bytes, int policy) { note_call("aclrtMallocAlign32"); *data = NULL; return 207001; }
