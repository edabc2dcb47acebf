// A device that torch calls cuda, for a torch that was built without CUDA.
//
// Tensors of the device are in RAM. Every operation is carried out by the kernels of the CPU: its arguments are
// replaced by tensors of the CPU on the same memory ("twins"), and its results are named tensors of the device.
// As on a GPU, operations refuse tensors of two devices. Each rank of
// torchrun has one GPU, whose index is the local rank.
// The library must be loaded before `import torch`, which asks for the hooks below only once.

#include <ATen/ATen.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace {

c10::DeviceIndex number(const char* variable, int without) {
  const char* text = std::getenv(variable);
  return static_cast<c10::DeviceIndex>(text ? std::atoi(text) : without);
}
const c10::Device GPU{c10::kCUDA, number("LOCAL_RANK", 0)};
const c10::DeviceIndex COUNT = number("LOCAL_WORLD_SIZE", 1);

// -- what autograd asks of a device: one stream, events that are always complete --------------------

struct Guard : c10::impl::DeviceGuardImplInterface {
  c10::Stream only() const { return c10::Stream(c10::Stream::DEFAULT, GPU); }
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return GPU; }
  c10::Device getDevice() const override { return GPU; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return only(); }
  c10::Stream getNewStream(c10::Device, int) const override { return only(); }
  c10::Stream exchangeStream(c10::Stream) const override { return only(); }
  c10::DeviceIndex deviceCount() const noexcept override { return COUNT; }
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
};
Guard guard;
c10::impl::DeviceGuardImplRegistrar guard_registered(c10::kCUDA, &guard);

struct CUDAHooks : at::CUDAHooksInterface {  // torch creates the class by this name
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex getCurrentDevice() const override { return GPU.index(); }
  c10::DeviceIndex deviceCount() const override { return COUNT; }
  c10::Device getDeviceFromPtr(void*) const override { return GPU; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::kCPU); }
};

// -- memory: counted, and limited -------------------------------------------------------------------

std::atomic<int64_t> used{0}, peak{0}, limit{int64_t{80} << 30};

c10::Storage renamed(const c10::Storage& storage, c10::Device device) {
  c10::DeleterFnPtr release = [](void* kept) { delete static_cast<c10::Storage*>(kept); };
  c10::DeleterFnPtr release_counted = [](void* kept) {
    auto* storage = static_cast<c10::Storage*>(kept);
    used -= static_cast<int64_t>(storage->nbytes());
    delete storage;
  };
  if (device == GPU) {
    const int64_t now = used += static_cast<int64_t>(storage.nbytes());
    int64_t before = peak;
    while (now > before && !peak.compare_exchange_weak(before, now)) {}
  }
  c10::DataPtr data(storage.data_ptr().get(), new c10::Storage(storage),
      device == GPU ? release_counted : release, device);
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(),
      storage.nbytes(), std::move(data), c10::GetAllocator(c10::kCPU), /*resizable=*/true));
}

void need(int64_t bytes) {
  TORCH_CHECK_WITH(OutOfMemoryError, used + bytes <= limit, "CUDA out of memory. Tried to allocate ", bytes,
      " bytes on the pretended GPU.");
}

// -- operations -------------------------------------------------------------------------------------

void shape(c10::TensorImpl* tensor, const at::Tensor& like) {
  tensor->set_storage_offset(like.storage_offset());
  tensor->set_sizes_and_strides(like.sizes(), like.strides());
}

at::Tensor fresh(c10::Storage storage, const at::Tensor& like, c10::DispatchKey key) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(key), like.dtype());
  shape(tensor.unsafeGetTensorImpl(), like);
  return tensor;
}

at::Tensor view(const at::Tensor& base, const at::Tensor& like) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), like.dtype());
  shape(tensor.unsafeGetTensorImpl(), like);
  return tensor;
}

bool same(const c10::Storage& a, const c10::Storage& b) {
  return a.unsafeGetStorageImpl() == b.unsafeGetStorageImpl();
}

// The value with every tensor in it replaced by `change(tensor)`.
template <typename Change>
c10::IValue mapped(const c10::IValue& value, const Change& change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& each : value.toOptionalTensorList())
      list.push_back(each ? std::optional<at::Tensor>(change(*each)) : std::nullopt);
    return list;
  }
  const bool nested = value.isList() && !value.toListRef().empty() && value.toListRef()[0].isTensorList();
  if (!value.isTensorList() && !nested) return value;
  c10::impl::GenericList list(value.toList().elementType());
  for (const c10::IValue& each : value.toListRef()) list.push_back(mapped(each, change));
  return list;
}

// The twins of the arguments of one operation.
struct Twins {
  std::vector<std::pair<at::Tensor, at::Tensor>> tensors;
  std::vector<std::pair<c10::Storage, c10::Storage>> storages;
  bool host = false;  // an argument is a tensor of the CPU with dimensions

  c10::Storage of(const c10::Storage& storage) {
    for (auto& [mine, twin] : storages)
      if (same(mine, storage)) return twin;
    storages.emplace_back(storage, renamed(storage, c10::Device(c10::kCPU)));
    return storages.back().second;
  }

  at::Tensor of(const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_cuda()) {
      host = host || tensor.dim() > 0;
      return tensor;
    }
    for (auto& [mine, twin] : tensors)
      if (mine.is_same(tensor)) return twin;
    tensors.emplace_back(tensor, fresh(of(tensor.storage()), tensor, c10::DispatchKey::CPU));
    return tensors.back().second;
  }

  c10::IValue of(const c10::IValue& value) {
    if (value.isStorage() && value.toStorage().device().is_cuda()) return of(value.toStorage());
    if (value.isDevice() && value.toDevice().is_cuda()) return c10::Device(c10::kCPU);
    return mapped(value, [this](const at::Tensor& tensor) { return of(tensor); });
  }

  c10::Storage back(const c10::Storage& storage) const {
    for (auto& [mine, twin] : storages)
      if (same(twin, storage)) return mine;
    return renamed(storage, GPU);
  }

  at::Tensor back(const at::Tensor& tensor) const {
    if (!tensor.defined()) return tensor;
    for (auto& [mine, twin] : tensors)
      if (twin.is_same(tensor) || mine.is_same(tensor)) return mine;
    for (auto& [mine, twin] : tensors)
      if (same(twin.storage(), tensor.storage())) return view(mine, tensor);
    return fresh(renamed(tensor.storage(), GPU), tensor, c10::DispatchKey::CUDA);
  }

  c10::IValue back(const c10::IValue& value) const {
    return mapped(value, [this](const at::Tensor& tensor) { return back(tensor); });
  }

  // Give the arguments the sizes, the memory and the storages that the operation gave to their twins.
  void update() const {
    for (auto& [mine, twin] : storages) {
      if (mine.data() == twin.data() && mine.nbytes() == twin.nbytes()) continue;
      auto moved = renamed(twin, GPU);
      mine.unsafeGetStorageImpl()->set_data_ptr_noswap(
          std::move(moved.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks()));
      mine.unsafeGetStorageImpl()->set_nbytes(twin.nbytes());
    }
    for (auto& [mine, twin] : tensors) {
      auto* tensor = mine.unsafeGetTensorImpl();
      const auto storage = back(twin.storage());
      if (!same(storage, mine.storage())) tensor->set_storage_keep_dtype(storage);
      if (mine.sizes() != twin.sizes() || mine.strides() != twin.strides() ||
          mine.storage_offset() != twin.storage_offset())
        shape(tensor, twin);
    }
  }
};

// Operations that accept tensors of the GPU and of the CPU.
const std::set<std::string> MIXED{"aten::copy_", "aten::index", "aten::index_put", "aten::index_put_",
    "aten::_index_put_impl_", "aten::set_"};

void compute(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  Twins twins;
  for (auto i = stack->size() - schema.arguments().size(); i < stack->size(); ++i)
    (*stack)[i] = twins.of((*stack)[i]);
  TORCH_CHECK(!twins.host || twins.tensors.empty() || MIXED.count(schema.name()),
      "Expected all tensors to be on the same device, but ", schema.name(), " got tensors on cuda and cpu");
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  twins.update();
  for (auto i = stack->size() - schema.returns().size(); i < stack->size(); ++i)
    (*stack)[i] = twins.back((*stack)[i]);
}

at::TensorOptions on_cpu(std::optional<at::ScalarType> dtype) {
  return at::TensorOptions().dtype(dtype.value_or(at::get_default_dtype_as_scalartype()));
}

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  need(c10::multiply_integers(sizes) * static_cast<int64_t>(on_cpu(dtype).dtype().itemsize()));
  const auto tensor = at::empty(sizes, on_cpu(dtype), format);
  return fresh(renamed(tensor.storage(), GPU), tensor, c10::DispatchKey::CUDA);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
    std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
    std::optional<bool>) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  need(c10::multiply_integers(sizes) * static_cast<int64_t>(on_cpu(dtype).dtype().itemsize()));
  const auto tensor = at::empty_strided(sizes, C10_AS_INTARRAYREF_SLOW(stride), on_cpu(dtype));
  return fresh(renamed(tensor.storage(), GPU), tensor, c10::DispatchKey::CUDA);
}

// -- attention that does not keep the probabilities, as on a GPU -------------------------------------

int64_t efficient_attention(const at::Tensor&, const at::Tensor&, const at::Tensor&,
    const std::optional<at::Tensor>&, double, bool, std::optional<double>, bool) {
  return static_cast<int64_t>(sdp::SDPBackend::efficient_attention);
}

std::optional<at::Tensor> twin(Twins& twins, const std::optional<at::Tensor>& tensor) {
  return tensor && tensor->defined() ? std::optional<at::Tensor>(twins.of(*tensor)) : std::nullopt;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> attention(const at::Tensor& query,
    const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& bias, bool,
    double dropout, bool causal, std::optional<double> scale) {
  Twins twins;
  auto [output, sums] = at::_scaled_dot_product_flash_attention_for_cpu(twins.of(query), twins.of(key),
      twins.of(value), dropout, causal, twin(twins, bias), scale);
  const auto seed = at::empty({}, query.options().dtype(at::kLong));
  return {twins.back(output), twins.back(sums), seed, seed};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> attention_backward(const at::Tensor& gradient,
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const at::Tensor& bias,
    const at::Tensor& output, const at::Tensor& sums, const at::Tensor&, const at::Tensor&, double dropout,
    std::array<bool, 4>, bool causal, std::optional<double> scale) {
  Twins twins;
  auto [of_query, of_key, of_value] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      twins.of(gradient), twins.of(query), twins.of(key), twins.of(value), twins.of(output), twins.of(sums),
      dropout, causal, twin(twins, bias), scale);
  return {twins.back(of_query), twins.back(of_key), twins.back(of_value), at::Tensor()};
}

}  // namespace

namespace at {
REGISTER_CUDA_HOOKS(CUDAHooks);
namespace native {
REGISTER_CUDA_DISPATCH(_fused_sdp_choice_stub, &efficient_attention)
}  // namespace native
}  // namespace at

using Boxed = torch::CppFunction;

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(Boxed::makeFromBoxedFunction<&compute>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_scaled_dot_product_efficient_attention", &attention);
  m.impl("_scaled_dot_product_efficient_attention_backward", &attention_backward);
  m.impl("copy_", Boxed::makeFromBoxedFunction<&compute>());  // for torch, a copy of two native devices
}

TORCH_LIBRARY_IMPL(c10d, CUDA, m) {  // Gloo computes what NCCL would
  for (const auto* name : {"allreduce_", "allreduce_coalesced_", "allgather_", "_allgather_base_",
           "allgather_coalesced_", "allgather_into_tensor_coalesced_", "reduce_scatter_",
           "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_", "broadcast_", "reduce_", "gather_",
           "scatter_", "alltoall_", "alltoall_base_", "send", "recv_", "recv_any_source_", "barrier"})
    m.impl(name, Boxed::makeFromBoxedFunction<&compute>());
}

extern "C" {
int64_t memory_used() { return used; }
int64_t memory_peak() { return peak; }
void reset_memory_peak() { peak = used.load(); }
void set_memory_limit(int64_t bytes) { limit = bytes; }
}
