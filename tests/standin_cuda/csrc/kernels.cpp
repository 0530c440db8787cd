// Every operation with a CPU kernel, run on CUDA tensors: the CPU kernel sees the same memory.
#include "runtime.h"

#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <torch/extension.h>
#include <torch/library.h>

#include <mutex>
#include <unordered_map>
#include <unordered_set>

namespace standin {
namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;

struct Below {  // CPU kernels call other operations, which must not be differentiated or autocast
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard uncast{c10::autocast_dispatch_keyset};
};

int index_of(const c10::Device& device) { return device.has_index() ? device.index() : current_device(); }

std::pair<const char*, size_t> span(const at::Tensor& t) {
  if (!t.numel()) return {nullptr, 0};
  int64_t reach = 1;
  for (int64_t d = 0; d < t.dim(); d++) reach += (t.size(d) - 1) * t.stride(d);
  return {static_cast<const char*>(t.const_data_ptr()), size_t(reach) * t.itemsize()};
}

// The same memory as CPU tensors, for one call.
struct Aliases {
  std::vector<std::pair<c10::Storage, c10::Storage>> storages;  // device's, CPU's
  std::vector<std::pair<at::Tensor, at::Tensor>> tensors;

  at::Tensor of(const at::Tensor& t) {
    for (auto& [mine, cpu] : tensors)
      if (mine.is_same(t)) return cpu;
    c10::Storage cpu;
    for (auto& [mine, other] : storages)
      if (mine.unsafeGetStorageImpl() == t.storage().unsafeGetStorageImpl()) cpu = other;
    if (!cpu) {
      c10::DataPtr view(const_cast<void*>(t.storage().data()), nullptr, [](void*) {}, c10::Device(c10::kCPU));
      cpu = c10::Storage(c10::Storage::use_byte_size_t(), t.storage().nbytes(), std::move(view), c10::GetCPUAllocator(), true);
      storages.emplace_back(t.storage(), cpu);
    }
    auto alias = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(cpu), DispatchKeySet(DispatchKey::CPU), t.dtype());
    auto* impl = alias.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
    if (t.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
    tensors.emplace_back(t, alias);
    return alias;
  }

  // In-place resizes go back.
  void settle(int device, int stream) {
    for (auto& [mine, cpu] : storages)
      if (cpu.data() != mine.data() || cpu.nbytes() != mine.nbytes()) {
        size_t nbytes = cpu.nbytes();
        auto* impl = mine.unsafeGetStorageImpl();
        impl->set_data_ptr_noswap(adopt(cpu, device, stream));
        impl->set_nbytes(nbytes);
      }
    for (auto& [mine, cpu] : tensors)
      if (cpu.sizes() != mine.sizes() || cpu.strides() != mine.strides() || cpu.storage_offset() != mine.storage_offset())
        mine.unsafeGetTensorImpl()->set_sizes_and_strides(cpu.sizes(), cpu.strides(), cpu.storage_offset());
  }

  at::Tensor back(const at::Tensor& t, int device, int stream, uint64_t moment, const char* op) {
    if (!t.defined()) return t;
    for (auto& [mine, cpu] : tensors)
      if (cpu.is_same(t)) return mine;
    c10::Storage storage;
    for (auto& [mine, cpu] : storages)
      if (cpu.unsafeGetStorageImpl() == t.storage().unsafeGetStorageImpl()) storage = mine;
    if (!storage) {
      auto memory = adopt(t.storage(), device, stream);
      storage = c10::Storage(c10::Storage::use_byte_size_t(), t.storage().nbytes(), std::move(memory), device_allocator(), true);
      auto [begin, nbytes] = span(t);
      touch(begin, nbytes, true, stream, moment, op);
      storages.emplace_back(storage, t.storage());
    }
    auto result = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), DispatchKeySet(DispatchKey::CUDA), t.dtype());
    result.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
    return result;
  }
};

struct Facts {
  bool random = false, sync = false, view = false, lenient = false, indices = false;
  std::vector<bool> writes, generators;
};

bool writes(const c10::Argument& argument) {
  auto* info = argument.alias_info();
  if (!info) return false;
  if (info->isWrite()) return true;
  for (auto& inner : info->containedTypes())
    if (inner.isWrite()) return true;
  return false;
}

const Facts& facts(const c10::OperatorHandle& op) {
  static std::mutex mutex;
  static std::unordered_map<c10::OperatorName, Facts> known;
  std::lock_guard<std::mutex> held(mutex);
  auto found = known.find(op.operator_name());
  if (found != known.end()) return found->second;
  static const std::unordered_set<std::string> syncs = {"aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim",
      "aten::unique_consecutive", "aten::equal", "aten::bincount", "aten::repeat_interleave", "aten::_local_scalar_dense", "aten::_assert_async_"};
  static const std::unordered_set<std::string> lenient = {"aten::where", "aten::masked_fill", "aten::masked_fill_", "aten::fill_",
      "aten::index_fill", "aten::index_fill_", "aten::_foreach_mul_", "aten::_foreach_mul", "aten::_foreach_div_", "aten::_foreach_div",
      "aten::_foreach_add_", "aten::_foreach_add", "aten::lerp", "aten::lerp_", "aten::_fused_adamw_", "aten::_fused_adam_"};
  static const std::unordered_set<std::string> indices = {"aten::index", "aten::_index_put_impl_", "aten::index_put_", "aten::index_put"};
  Facts it;
  auto& schema = op.schema();
  it.random = op.hasTag(at::Tag::nondeterministic_seeded) && schema.name().find("scaled_dot_product") == std::string::npos;
  it.sync = syncs.count(schema.name()) > 0;
  it.lenient = op.hasTag(at::Tag::pointwise) || lenient.count(schema.name()) > 0;
  it.indices = indices.count(schema.name()) > 0;
  bool wrote = false;
  for (auto& argument : schema.arguments()) {
    it.writes.push_back(writes(argument));
    wrote |= it.writes.back();
    it.generators.push_back(argument.type()->str() == "Generator?");
  }
  for (auto& result : schema.returns()) it.view |= !wrote && result.alias_info() != nullptr;
  return known.emplace(op.operator_name(), std::move(it)).first->second;
}

void fallback(const c10::OperatorHandle& op, DispatchKeySet, torch::jit::Stack* stack) {
  auto& known = facts(op);
  auto& schema = op.schema();
  const size_t count = schema.arguments().size(), first = stack->size() - count;
  const std::string name = schema.name() + (schema.overload_name().empty() ? "" : "." + schema.overload_name());
  int device = -1;
  at::Tensor on_cpu;
  bool sync = known.sync, any = false;
  auto look = [&](const at::Tensor& t, bool index) {
    if (!t.defined()) return;
    if (t.is_cuda()) {
      any = true;
      if (device < 0) device = t.get_device();
      TORCH_CHECK(device == t.get_device(), "Expected all tensors to be on the same device, but found at least two devices, cuda:",
                  device, " and ", t.device(), "! (", name, ")");
      if (index && known.indices && (t.scalar_type() == at::kBool || t.scalar_type() == at::kByte)) sync = true;
    } else if (t.is_cpu() && !(index && known.indices) && !(t.dim() == 0 && (known.lenient || t.unsafeGetTensorImpl()->is_wrapped_number())))
      on_cpu = t;
  };
  for (size_t i = 0; i < count; i++) {
    auto& value = (*stack)[first + i];
    if (value.isTensor()) look(value.toTensor(), false);
    else if (value.isTensorList()) for (const at::Tensor& t : value.toTensorVector()) look(t, false);
    else if (value.isList() && !value.isIntList() && !value.isDoubleList() && !value.isBoolList())
      for (const c10::IValue& each : value.toListRef())
        if (each.isTensor()) look(each.toTensor(), true);
    if (value.isDevice() && value.toDevice().is_cuda() && device < 0) device = index_of(value.toDevice());
  }
  if (any && on_cpu.defined())
    TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, cuda:", device, " and cpu! (",
                name, ", a CPU tensor of shape ", on_cpu.sizes(), ")");
  if (device < 0) device = current_device();
  const int stream = current_stream(device);
  const uint64_t moment = known.view ? 0 : launch(stream);

  Aliases aliases;
  auto lend = [&](const at::Tensor& t, bool write) {
    if (!t.defined() || !t.is_cuda()) return t;
    if (!known.view) {
      auto [begin, nbytes] = span(t);
      touch(begin, nbytes, write, stream, moment, name.c_str());
    }
    return aliases.of(t);
  };
  bool given_generator = false;
  for (size_t i = 0; i < count; i++) {
    auto& value = (*stack)[first + i];
    const bool write = known.writes[i];
    if (value.isTensor()) value = lend(value.toTensor(), write);
    else if (value.isTensorList()) {
      auto all = value.toTensorVector();
      for (auto& t : all) t = lend(t, write);
      value = c10::List<at::Tensor>(all);
    } else if (value.isDevice()) {
      if (value.toDevice().is_cuda()) value = c10::Device(c10::kCPU);
    } else if (known.generators[i]) {
      if (!value.isNone()) TORCH_CHECK(value.toGenerator().device().is_cuda(), "Expected a 'cuda' device type for generator but found '",
                                       value.toGenerator().device().type(), "'");
      value = draw(device);
      given_generator = true;
    } else if (value.isList() && schema.arguments()[i].type()->str().find("Tensor") != std::string::npos) {
      c10::List<std::optional<at::Tensor>> all;
      for (const c10::IValue& each : value.toListRef())
        all.push_back(each.isTensor() ? std::optional<at::Tensor>(lend(each.toTensor(), write)) : std::nullopt);
      value = all;
    }
  }
  {
    Below below;
    if (known.random && !given_generator) {  // draws from the CPU's default generator
      static std::mutex one;
      std::lock_guard<std::mutex> held(one);
      auto cpu = at::detail::getDefaultCPUGenerator();
      auto kept = cpu.get_state();
      cpu.set_state(draw(device).get_state());
      op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
      cpu.set_state(kept);
    } else {
      op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
    }
  }
  aliases.settle(device, stream);
  const size_t results = schema.returns().size();
  for (size_t i = stack->size() - results; i < stack->size(); i++) {
    auto& value = (*stack)[i];
    if (value.isTensor()) value = aliases.back(value.toTensor(), device, stream, moment, name.c_str());
    else if (value.isTensorList()) {
      auto all = value.toTensorVector();
      for (auto& t : all) t = aliases.back(t, device, stream, moment, name.c_str());
      value = c10::List<at::Tensor>(all);
    }
  }
  if (sync) { counters().op_syncs++; synchronizing(name.c_str()); host_waits_for(stream); }
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device> device,
                 std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(c10::Device(c10::kCUDA, c10::DeviceIndex(index_of(device.value_or(c10::Device(c10::kCUDA))))));
  return at::detail::empty_generic(size, device_allocator(), DispatchKeySet(DispatchKey::CUDA), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(c10::Device(c10::kCUDA, c10::DeviceIndex(index_of(device.value_or(c10::Device(c10::kCUDA))))));
  return at::detail::empty_strided_generic(size, stride, device_allocator(), DispatchKeySet(DispatchKey::CUDA), c10::dtype_or_default(dtype));
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (self.is_same(source)) return self;
  Below below;
  const int device = self.is_cuda() ? self.get_device() : source.get_device();
  const int stream = current_stream(device);
  at::Tensor from = source.sizes() == self.sizes() ? source : source.expand_as(self);
  if (!self.numel()) return self;
  Aliases aliases;
  auto plain = [&](const at::Tensor& t) { return t.is_cuda() ? aliases.of(t) : t; };
  auto& n = counters();
  const bool across = self.is_cuda() != source.is_cuda();
  const uint64_t moment = launch(stream);
  if (source.is_cuda()) { auto [b, s] = span(from); touch(b, s, false, stream, moment, across ? "copy to the host" : "copy"); }
  if (self.is_cuda()) { auto [b, s] = span(self); touch(b, s, true, stream, moment, across ? "copy from the host" : "copy"); }
  if (!across) {
    n.d2d++;
    plain(self).copy_(plain(from));
    return self;
  }
  const auto& host = self.is_cuda() ? from : self;
  const bool locked = pinned(host.const_data_ptr());
  (self.is_cuda() ? n.h2d : n.d2h)++;
  (self.is_cuda() ? n.h2d_bytes : n.d2h_bytes) += int64_t(self.nbytes());
  if (!locked) { n.unpinned++; n.unpinned_bytes += int64_t(self.nbytes()); }
  const bool whole = self.scalar_type() == from.scalar_type() && self.strides() == from.strides() && self.is_non_overlapping_and_dense();
  if (non_blocking && locked && whole &&
      defer(stream, self.mutable_data_ptr(), from.const_data_ptr(), self.nbytes()))
    return self;
  plain(self).copy_(plain(from));
  if (!non_blocking || !locked) {
    if (!non_blocking) { n.copy_syncs++; synchronizing("copy"); }
    host_waits_for(stream);
  }
  return self;
}

at::Scalar local_scalar(const at::Tensor& self) {
  Below below;
  const int stream = current_stream(self.get_device());
  const uint64_t moment = launch(stream);
  auto [begin, nbytes] = span(self);
  touch(begin, nbytes, false, stream, moment, "item");
  counters().op_syncs++;
  synchronizing("item");
  host_waits_for(stream);
  Aliases aliases;
  return at::_local_scalar_dense(aliases.of(self));
}

at::Tensor histc(const at::Tensor& self, int64_t bins, const at::Scalar& low, const at::Scalar& high) {  // a GPU counts integers too
  Below below;
  const int device = self.get_device(), stream = current_stream(device);
  const uint64_t moment = launch(stream);
  auto [begin, nbytes] = span(self);
  touch(begin, nbytes, false, stream, moment, "histc");
  Aliases aliases;
  auto plain = aliases.of(self);
  auto found = at::histc(at::isIntegralType(plain.scalar_type(), true) ? plain.to(at::kFloat) : plain, bins, low, high).to(plain.scalar_type());
  if (low.toDouble() == high.toDouble()) { counters().op_syncs++; host_waits_for(stream); }
  return aliases.back(found, device, stream, moment, "histc");
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, std::move(source), offset, size, stride);
}
at::Tensor& set_whole(at::Tensor& self, at::Storage source) {
  int64_t length = int64_t(source.nbytes() / self.dtype().itemsize());
  return at::native::set_storage_cpu_(self, std::move(source), 0, length, {});
}
at::Tensor& set_nothing(at::Tensor& self) {
  c10::Storage none(c10::Storage::use_byte_size_t(), 0, device_allocator(), true);
  return at::native::set_storage_cpu_(self, none, 0, {0}, {});
}
at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) { return at::native::set_tensor_(self, source); }

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(self.device());
  return at::native::resize_(self, size, format);
}

at::Tensor as_strided(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}
at::Tensor view(const at::Tensor& self, at::IntArrayRef size) { return at::native::view(self, size); }
void record_stream(at::Tensor&, c10::Stream) {}

// Which attention PyTorch would choose on a GPU, as far as shapes and types decide it.
int64_t attention_choice(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::optional<at::Tensor>& mask, double dropout,
                         bool causal, std::optional<double>, bool grouped) {
  const auto type = q.scalar_type();
  const bool half = type == at::kBFloat16 || type == at::kHalf;
  const bool shaped = q.dim() == 4 && k.dim() == 4 && q.size(-2) > 0 && k.size(-2) > 0 && q.stride(-1) == 1 && k.stride(-1) == 1;
  if (!shaped || dropout > 0) return 0;
  auto& global = at::globalContext();
  if (half && !mask && global.userEnabledFlashSDP() && q.size(-1) <= 256 && q.size(-1) == v.size(-1) && !(causal && q.size(-2) != k.size(-2))) return 1;
  if ((half || type == at::kFloat) && !(grouped && q.size(1) != k.size(1)) && global.userEnabledMemEfficientSDP()) return 2;
  return 0;
}

std::vector<std::string> install() {
  static torch::Library special(torch::Library::IMPL, "aten", DispatchKey::CUDA, __FILE__, __LINE__);
  special.impl("empty.memory_format", &empty);
  special.impl("empty_strided", &empty_strided);
  special.impl("copy_", &copy_);
  special.impl("_local_scalar_dense", &local_scalar);
  special.impl("histc", &histc);
  special.impl("set_.source_Storage_storage_offset", &set_storage);
  special.impl("set_.source_Storage", &set_whole);
  special.impl("set_.source_Tensor", &set_tensor);
  special.impl("set_", &set_nothing);
  special.impl("resize_", &resize_);
  special.impl("as_strided", &as_strided);
  special.impl("view", &view);
  special.impl("record_stream", &record_stream);
  auto& dispatcher = c10::Dispatcher::singleton();
  static std::vector<std::unique_ptr<torch::Library>> libraries;
  std::unordered_map<std::string, torch::Library*> of;
  std::vector<std::string> done;
  for (auto& name : dispatcher.getAllOpNames()) {
    auto op = dispatcher.findOp(name);
    static const std::unordered_set<std::string> whole = {"aten::convolution", "aten::convolution_backward"};  // else cuDNN is sought
    if (!op || !op->hasSchema() || !(op->hasKernelForDispatchKey(DispatchKey::CPU) || whole.count(name.name)) || op->hasKernelForDispatchKey(DispatchKey::CUDA)) continue;
    auto space = name.name.substr(0, name.name.find("::"));
    if (space != "aten" && space != "megatrain") continue;
    auto& library = of[space];
    if (!library) {
      libraries.push_back(std::make_unique<torch::Library>(torch::Library::IMPL, space, DispatchKey::CUDA, __FILE__, __LINE__));
      library = libraries.back().get();
    }
    auto full = name.name + (name.overload_name.empty() ? "" : "." + name.overload_name);
    library->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
    done.push_back(full);
  }
  static torch::Library rest(torch::Library::IMPL, "_", DispatchKey::CUDA, __FILE__, __LINE__);
  rest.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&attention_choice);
  return done;
}

}  // namespace
}  // namespace standin

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace standin;
  m.def("install", [] { install_runtime(); return install(); });
  m.def("device_count", [] { return options().devices; });
  m.def("total", [] { return options().total; });
  m.def("set_total", [](int64_t nbytes) { options().total = nbytes; });
  m.def("set_mode", [](int mode, uint64_t seed) { options().mode = mode; options().seed = seed; });
  m.def("allocated", &allocated);
  m.def("reserved", &reserved);
  m.def("peak", &peak);
  m.def("reset_peak", &reset_peak);
  m.def("empty_cache", &empty_cache);
  m.def("synchronize", &synchronize, py::call_guard<py::gil_scoped_release>());
  m.def("host_register", &host_register);
  m.def("host_unregister", &host_unregister);
  m.def("is_pinned", [](uint64_t pointer) { return pinned(reinterpret_cast<void*>(pointer)); });
  m.def("generator", &device_generator);
  m.def("violations", &violations, py::arg("clear") = false);
  m.def("counters", [] {
    auto& n = counters();
    py::dict all;
#define ONE(name) all[#name] = n.name
    ONE(kernels); ONE(h2d); ONE(h2d_bytes); ONE(d2h); ONE(d2h_bytes); ONE(d2d); ONE(unpinned); ONE(unpinned_bytes); ONE(late);
    ONE(op_syncs); ONE(copy_syncs); ONE(event_syncs); ONE(stream_syncs); ONE(device_syncs); ONE(events); ONE(records); ONE(waits);
    ONE(allocations); ONE(registered); ONE(registered_bytes);
#undef ONE
    return all;
  });
  m.def("elapsed", &elapsed);
  m.def("sync_debug", [](int mode) { options().sync_debug = mode; });
  m.attr("FIRST_STREAM") = FIRST_STREAM;
  m.attr("STREAMS_PER_DEVICE") = PER_DEVICE;
  m.def("initialise", [] { at::globalContext().lazyInitDevice(c10::DeviceType::CUDA); });
  m.def("reset_counters", [] { counters() = Counters(); });
}
