#include "runtime.h"

#include <ATen/detail/CUDAHooksInterface.h>
#include <algorithm>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <sys/mman.h>
#include <unistd.h>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <new>
#include <mutex>
#include <random>
#include <set>
#include <sstream>

namespace standin {

Options& options() { static Options it; return it; }
Counters& counters() { static Counters it; return it; }

namespace {

std::mutex& lock() { static auto* it = new std::mutex; return *it; }
using Locked = std::lock_guard<std::mutex>;

double now_ms() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct Moment {  // one recording of an event
  bool done = false;
  double at = 0;
  int stream = 0;
  Clock clock{};
  int asked = 0;
};

struct Event {
  std::shared_ptr<Moment> moment;
  bool timing = false;
};

struct Item {
  enum { COPY, WAIT, RECORD, FREE } kind;
  char* to = nullptr;
  const char* from = nullptr;
  size_t nbytes = 0;
  std::shared_ptr<Moment> moment;
};

struct Access {
  const char *begin, *end;
  int stream;
  uint64_t moment;
  bool write;
  std::string op;
};

struct Block {
  char* begin;
  size_t nbytes, rounded;
  int device, stream;
  bool own;  // else `cpu` holds the memory
  c10::Storage cpu;
  std::vector<Access> accesses;
};

struct Runtime {
  std::array<std::deque<Item>, STREAMS> queues;
  std::array<Clock, STREAMS> clocks{};
  Clock host{};
  std::array<int, MAX_DEVICES> next{};
  std::map<const char*, Block*> blocks;
  std::map<const char*, size_t> registered;
  std::array<int64_t, MAX_DEVICES> allocated{}, reserved{}, peak{};
  std::vector<std::string> violations;
  std::set<std::string> seen;
  std::mt19937_64 chance{1};
};
Runtime& rt() { static auto* it = new Runtime; return *it; }

thread_local int device_now = 0;
thread_local std::array<int, MAX_DEVICES> streams_now = {0, 0};

std::string name_of(int stream) {
  std::ostringstream out;
  out << "cuda:" << stream / PER_DEVICE << (stream % PER_DEVICE ? " stream " : " default stream ") << stream % PER_DEVICE;
  return out.str();
}

void join(Clock& into, const Clock& other) {
  for (int i = 0; i < STREAMS; i++) into[i] = std::max(into[i], other[i]);
}

void report(const std::string& what) {
  if (rt().seen.insert(what).second) rt().violations.push_back(what);
}

void complete(const std::shared_ptr<Moment>& moment);
void reclaim(Block* block);

void step(int stream) {
  auto& queue = rt().queues[stream];
  if (queue.empty()) return;
  Item item = queue.front();
  queue.pop_front();
  if (item.kind == Item::COPY) std::memcpy(item.to, item.from, item.nbytes);
  else if (item.kind == Item::WAIT) complete(item.moment);
  else if (item.kind == Item::FREE) reclaim(reinterpret_cast<Block*>(item.to));
  else { item.moment->done = true; item.moment->at = now_ms(); }
}

void flush(int stream) { while (!rt().queues[stream].empty()) step(stream); }

void complete(const std::shared_ptr<Moment>& moment) {
  while (!moment->done) {
    TORCH_INTERNAL_ASSERT(!rt().queues[moment->stream].empty());
    step(moment->stream);
  }
}

void by_chance() {  // mode 2: some streams get on a little
  if (options().mode != 2) return;
  for (int i = 0; i < 3; i++) {
    int stream = rt().chance() % STREAMS;
    for (auto n = rt().chance() % 4; n && !rt().queues[stream].empty(); n--) {
      auto& front = rt().queues[stream].front();
      if (front.kind == Item::WAIT && !front.moment->done) break;
      step(stream);
    }
  }
}

Block* block_of(const char* pointer) {
  auto after = rt().blocks.upper_bound(pointer);
  if (after == rt().blocks.begin()) return nullptr;
  Block* block = std::prev(after)->second;
  return pointer < block->begin + block->nbytes ? block : nullptr;
}

bool over(const Item& item, const char* begin, size_t nbytes) {
  return item.kind == Item::COPY && ((item.to < begin + nbytes && begin < item.to + item.nbytes) ||
                                     (item.from < begin + nbytes && begin < item.from + item.nbytes));
}

void pending_over(const char* begin, size_t nbytes, const char* what, int but = -1) {
  for (int stream = 0; stream < STREAMS; stream++)
    if (stream != but) for (auto& item : rt().queues[stream])
      if (over(item, begin, nbytes)) {
        report(std::string(what) + " (" + std::to_string(nbytes) + " bytes) while a copy of " + std::to_string(item.nbytes) +
               " bytes on " + name_of(stream) + " is still to come");
        flush(stream);
        break;
      }
}

void count(Block* block) {
  int device = block->device;
  auto& r = rt();
  int64_t need = r.allocated[device] + int64_t(block->rounded);
  TORCH_CHECK_WITH(OutOfMemoryError, need <= options().total, "CUDA out of memory. Tried to allocate ", block->nbytes,
      " bytes. GPU ", device, " has a total capacity of ", options().total, " bytes (stand-in)");
  r.allocated[device] = need;
  r.reserved[device] = std::max(r.reserved[device], (need + (1 << 21) - 1) / (1 << 21) * (1 << 21));
  r.reserved[device] = std::min(r.reserved[device], options().total);
  r.peak[device] = std::max(r.peak[device], need);
  r.blocks[block->begin] = block;
  counters().allocations++;
}

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  {
    Locked held(lock());
    auto& r = rt();
    pending_over(block->begin, block->nbytes, "device memory is freed", block->stream);
    if (options().races) {
      Clock seen = r.clocks[block->stream];
      join(seen, r.host);
      for (auto& each : block->accesses)
        if (each.stream != block->stream && seen[each.stream] < each.moment)
          report("memory of " + name_of(block->stream) + " is freed while " + each.op + " on " + name_of(each.stream) +
                 " may still use it (no record_stream, no wait)");
    }
    r.blocks.erase(block->begin);
    r.allocated[block->device] -= block->rounded;
    auto& queue = r.queues[block->stream];  // its next use comes behind these copies, as the caching allocator has it
    if (std::any_of(queue.begin(), queue.end(), [&](const Item& item) { return over(item, block->begin, block->nbytes); })) {
      queue.push_back({Item::FREE, reinterpret_cast<char*>(block), nullptr, 0, nullptr});
      return;
    }
  }
  reclaim(block);
}

void reclaim(Block* block) {
  if (options().poison) std::memset(block->begin, 0xFF, block->nbytes);
  if (block->own) std::free(block->begin);
  delete block;
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    c10::Device device(c10::DeviceType::CUDA, device_now);
    if (!nbytes) return {nullptr, nullptr, &release_nothing, device};
    size_t rounded = (nbytes + 511) / 512 * 512;
    void* memory = nullptr;
    {
      Locked held(lock());
      TORCH_CHECK_WITH(OutOfMemoryError, rt().allocated[device_now] + int64_t(rounded) <= options().total,
          "CUDA out of memory. Tried to allocate ", nbytes, " bytes. GPU ", device_now, " has a total capacity of ",
          options().total, " bytes of which ", options().total - rt().allocated[device_now], " bytes is free (stand-in)");
    }
    TORCH_CHECK(posix_memalign(&memory, 512, rounded) == 0, "the host has no memory for the stand-in");
    if (options().poison) std::memset(memory, 0xFF, rounded);
    auto* block = new Block{static_cast<char*>(memory), nbytes, rounded, device_now,
                            device_now * PER_DEVICE + streams_now[device_now], true, {}, {}};
    Locked held(lock());
    count(block);
    return {memory, block, &release, device};
  }
  static void release_nothing(void*) {}
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t nbytes) const override { std::memcpy(to, from, nbytes); }
};

struct PinnedAllocator final : c10::Allocator {
  static void free_pinned(void* pointer) {
    {
      Locked held(lock());
      for (int s = 0; s < STREAMS; s++) flush(s);  // PyTorch keeps a block until its copies are over
      rt().registered.erase(static_cast<char*>(pointer));
    }
    std::free(pointer);
  }
  c10::DataPtr allocate(size_t nbytes) override {
    void* memory = nullptr;
    c10::Device device(c10::DeviceType::CPU);
    if (!nbytes) return {nullptr, nullptr, &DeviceAllocator::release_nothing, device};
    size_t rounded = 4096;
    while (rounded < nbytes) rounded *= 2;
    TORCH_CHECK(posix_memalign(&memory, 4096, rounded) == 0, "no memory");
    Locked held(lock());
    rt().registered[static_cast<char*>(memory)] = rounded;
    return {memory, memory, &free_pinned, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t nbytes) const override { std::memcpy(to, from, nbytes); }
};

DeviceAllocator the_allocator;
PinnedAllocator the_pinned_allocator;

struct DeviceGuard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = c10::DeviceType::CUDA;
  c10::DeviceType type() const override { return static_type; }
  static void check(c10::Device device) {
    TORCH_CHECK(device.is_cuda(), "not a CUDA device: ", device);
    TORCH_CHECK(device.index() < options().devices, "CUDA error: invalid device ordinal");
  }
  static int index(c10::Device device) { return device.has_index() ? device.index() : device_now; }
  c10::Device exchangeDevice(c10::Device device) const override {
    check(device);
    c10::Device before(static_type, device_now);
    device_now = index(device);
    return before;
  }
  c10::Device getDevice() const override { return {static_type, c10::DeviceIndex(device_now)}; }
  void setDevice(c10::Device device) const override { check(device); device_now = index(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { device_now = index(device); }
  static c10::Stream of(int device, int id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(static_type, c10::DeviceIndex(device)), id);
  }
  c10::Stream getStream(c10::Device device) const override { return of(index(device), streams_now[index(device)]); }
  c10::Stream getDefaultStream(c10::Device device) const override { return of(index(device), 0); }
  c10::Stream getNewStream(c10::Device device, int = 0) const override {
    Locked held(lock());
    int at = index(device);
    return of(at, 1 + rt().next[at]++ % POOL);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool = false) const override { return getNewStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    int at = index(stream.device());
    auto before = of(at, streams_now[at]);
    streams_now[at] = int(stream.id());
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return reinterpret_cast<void*>(key(stream) + FIRST_STREAM); }
  static int64_t key(const c10::Stream& stream) { return index(stream.device()) * PER_DEVICE + stream.id(); }

  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag flag) const override {
    Locked held(lock());
    auto& r = rt();
    if (!*event) { *event = new Event; counters().events++; }
    auto* it = static_cast<Event*>(*event);
    it->timing = flag != c10::EventFlag::PYTORCH_DEFAULT;
    int at = int(key(stream));
    join(r.clocks[at], r.host);
    it->moment = std::make_shared<Moment>();
    it->moment->stream = at;
    it->moment->clock = r.clocks[at];
    counters().records++;
    if (r.queues[at].empty()) { it->moment->done = true; it->moment->at = now_ms(); }
    else r.queues[at].push_back({Item::RECORD, nullptr, nullptr, 0, it->moment});
    by_chance();
  }
  void block(void* event, const c10::Stream& stream) const override {
    Locked held(lock());
    auto* it = static_cast<Event*>(event);
    if (!it || !it->moment) return;  // never recorded: CUDA lets it pass
    auto& r = rt();
    int at = int(key(stream));
    join(r.clocks[at], it->moment->clock);
    counters().waits++;
    if (!it->moment->done) r.queues[at].push_back({Item::WAIT, nullptr, nullptr, 0, it->moment});
    by_chance();
  }
  bool queryEvent(void* event) const override {
    Locked held(lock());
    auto* it = static_cast<Event*>(event);
    if (!it || !it->moment) return true;
    if (!it->moment->done && ++it->moment->asked > 3) complete(it->moment);
    if (it->moment->done) join(rt().host, it->moment->clock);
    return it->moment->done;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return c10::DeviceIndex(options().devices); }
  bool queryStream(const c10::Stream& stream) const override {
    Locked held(lock());
    bool idle = rt().queues[key(stream)].empty();
    if (!idle) step(int(key(stream)));
    else join(rt().host, rt().clocks[key(stream)]);
    return idle;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    counters().stream_syncs++;
    host_waits_for(int(key(stream)));
  }
  void synchronizeEvent(void* event) const override {
    Locked held(lock());
    counters().event_syncs++;
    auto* it = static_cast<Event*>(event);
    if (!it || !it->moment) return;
    complete(it->moment);
    join(rt().host, it->moment->clock);
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override { synchronize(device < 0 ? device_now : device); }
  double elapsedTime(void* one, void* two, const c10::DeviceIndex) const override {
    Locked held(lock());
    auto *a = static_cast<Event*>(one), *b = static_cast<Event*>(two);
    TORCH_CHECK(a && b && a->moment && b->moment, "Both events must be recorded before calculating elapsed time.");
    TORCH_CHECK(a->moment->done && b->moment->done, "Both events must be completed before calculating elapsed time.");
    TORCH_CHECK(a->timing && b->timing, "CUDA error: invalid resource handle (an event without timing)");
    return b->moment->at - a->moment->at;
  }
};

// A philox generator's state is a seed and an offset; each kernel draws from a CPU generator made of both.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(c10::DeviceIndex index)
      : c10::GeneratorImpl(c10::Device(c10::DeviceType::CUDA, index), c10::DispatchKeySet(c10::DispatchKey::CUDA)) {}
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
  void set_current_seed(uint64_t seed) override { seed_ = seed; offset_ = 0; }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override { set_current_seed(c10::detail::getNonDeterministicRandom()); return seed_; }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.device().is_cpu() && state.dtype() == caffe2::TypeMeta::Make<uint8_t>(), "RNG state must be a torch.ByteTensor");
    TORCH_CHECK(state.numel() == 16 || state.numel() == 8, "RNG state is wrong size");
    const auto* bytes = static_cast<const char*>(state.data());
    std::memcpy(&seed_, bytes, 8);
    if (state.numel() == 16) std::memcpy(&offset_, bytes + 8, 8); else offset_ = 0;
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::empty({16}, at::TensorOptions().dtype(at::kByte).device(at::kCPU));
    std::memcpy(state.data_ptr<uint8_t>(), &seed_, 8);
    std::memcpy(state.data_ptr<uint8_t>() + 8, &offset_, 8);
    return state.getIntrusivePtr();
  }
  Generator* clone_impl() const override {
    auto* copy = new Generator(device().index());
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }
};

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index = -1) const override {
    static std::array<at::Generator, MAX_DEVICES> all = {at::make_generator<Generator>(0), at::make_generator<Generator>(1)};
    return all[index < 0 ? device_now : index];
  }
  at::Generator getNewGenerator(c10::DeviceIndex index = -1) const override {
    return at::make_generator<Generator>(c10::DeviceIndex(index < 0 ? device_now : index));
  }
  c10::Device getDeviceFromPtr(void* pointer) const override {
    Locked held(lock());
    auto* block = block_of(static_cast<char*>(pointer));
    TORCH_CHECK(block, "The specified pointer resides on host memory and is not registered with any CUDA device.");
    return {c10::DeviceType::CUDA, c10::DeviceIndex(block->device)};
  }
  bool isPinnedPtr(const void* pointer) const override { return pinned(pointer); }
  c10::DeviceIndex deviceCount() const override { return c10::DeviceIndex(options().devices); }
  int getNumGPUs() const override { return options().devices; }
  c10::DeviceIndex current_device() const override { return c10::DeviceIndex(device_now); }
  c10::DeviceIndex getCurrentDevice() const override { return c10::DeviceIndex(device_now); }
  void setCurrentDevice(c10::DeviceIndex device) const override { device_now = device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    auto before = device_now;
    if (device >= 0) device_now = device;
    return c10::DeviceIndex(before);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &the_pinned_allocator; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &the_allocator; }
  void deviceSynchronize(c10::DeviceIndex device) const override { synchronize(device); }
  std::string showConfig() const override { return "a stand-in for CUDA\n"; }
};


}  // namespace

int current_device() { return device_now; }
int current_stream(int device) { return device * PER_DEVICE + streams_now[device]; }

uint64_t launch(int stream) {
  Locked held(lock());
  auto& r = rt();
  by_chance();
  flush(stream);
  join(r.clocks[stream], r.host);
  counters().kernels++;
  return ++r.clocks[stream][stream];
}

void touch(const void* begin, size_t nbytes, bool write, int stream, uint64_t moment, const char* op) {
  if (!options().races || !nbytes) return;
  std::string message;
  {
    Locked held(lock());
    auto& r = rt();
    const char *from = static_cast<const char*>(begin), *to = from + nbytes;
    Block* block = block_of(from);
    if (!block) return;
    auto& all = block->accesses;
    for (auto& each : all)
      if (each.begin < to && from < each.end && (write || each.write) && each.stream != stream &&
          r.clocks[stream][each.stream] < each.moment) {
        message = std::string("race: ") + op + (write ? " writes on " : " reads on ") + name_of(stream) + " what " + each.op +
                  (each.write ? " wrote on " : " read on ") + name_of(each.stream) + ", and does not wait for it";
        report(message);
      }
    all.erase(std::remove_if(all.begin(), all.end(), [&](const Access& each) {
      return from <= each.begin && each.end <= to && (write || (!each.write && each.stream == stream));
    }), all.end());
    all.push_back({from, to, stream, moment, write, op});
  }
  TORCH_CHECK(message.empty() || !options().raise, message);
}

void synchronizing(const char* op) {
  if (options().sync_debug == 1) TORCH_WARN("called a synchronizing CUDA operation: ", op);
  TORCH_CHECK(options().sync_debug != 2, "called a synchronizing CUDA operation: ", op);
}

void host_waits_for(int stream) {
  Locked held(lock());
  flush(stream);
  join(rt().host, rt().clocks[stream]);
}

bool defer(int stream, void* to, const void* from, size_t nbytes) {
  Locked held(lock());
  if (options().mode == 0) return false;
  counters().late++;
  rt().queues[stream].push_back({Item::COPY, static_cast<char*>(to), static_cast<const char*>(from), nbytes, nullptr});
  return true;
}

bool pinned(const void* pointer) {
  Locked held(lock());
  auto after = rt().registered.upper_bound(static_cast<const char*>(pointer));
  if (after == rt().registered.begin()) return false;
  auto before = std::prev(after);
  return static_cast<const char*>(pointer) < before->first + before->second;
}

c10::Allocator* device_allocator() { return &the_allocator; }

c10::DataPtr adopt(c10::Storage cpu, int device, int stream) {
  c10::Device at(c10::DeviceType::CUDA, c10::DeviceIndex(device));
  auto* memory = static_cast<char*>(cpu.mutable_data());
  size_t nbytes = cpu.nbytes();
  if (!nbytes || !memory) return {nullptr, nullptr, &DeviceAllocator::release_nothing, at};
  auto* block = new Block{memory, nbytes, (nbytes + 511) / 512 * 512, device, stream, false, std::move(cpu), {}};
  Locked held(lock());
  count(block);
  return {memory, block, &release, at};
}

at::Generator device_generator(int device) { return at::detail::getCUDAHooks().getDefaultGenerator(c10::DeviceIndex(device)); }

at::Generator draw(int device) {
  auto generator = device_generator(device);
  std::lock_guard<std::mutex> held(generator.mutex());
  auto* it = static_cast<Generator*>(generator.unsafeGetGeneratorImpl());
  uint64_t mixed = (it->seed_ ^ 0x9E3779B97F4A7C15ull) * 0xBF58476D1CE4E5B9ull + it->offset_ * 0x94D049BB133111EBull;
  it->offset_ += 4;
  return at::detail::createCPUGenerator(mixed ^ (mixed >> 31));
}

std::vector<std::string> violations(bool clear) {
  Locked held(lock());
  auto all = rt().violations;
  if (clear) { rt().violations.clear(); rt().seen.clear(); }
  return all;
}

void violate(const std::string& what) { Locked held(lock()); report(what); }

int64_t allocated(int device) { Locked held(lock()); return rt().allocated[device]; }
int64_t reserved(int device) { Locked held(lock()); return rt().reserved[device]; }
int64_t peak(int device) { Locked held(lock()); return rt().peak[device]; }
void reset_peak(int device) { Locked held(lock()); rt().peak[device] = rt().allocated[device]; }
void empty_cache() {
  Locked held(lock());
  for (int d = 0; d < MAX_DEVICES; d++) rt().reserved[d] = (rt().allocated[d] + (1 << 21) - 1) / (1 << 21) * (1 << 21);
}

int host_register(uint64_t pointer, uint64_t nbytes) {
  auto* begin = reinterpret_cast<const char*>(pointer);
  if (!pointer || !nbytes) return 1;  // cudaErrorInvalidValue
  Locked held(lock());
  auto& all = rt().registered;
  auto after = all.lower_bound(begin + nbytes);
  if (after != all.begin() && std::prev(after)->first + std::prev(after)->second > begin) return 712;  // already registered
  std::vector<unsigned char> resident(nbytes / 4096 + 2);
  auto page = pointer / 4096 * 4096;
  if (mincore(reinterpret_cast<void*>(page), nbytes + (pointer - page), resident.data()) != 0) return 1;
  all[begin] = nbytes;
  counters().registered++;
  counters().registered_bytes += int64_t(nbytes);
  return 0;
}

int host_unregister(uint64_t pointer) {
  Locked held(lock());
  auto* begin = reinterpret_cast<const char*>(pointer);
  auto found = rt().registered.find(begin);
  if (found == rt().registered.end()) { report("cudaHostUnregister of memory that is not registered"); return 713; }
  pending_over(begin, found->second, "host memory is unlocked");
  unsigned char one;
  if (mincore(reinterpret_cast<void*>(pointer / 4096 * 4096), 1, &one) != 0)
    report("cudaHostUnregister of memory that is no longer mapped");
  rt().registered.erase(found);
  return 0;
}

void synchronize(int device) {
  Locked held(lock());
  counters().device_syncs++;
  for (int s = device * PER_DEVICE; s < (device + 1) * PER_DEVICE; s++) {
    flush(s);
    join(rt().host, rt().clocks[s]);
  }
}

double elapsed(uint64_t began, uint64_t ended) {
  static DeviceGuard guard;
  return guard.elapsedTime(reinterpret_cast<void*>(began), reinterpret_cast<void*>(ended), 0);
}

void install_runtime() {
  auto number = [](const char* name, int64_t otherwise) {
    const char* given = std::getenv(name);
    return given && *given ? std::strtoll(given, nullptr, 10) : otherwise;
  };
  auto& o = options();
  o.devices = int(std::min<int64_t>(MAX_DEVICES, number("STANDIN_DEVICES", 1)));
  o.total = number("STANDIN_MB", 4096) << 20;
  o.poison = number("STANDIN_POISON", 1);
  o.seed = uint64_t(number("STANDIN_SEED", 1));
  rt().chance.seed(o.seed);
  std::string mode = std::getenv("STANDIN_COPIES") ? std::getenv("STANDIN_COPIES") : "late";
  o.mode = mode == "now" ? 0 : mode == "chance" ? 2 : 1;
  std::string races = std::getenv("STANDIN_RACES") ? std::getenv("STANDIN_RACES") : "collect";
  o.races = races != "off";
  o.raise = races == "raise";
  static DeviceGuard guard;
  c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::CUDA, &guard);
  c10::SetAllocator(c10::DeviceType::CUDA, &the_allocator);
  // PyTorch asks for its hooks while it is imported and keeps those without CUDA. They have no members: ours take their place.
  auto& hooks = const_cast<at::CUDAHooksInterface&>(at::detail::getCUDAHooks());
  static_assert(sizeof(Hooks) == sizeof(at::CUDAHooksInterface));
  if (!hooks.hasCUDA()) new (&hooks) Hooks(at::CUDAHooksArgs{});
}

}  // namespace standin
