/* The CANN functions that must answer more than "0, done": there is one die of an Atlas A3, and it holds no data.
   Memory is refused, so a tensor that is not fake cannot exist on the device: else its ops would "compute" whatever lay
   in the buffer. Streams and events are names only. Some of these are looked up by name when the device is initialised,
   so the linker's list of symbols does not have them.
   CANN's error codes: 107001 no such device, 207001 out of memory. */

#include <stddef.h>
#include <stdint.h>

static char a_context, a_stream, an_event;

/* the device */
int aclrtGetDeviceCount(uint32_t *count) { *count = 1; return 0; }
int aclrtSetDevice(int32_t device) { return device == 0 ? 0 : 107001; }
int aclrtGetDevice(int32_t *device) { *device = 0; return 0; }
int aclrtGetCurrentContext(void **context) { *context = &a_context; return 0; }
const char *aclrtGetSocName(void) { return "Ascend910_9391"; }

/* settings that the start writes or reads */
int aclrtSetDeviceSatMode(int mode) { return 0; }
int aclrtSetOpWaitTimeout(uint32_t seconds) { return 0; }
int aclrtSetOpExecuteTimeOut(uint32_t seconds) { return 0; }
int aclSetCompileopt(int option, const char *value) { return 0; }
int aclrtGetSysParamOpt(int option, int64_t *value) { *value = 0; return 0; }
int aclrtCtxSetSysParamOpt(int option, int64_t value) { return 0; }
size_t aclGetCompileoptSize(int option) { return 1; }
int aclGetCompileopt(int option, char *value, size_t bytes) { value[0] = '\0'; return 0; }

/* streams and events */
int aclrtCreateStreamWithConfig(void **stream, uint32_t priority, uint32_t flags) { *stream = &a_stream; return 0; }
int aclrtCreateEventExWithFlag(void **event, uint32_t flags) { *event = &an_event; return 0; }

/* memory: 64 GiB, none of them to be had */
int aclrtGetMemInfo(int kind, size_t *free, size_t *total) { *free = 0; *total = (size_t)64 << 30; return 0; }
int aclrtMalloc(void **data, size_t bytes, int policy) { *data = NULL; return 207001; }
int aclrtMallocPhysical(void **handle, size_t bytes, const void *kind, uint64_t flags) { *handle = NULL; return 207001; }
int aclrtReserveMemAddress(void **data, size_t bytes, size_t align, void *at, uint64_t flags) { *data = NULL; return 207001; }
int aclrtMallocHost(void **data, size_t bytes) { *data = NULL; return 207001; }
int aclrtMallocAlign32(void **data, size_t bytes, int policy) { *data = NULL; return 207001; }
