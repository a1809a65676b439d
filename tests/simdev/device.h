// What torch asks a device for: its guard (streams, events), its hooks (pinned memory, random numbers).
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "memory.h"

namespace simdev {

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Device here() { return {kDevice, 0}; }
  static c10::Stream stream(int id) { return c10::Stream(c10::Stream::UNSAFE, here(), id); }
  static std::shared_ptr<Moment> moment(void* e) { return e ? ((Event*)e)->moment : nullptr; }

  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::DeviceType type() const override { return kDevice; }
  c10::Device exchangeDevice(c10::Device) const override { return here(); }
  c10::Device getDevice() const override { return here(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(c10::Device) const override { return stream(current()); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream(streams().from_pool()); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(streams().from_pool()); }
  c10::Stream exchangeStream(c10::Stream s) const override { return stream(std::exchange(current(), (int)s.id())); }
  bool queryStream(const c10::Stream& s) const override {
    check_alive();
    counters().add("query");
    Clocks c;
    { std::lock_guard<std::mutex> l(world());
      c = checker().streams[s.id()];
      auto& stream = streams().get(s.id());
      if (!stream.reached(stream.mark())) return false;
      checker().host_learns(c); }
    return true;
  }
  void synchronizeStream(const c10::Stream& s) const override { synchronize(s.id(), "stream"); }
  void synchronizeDevice(const c10::DeviceIndex) const override { synchronize_all("device"); }

  void record(void** e, const c10::Stream& s, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*e) *e = new Event;
    ((Event*)*e)->moment = simdev::record(s.id());
  }
  void block(void* e, const c10::Stream& s) const override { if (auto m = moment(e)) wait_for(s.id(), m); }
  bool queryEvent(void* e) const override { auto m = moment(e); return !m || query(*m); }
  void synchronizeEvent(void* e) const override { if (auto m = moment(e)) synchronize(*m); }
  void destroyEvent(void* e, const c10::DeviceIndex) const noexcept override { delete (Event*)e; }
  double elapsedTime(void* a, void* b, const c10::DeviceIndex) const override {  // milliseconds
    auto x = moment(a), y = moment(b);
    TORCH_CHECK(x && y && x->reached() && y->reached(), "simdev: both events must have been recorded and reached");
    return std::chrono::duration<double, std::milli>(y->time - x->time).count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& p, const c10::Stream& s) const override { device_memory().recordStream(p, s); }
};

// Random numbers of the device: those of a CPU generator of its own, so that a seed gives the numbers that it gives on the CPU.
struct Generator final : c10::GeneratorImpl {
  at::Generator cpu;
  explicit Generator(at::Generator g)
      : c10::GeneratorImpl(c10::Device(kDevice, 0), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), cpu(std::move(g)) {}
  static void settle() { if (life() == Life::running) synchronize_all("generator"); }  // ops under way draw from it
  void set_current_seed(uint64_t seed) override { settle(); cpu.set_current_seed(seed); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "simdev: generators have no offset"); }
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { settle(); return cpu.seed(); }
  void set_state(const c10::TensorImpl& state) override { settle(); cpu.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { settle(); return cpu.unsafeGetGeneratorImpl()->get_state(); }
  Generator* clone_impl() const override { return new Generator(cpu.clone()); }
};

inline at::Generator make_generator() { return at::make_generator<Generator>(at::detail::createCPUGenerator()); }
inline const at::Generator& default_generator() { static auto* g = new at::Generator(make_generator()); return *g; }

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return life() == Life::running; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return life() == Life::running; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void* p) const override { return pinned_memory().has(p); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory(); }
  at::Device getDeviceFromPtr(void* p) const override {
    TORCH_CHECK(arenas().dev.has(p), "simdev: not an address of the device");
    return {kDevice, 0};
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return make_generator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override;
};

}  // namespace simdev
