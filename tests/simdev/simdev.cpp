// A simulated asynchronous accelerator for tests: see __init__.py. This file is what Python sees of it.
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "ops.h"

namespace simdev {

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

void configure(size_t capacity, size_t pinned_capacity, double h2d, double d2h, double latency,
               std::map<std::string, double> op_time, double delay, uint64_t seed) {
  Config c;
  c.capacity = capacity;
  c.pinned_capacity = pinned_capacity;
  c.h2d = h2d;
  c.d2h = d2h;
  c.latency = latency;
  c.op_time = std::move(op_time);
  c.delay = delay;
  c.seed = seed;
  settings().set(std::move(c));
}

// Waits until the device is idle. The error that nobody had waited for, if any.
std::string unseen_error() {
  try { synchronize_all("reset"); } catch (const c10::Error& e) { return e.what_without_backtrace(); }
  return "";
}

void reset() {
  main_thread() = std::this_thread::get_id();
  unseen_error();
  std::lock_guard<std::mutex> l(world());
  device_memory().give_back();
  device_memory().peak = device_memory().allocated;
  device_memory().peak_reserved = device_memory().reserved;
  checker().found.clear();
  checker().seen.clear();
  { std::lock_guard<std::mutex> l2(counters().m); counters().n.clear(); }
  { std::lock_guard<std::mutex> l2(timeline().m); timeline().spans.clear(); timeline().zero = Clock::now(); }
}

auto hazards(bool clear) {
  std::lock_guard<std::mutex> l(world());
  for (auto& a : checker().open) checker().verify(a);
  std::vector<std::tuple<std::string, std::string, int, std::string, int, std::string>> out;
  for (auto& h : checker().found) out.emplace_back(h.kind, h.first, h.first_stream, h.second, h.second_stream, h.range);
  if (clear) { checker().found.clear(); checker().seen.clear(); }
  return out;
}

std::map<std::string, uint64_t> counts() {
  std::map<std::string, uint64_t> out;
  { std::lock_guard<std::mutex> l(counters().m); out = counters().n; }
  std::lock_guard<std::mutex> l(world());
  auto& d = device_memory();
  out.insert({{"memory.allocated", d.allocated}, {"memory.peak", d.peak}, {"memory.reserved", d.reserved},
              {"memory.pinned", pinned_memory().reserved}, {"memory.refused", d.refused}});
  return out;
}

auto trace() {
  std::lock_guard<std::mutex> l(timeline().m);
  std::vector<std::tuple<std::string, std::string, int, double, double, size_t>> out;
  for (auto& s : timeline().spans) out.emplace_back(s.name, s.kind, s.stream, s.start, s.end, s.bytes);
  return out;
}

void host_register(size_t p, size_t n) {
  std::lock_guard<std::mutex> l(world());
  pinned_memory().registered[(const char*)p] = n;
}

void host_unregister(size_t p) {
  synchronize_all("unregister");
  std::lock_guard<std::mutex> l(world());
  auto it = pinned_memory().registered.find((const char*)p);
  TORCH_CHECK(it != pinned_memory().registered.end(), "simdev: this memory was not registered");
  checker().freed({it->first, it->first + it->second}, kNobody, {});
  pinned_memory().registered.erase(it);
}

}  // namespace simdev

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace simdev;
  m.def("start", [](size_t arena) {
    if (life() != Life::none) return;
    start(arena);
    c10::SetAllocator(kDevice, &device_memory());
    at::RegisterPrivateUse1HooksInterface(new Hooks);
  });
  m.def("shut_down", shut_down);
  m.def("pretend_cuda", [] {
    if (!c10::impl::hasDeviceGuardImpl(c10::DeviceType::CUDA))
      c10::impl::DeviceGuardImplRegistrar(c10::DeviceType::CUDA, new c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>);
  });
  m.def("forked", [] { return life() == Life::forked; });
  m.def("running", [] { return life() == Life::running; });
  m.def("configure", configure);
  m.def("reset", reset);
  m.def("unseen_error", unseen_error);
  m.def("hazards", hazards);
  m.def("counters", counts);
  m.def("trace", trace);
  m.def("seed", [](uint64_t seed) { auto g = default_generator(); g.set_current_seed(seed); });
  m.def("host_register", host_register);
  m.def("host_unregister", host_unregister);
}
