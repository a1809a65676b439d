// What every part needs: settings, counters, the timeline, and the rule for waiting without Python's lock.
#pragma once
#include <Python.h>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace simdev {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;
using Clock = std::chrono::steady_clock;
using Time = Clock::time_point;

inline Clock::duration seconds(double s) { return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(s)); }

// All globals are made once and never destroyed: worker threads and late tensors may outlive static destructors.
#define SIMDEV_GLOBAL(type, name) \
  inline type& name() { static auto* it = new type; return *it; }

// One lock for everything the host does to the device. The clocks, the access records and the queues of the streams change
// under it together, so that the order in which work was issued is one order. Workers never take it, and nobody waits with it.
SIMDEV_GLOBAL(std::mutex, world)

struct Config {
  size_t capacity = size_t(2) << 30;  // bytes of device memory
  size_t pinned_capacity = SIZE_MAX;    // bytes of pinned host memory, as rounded
  double h2d = 0, d2h = 0;              // bytes per second; 0 = as fast as memcpy
  double latency = 0;                   // seconds before each copy over the link
  std::map<std::string, double> op_time;  // least seconds that an op takes, by name; "" = all others
  double delay = 0;                     // each task begins up to so many seconds late, at random
  uint64_t seed = 0;
  uint64_t version = 0;                 // streams seed their random numbers anew when it changes
};

struct Settings {
  std::mutex m;
  std::shared_ptr<const Config> now = std::make_shared<Config>();
  std::shared_ptr<const Config> get() { std::lock_guard<std::mutex> l(m); return now; }
  void set(Config c) {
    std::lock_guard<std::mutex> l(m);
    c.version = now->version + 1;
    now = std::make_shared<Config>(std::move(c));
  }
};
SIMDEV_GLOBAL(Settings, settings)

struct Counters {
  std::mutex m;
  std::map<std::string, uint64_t> n;
  void add(const std::string& name, uint64_t by = 1) { std::lock_guard<std::mutex> l(m); n[name] += by; }
};
SIMDEV_GLOBAL(Counters, counters)

struct Span {
  std::string name, kind;  // kind: op, h2d, d2h, d2d, wait (a stream for an event), sync (the host)
  int stream;              // -1: the host
  double start, end;       // seconds since the last reset
  size_t bytes;
};

struct Timeline {
  std::mutex m;
  Time zero = Clock::now();
  std::vector<Span> spans;
  void add(std::string name, std::string kind, int stream, Time a, Time b, size_t bytes = 0) {
    std::lock_guard<std::mutex> l(m);
    auto since = [&](Time t) { return std::chrono::duration<double>(t - zero).count(); };
    if (spans.size() < 1000000) spans.push_back({std::move(name), std::move(kind), stream, since(a), since(b), bytes});
  }
};
SIMDEV_GLOBAL(Timeline, timeline)

// The first error of any worker, until a host synchronisation reports it.
struct Failure {
  std::mutex m;
  std::string text;
  void note(const std::string& s) { std::lock_guard<std::mutex> l(m); if (text.empty()) text = s; }
  std::string take() { std::lock_guard<std::mutex> l(m); return std::exchange(text, std::string()); }
};
SIMDEV_GLOBAL(Failure, failure)

inline void report_failure() {
  auto text = failure().take();
  TORCH_CHECK(text.empty(), "simdev: asynchronous error, raised where it was noticed: ", text);
}

// Waits of the host are counted apart for the thread that started or last reset the device, and for all others.
inline std::atomic<std::thread::id>& main_thread() { static std::atomic<std::thread::id> it{std::this_thread::get_id()}; return it; }
inline void count_sync(const std::string& why) {
  counters().add((std::this_thread::get_id() == main_thread().load() ? "sync." : "aside.") + why);
}

enum class Life { none, running, closed, forked };
inline std::atomic<Life>& life() { static std::atomic<Life> it{Life::none}; return it; }

inline void check_alive() {
  switch (life().load()) {
    case Life::running: return;
    case Life::none: TORCH_CHECK(false, "simdev: not started: call simdev.load()");
    case Life::closed: TORCH_CHECK(false, "simdev: the interpreter is exiting, the device is closed");
    case Life::forked: TORCH_CHECK(false, "simdev: this process was forked after the device was started: start it in the child");
  }
}

// Workers may need Python's lock (ops written in Python): the host gives it up while it waits for them.
struct WithoutGil {
  PyThreadState* state = Py_IsInitialized() && PyGILState_Check() ? PyEval_SaveThread() : nullptr;
  ~WithoutGil() { if (state) PyEval_RestoreThread(state); }
};

}  // namespace simdev
