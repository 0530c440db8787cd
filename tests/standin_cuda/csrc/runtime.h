// What a CUDA runtime, driver and caching allocator do, played by host memory.
#pragma once
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace standin {

constexpr int POOL = 32;  // PyTorch hands out 32 streams of a priority, round robin
constexpr int PER_DEVICE = POOL + 1;
constexpr int MAX_DEVICES = 2;
constexpr int STREAMS = PER_DEVICE * MAX_DEVICES;
constexpr int FIRST_STREAM = 0x1000;  // the native handle of the first device's default stream
using Clock = std::array<uint64_t, STREAMS>;

struct Counters {
  int64_t kernels = 0, h2d = 0, h2d_bytes = 0, d2h = 0, d2h_bytes = 0, d2d = 0;
  int64_t unpinned = 0, unpinned_bytes = 0, late = 0;  // copies from or to pageable memory; copies that were deferred
  int64_t op_syncs = 0;     // kernels that make the host wait (.item(), nonzero, ...)
  int64_t copy_syncs = 0;   // copies that make the host wait
  int64_t event_syncs = 0, stream_syncs = 0, device_syncs = 0;
  int64_t events = 0, records = 0, waits = 0, allocations = 0, registered = 0, registered_bytes = 0;
};

struct Options {
  int devices = 1;
  int mode = 0;  // 0: copies at once, 1: as late as they may be, 2: at random
  uint64_t seed = 0;
  int64_t total = int64_t(4) << 30;
  bool poison = true, races = true, raise = false;
  int sync_debug = 0;  // as torch.cuda.set_sync_debug_mode
};

Options& options();
Counters& counters();
int current_device();
int current_stream(int device);  // an index into clocks

// A kernel on the current stream: what was queued before it runs first. Gives its moment.
uint64_t launch(int stream);
void touch(const void* begin, size_t nbytes, bool write, int stream, uint64_t moment, const char* op);
void synchronizing(const char* op);  // says so, if that is asked for
void host_waits_for(int stream);  // the host has seen the end of all that is on it
// True if the copy was queued for later.
bool defer(int stream, void* to, const void* from, size_t nbytes);
bool pinned(const void* pointer);

c10::Allocator* device_allocator();
c10::DataPtr adopt(c10::Storage cpu, int device, int stream);  // a kernel's output becomes device memory
at::Generator device_generator(int device);
at::Generator draw(int device);  // a CPU generator for one kernel; the device's moves on
std::vector<std::string> violations(bool clear);
void violate(const std::string& what);

int64_t allocated(int device), reserved(int device), peak(int device);
void reset_peak(int device), empty_cache();
int host_register(uint64_t pointer, uint64_t nbytes);
int host_unregister(uint64_t pointer);
void synchronize(int device);
void install_runtime();
double elapsed(uint64_t began, uint64_t ended);  // of events, by their address
}  // namespace standin
