// Streams are worker threads that take tasks from a queue; events are tasks that say when they were reached.
#pragma once
#include <ATen/Parallel.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <random>

#include "hazards.h"

namespace simdev {

struct Task {
  std::string name, kind;
  size_t bytes;
  std::function<void()> run;
};

struct Stream {
  const int id;
  std::mutex m;
  std::condition_variable more, progress;
  std::deque<Task> queue;
  uint64_t issued = 0, finished = 0;
  bool stop = false;
  std::thread thread;

  explicit Stream(int i) : id(i), thread([this] { work(); }) {}

  void push(Task t) {
    { std::lock_guard<std::mutex> l(m); queue.push_back(std::move(t)); issued++; }
    more.notify_one();
  }
  uint64_t mark() { std::lock_guard<std::mutex> l(m); return issued; }
  bool reached(uint64_t n) { std::lock_guard<std::mutex> l(m); return finished >= n; }
  void wait(uint64_t n) { std::unique_lock<std::mutex> l(m); progress.wait(l, [&] { return finished >= n; }); }

  void work() {
    at::init_num_threads();  // as many threads inside an op as the main thread was told to use
    std::mt19937_64 random;
    uint64_t version = UINT64_MAX;
    for (;;) {
      Task t;
      {
        std::unique_lock<std::mutex> l(m);
        more.wait(l, [&] { return stop || !queue.empty(); });
        if (queue.empty()) return;
        t = std::move(queue.front());
        queue.pop_front();
      }
      auto cfg = settings().get();
      if (version != cfg->version) { version = cfg->version; random.seed(cfg->seed * 1000003 + id); }
      if (cfg->delay > 0 && t.kind != "wait")
        std::this_thread::sleep_for(seconds(std::uniform_real_distribution<double>(0, cfg->delay)(random)));
      auto start = Clock::now();
      try { t.run(); }
      catch (const c10::Error& e) { failure().note(c10::str(t.name, " on stream ", id, ": ", e.what_without_backtrace())); }
      catch (const std::exception& e) { failure().note(c10::str(t.name, " on stream ", id, ": ", e.what())); }
      if (!t.kind.empty()) timeline().add(t.name, t.kind, id, start, Clock::now(), t.bytes);
      t.run = nullptr;  // before the task counts as done: nothing of it may be left then
      { std::lock_guard<std::mutex> l(m); finished++; }
      progress.notify_all();
    }
  }
};

struct Streams {
  std::mutex m;
  std::array<Stream*, kMaxStreams> all{};
  int next = 0;
  Stream& get(int id) {
    std::lock_guard<std::mutex> l(m);
    if (!all[id]) all[id] = new Stream(id);
    return *all[id];
  }
  int from_pool() { std::lock_guard<std::mutex> l(m); return 1 + next++ % (kMaxStreams - 1); }
  std::vector<Stream*> started() {
    std::lock_guard<std::mutex> l(m);
    std::vector<Stream*> out;
    for (auto s : all) if (s) out.push_back(s);
    return out;
  }
};
SIMDEV_GLOBAL(Streams, streams)

inline int& current() { thread_local int id = 0; return id; }

struct Use { Range at; bool write; bool hashed = false; Range guarded = {}; };

// Puts a task into the queue of a stream and tells the checker what it will touch. The number of the task.
inline uint64_t issue(int stream, Task t, const std::vector<Use>& uses) {
  check_alive();
  std::lock_guard<std::mutex> l(world());
  checker().tick(stream);
  for (auto& u : uses) checker().access(stream, u.at, u.write, t.name, u.hashed, u.guarded);
  auto& s = streams().get(stream);
  s.push(std::move(t));
  return s.mark();
}

// The host waits for all that has been issued on a stream.
inline void synchronize(int stream, const std::string& why) {
  check_alive();
  count_sync(why);
  auto& s = streams().get(stream);
  Clocks c;
  uint64_t n;
  { std::lock_guard<std::mutex> l(world()); c = checker().streams[stream]; n = s.mark(); }
  auto start = Clock::now();
  { WithoutGil g; s.wait(n); }
  timeline().add(why, "sync", -1, start, Clock::now());
  { std::lock_guard<std::mutex> l(world()); checker().host_learns(c); }
  report_failure();
}

inline void synchronize_all(const std::string& why) {
  check_alive();
  count_sync(why);
  std::vector<std::pair<Stream*, uint64_t>> marks;
  Clocks c;
  {
    std::lock_guard<std::mutex> l(world());
    for (auto s : streams().started()) { marks.emplace_back(s, s->mark()); c.learn(checker().streams[s->id]); }
  }
  auto start = Clock::now();
  { WithoutGil g; for (auto& [s, n] : marks) s->wait(n); }
  timeline().add(why, "sync", -1, start, Clock::now());
  { std::lock_guard<std::mutex> l(world()); checker().host_learns(c); }
  report_failure();
}

struct Moment {  // what an event stands for, from one record() on
  std::mutex m;
  std::condition_variable cv;
  bool done = false;
  Time time;
  Clocks clocks;
  void wait() { std::unique_lock<std::mutex> l(m); cv.wait(l, [&] { return done; }); }
  bool reached() { std::lock_guard<std::mutex> l(m); return done; }
};
struct Event { std::shared_ptr<Moment> moment; };

inline std::shared_ptr<Moment> record(int stream) {
  check_alive();
  auto e = std::make_shared<Moment>();
  std::lock_guard<std::mutex> l(world());
  checker().tick(stream);
  e->clocks = checker().streams[stream];
  streams().get(stream).push({"record", "", 0, [e] {
    { std::lock_guard<std::mutex> l(e->m); e->time = Clock::now(); e->done = true; }
    e->cv.notify_all();
  }});
  return e;
}

inline void wait_for(int stream, std::shared_ptr<Moment> e) {
  check_alive();
  std::lock_guard<std::mutex> l(world());
  checker().tick(stream);
  checker().streams[stream].learn(e->clocks);
  streams().get(stream).push({"wait for event", "wait", 0, [e] { e->wait(); }});
}

inline bool query(Moment& e) {
  check_alive();
  counters().add("query");
  if (!e.reached()) return false;
  std::lock_guard<std::mutex> l(world());
  checker().host_learns(e.clocks);
  return true;
}

inline void synchronize(Moment& e) {
  check_alive();
  count_sync("event");
  auto start = Clock::now();
  { WithoutGil g; e.wait(); }
  timeline().add("event", "sync", -1, start, Clock::now());
  { std::lock_guard<std::mutex> l(world()); checker().host_learns(e.clocks); }
  report_failure();
}

}  // namespace simdev
