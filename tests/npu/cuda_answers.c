/* The CUDA functions that must answer more than "0, done": there is no device. CUDA's error code 100. */

void note_call(const char *function) {}

int cudaGetDeviceCount(int *count) { *count = 0; return 100; }
int cudaGetDevice(int *device) { return 100; }
