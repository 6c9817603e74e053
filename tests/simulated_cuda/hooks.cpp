// What torch's C++ side asks of CUDA, in the place of a build's own answers where it has some. Tensors that say cuda:N
// then pass through indexing, autocast and autograd, which starts one thread per device, and host memory can be pinned.
// What happens on the streams is judged in Python.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <mutex>
#include <unordered_set>
#include <utility>

namespace {
constexpr c10::DeviceIndex kNumDevices = 8;
thread_local c10::DeviceIndex current_device = 0;
thread_local std::array<c10::StreamId, kNumDevices> current_streams{};  // 0 is the default one

std::mutex pinned_mutex;
std::unordered_set<const void*> pinned;

struct PinnedAllocator final : public at::Allocator {
  static void release(void* data) {
    {
      std::lock_guard<std::mutex> guard(pinned_mutex);
      pinned.erase(data);
    }
    c10::GetCPUAllocator()->raw_deallocate(data);
  }
  at::DataPtr allocate(size_t num_bytes) override {
    void* data = c10::GetCPUAllocator()->raw_allocate(num_bytes);
    std::lock_guard<std::mutex> guard(pinned_mutex);
    pinned.insert(data);
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }
  at::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t num_bytes) const override { default_copy_data(to, from, num_bytes); }
};
PinnedAllocator pinned_allocator;

struct Guard final : public c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = c10::DeviceType::CUDA;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  // Autograd asks in the forward, and lets its own thread work on that stream in the backward.
  static c10::Stream stream_of(c10::Device device) {
    return c10::Stream(c10::Stream::UNSAFE, device, current_streams.at(device.index()));
  }
  c10::DeviceType type() const override { return static_type; }
  c10::Device getDevice() const override { return c10::Device(static_type, current_device); }
  c10::Device exchangeDevice(c10::Device device) const override {
    return c10::Device(static_type, std::exchange(current_device, device.index()));
  }
  void setDevice(c10::Device device) const override { current_device = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current_device = device.index(); }
  c10::Stream getStream(c10::Device device) const override { return stream_of(device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return stream_of(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = stream_of(stream.device());
    current_streams.at(stream.device_index()) = stream.id();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kNumDevices; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void synchronizeEvent(void*) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};

struct Hooks final : public at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  // A build with CUDA asks before it chooses a kernel for attention.
  long versionCuDNN() const override { return 0; }
  long versionRuntimeCuDNN() const override { return 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kNumDevices; }
  int getNumGPUs() const override { return kNumDevices; }
  c10::DeviceIndex current_device() const override { return ::current_device; }
  c10::DeviceIndex getCurrentDevice() const override { return ::current_device; }
  void setCurrentDevice(c10::DeviceIndex device) const override { ::current_device = device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return std::exchange(::current_device, device);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  void deviceSynchronize(c10::DeviceIndex) const override {}
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard<std::mutex> guard(pinned_mutex);
    return pinned.count(data) > 0;
  }
};
}  // namespace

// The device of this thread, as autograd sets it in its own.
extern "C" int get_current_device() { return current_device; }

// The number of this thread's stream of a device: autograd's threads have that of the forward.
extern "C" void set_current_stream(int device, long number) { current_streams.at(device) = number; }
extern "C" long get_current_stream(int device) { return current_streams.at(device); }

// cudaHostRegister and cudaHostUnregister.
extern "C" void register_host_memory(void* data) {
  std::lock_guard<std::mutex> guard(pinned_mutex);
  pinned.insert(data);
}
extern "C" void unregister_host_memory(void* data) {
  std::lock_guard<std::mutex> guard(pinned_mutex);
  pinned.erase(data);
}

C10_REGISTER_GUARD_IMPL(CUDA, Guard);
namespace at {
C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, Hooks);
}
