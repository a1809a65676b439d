// Device memory with the rules of CUDA's caching allocator, and pinned host memory. Both are cut from arenas.
#pragma once
#include <c10/core/CachingDeviceAllocator.h>
#include <fcntl.h>
#include <signal.h>
#include <ucontext.h>

#include <list>

#include "streams.h"

namespace simdev {

constexpr size_t kPage = 4096;
constexpr int kNobody = -1;  // a free block that any stream may have

using Marks = std::vector<std::pair<int, uint64_t>>;  // stream, number of a task
inline bool reached(const Marks& marks) {
  return std::all_of(marks.begin(), marks.end(), [](auto& m) { return streams().get(m.first).reached(m.second); });
}

struct Block {
  size_t size, wanted;        // as rounded, as asked for
  bool taken;
  int stream;                 // that allocated it
  std::set<int> recorded;     // record_stream
  Marks uses;                 // tasks that may still be under way: copies of pinned memory; of device memory, when it is free
};

// Cuts an arena into blocks. Free blocks of one stream lie cached for that stream alone; merged ones belong to nobody.
struct Blocks {
  Arena& arena;
  std::map<size_t, Block> at;  // offset -> block; they cover the arena
  std::list<std::pair<size_t, Marks>> leaving;  // freed, but other streams may still use them

  explicit Blocks(Arena& a) : arena(a) { at[0] = {a.size, 0, false, kNobody, {}, {}}; }

  Block* find(const void* p) {
    auto it = at.upper_bound((const char*)p - arena.host);
    return &std::prev(it)->second;
  }
  Range range(size_t off, size_t n) const { return {arena.host + off, arena.host + off + n}; }

  size_t take(size_t size, size_t wanted, int stream, int from) {  // SIZE_MAX: no free block of `from` is large enough
    auto best = at.end();
    for (auto it = at.begin(); it != at.end(); ++it)
      if (!it->second.taken && it->second.stream == from && it->second.size >= size
          && (best == at.end() || it->second.size < best->second.size)) best = it;
    if (best == at.end()) return SIZE_MAX;
    size_t off = best->first, rest = best->second.size - size;
    auto uses = best->second.uses;
    best->second = {size, wanted, true, stream, {}, {}};
    if (rest) at[off + size] = {rest, 0, false, from, {}, uses};
    return off;
  }

  void give(size_t off, int to, Marks uses = {}) {  // as a free block of stream `to`
    auto it = at.find(off);
    it->second = {it->second.size, 0, false, to, {}, std::move(uses)};
    if (to == kNobody && it->second.size >= 16 * kPage)
      fallocate(arena.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, off, it->second.size);
    auto join = [&](std::map<size_t, Block>::iterator a, std::map<size_t, Block>::iterator b) {
      if (a->second.taken || b->second.taken || a->second.stream != b->second.stream) return;
      a->second.size += b->second.size;
      if (!b->second.uses.empty() && (a->second.uses.empty() || a->second.uses[0].second < b->second.uses[0].second))
        a->second.uses = b->second.uses;
      at.erase(b);
    };
    if (std::next(it) != at.end()) join(it, std::next(it));
    if (it != at.begin()) join(std::prev(it), it);
  }

  template <class F> void reap(F&& release) {  // blocks whose last users are through
    for (auto it = leaving.begin(); it != leaving.end();)
      if (reached(it->second)) { release(it->first); it = leaving.erase(it); } else ++it;
  }
};

inline size_t round_up(size_t n, size_t to) { return (std::max<size_t>(n, 1) + to - 1) / to * to; }

struct DeviceMemory final : c10::DeviceAllocator {
  std::unique_ptr<Blocks> blocks;
  size_t allocated = 0, peak = 0, reserved = 0, peak_reserved = 0, refused = 0;

  static void deleter(void* p);
  c10::DeleterFnPtr raw_deleter() const override { return &deleter; }

  size_t find_room(size_t size, size_t wanted, int stream) {  // under world()
    reap();
    size_t off = blocks->take(size, wanted, stream, stream);
    if (off != SIZE_MAX || reserved + size > settings().get()->capacity) return off;
    off = blocks->take(size, wanted, stream, kNobody);
    if (off != SIZE_MAX) { reserved += size; peak_reserved = std::max(peak_reserved, reserved); }
    return off;
  }

  c10::DataPtr allocate(size_t wanted) override {
    check_alive();
    auto device = c10::Device(kDevice, 0);
    if (!wanted) return {nullptr, nullptr, &deleter, device};
    size_t size = round_up(wanted, 512), off;
    { std::lock_guard<std::mutex> l(world()); off = find_room(size, wanted, current()); }
    if (off == SIZE_MAX) {  // give back what lies cached, and try again
      synchronize_all("memory");
      std::lock_guard<std::mutex> l(world());
      give_back();
      off = find_room(size, wanted, current());
      if (off == SIZE_MAX) {
        refused++;
        TORCH_CHECK_WITH(OutOfMemoryError, false, "simdev: out of memory: tried to allocate ", size, " bytes; ", allocated,
                         " of ", settings().get()->capacity, " are taken");
      }
    }
    std::lock_guard<std::mutex> l(world());
    peak = std::max(peak, allocated += size);
    void* p = blocks->arena.host + off;
    return {p, p, &deleter, device};
  }

  void release(void* p) {
    if (life() == Life::forked) return;
    std::lock_guard<std::mutex> l(world());
    size_t off = (char*)p - blocks->arena.host;
    Block& b = blocks->at.at(off);
    checker().freed(blocks->range(off, b.size), b.stream, b.recorded);
    allocated -= b.size;
    auto last = [](int s) { return std::make_pair(s, streams().get(s).mark()); };
    if (b.recorded.empty()) { blocks->give(off, b.stream, {last(b.stream)}); return; }
    Marks marks;
    for (int s : b.recorded) marks.push_back(last(s));
    blocks->leaving.emplace_back(off, std::move(marks));
  }

  void reap() {
    blocks->reap([&](size_t off) { int s = blocks->at[off].stream; blocks->give(off, s, {{s, streams().get(s).mark()}}); });
  }

  void give_back() {  // cached blocks that are at rest, to nobody
    reap();
    std::vector<size_t> cached;
    for (auto& [off, b] : blocks->at)
      if (!b.taken && b.stream != kNobody && reached(b.uses)) { cached.push_back(off); reserved -= b.size; }
    for (auto off : cached) blocks->give(off, kNobody);
  }

  void recordStream(const c10::DataPtr& p, c10::Stream s) override {
    if (!p.get()) return;
    std::lock_guard<std::mutex> l(world());
    Block* b = blocks->find(p.get());
    if (b->stream != (int)s.id()) b->recorded.insert(s.id());
  }

  bool initialized() override { return blocks != nullptr; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    synchronize_all("memory");
    std::lock_guard<std::mutex> l(world());
    give_back();
  }
  void copy_data(void* to, const void* from, size_t n) const override {
    synchronize_all("memory");
    memcpy(arenas().dev.to_device(to), arenas().dev.to_device(from), n);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> l(world());
    c10::CachingDeviceAllocator::DeviceStats d;
    auto all = (size_t)c10::CachingAllocator::StatType::AGGREGATE;
    for (auto* a : {&d.allocated_bytes, &d.active_bytes}) { (*a)[all].current = allocated; (*a)[all].peak = peak; }
    d.reserved_bytes[all].current = reserved;
    d.reserved_bytes[all].peak = peak_reserved;
    d.num_ooms = refused;
    return d;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override { refused = 0; }
  void resetPeakStats(c10::DeviceIndex) override {
    std::lock_guard<std::mutex> l(world());
    peak = allocated;
    peak_reserved = reserved;
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) {  // overrides nothing in older versions of torch
    std::lock_guard<std::mutex> l(world());
    size_t total = settings().get()->capacity;
    return {total - std::min(total, reserved), total};
  }
};
SIMDEV_GLOBAL(DeviceMemory, device_memory)
inline void DeviceMemory::deleter(void* p) { if (p) device_memory().release(p); }

// Pinned host memory: sizes are rounded up to powers of two, as in CUDA; what is freed stays out of use while copies need it.
struct PinnedMemory final : c10::Allocator {
  std::unique_ptr<Blocks> blocks;
  std::map<const char*, size_t> registered;  // memory of others that was pinned with host_register
  size_t reserved = 0;

  static void deleter(void* p);
  c10::DeleterFnPtr raw_deleter() const override { return &deleter; }
  void copy_data(void* to, const void* from, size_t n) const override { memcpy(to, from, n); }

  void give(size_t off) { reserved -= blocks->at[off].size; blocks->give(off, kNobody); }

  c10::DataPtr allocate(size_t wanted) override {
    check_alive();
    if (!wanted) return {nullptr, nullptr, &deleter, c10::Device(c10::kCPU)};
    size_t size = kPage;
    while (size < wanted) size *= 2;
    std::lock_guard<std::mutex> l(world());
    blocks->reap([&](size_t off) { give(off); });
    size_t limit = settings().get()->pinned_capacity;
    size_t off = reserved + size > limit ? SIZE_MAX : blocks->take(size, wanted, kNobody, kNobody);
    TORCH_CHECK(off != SIZE_MAX, "simdev: cannot pin ", size, " bytes (", wanted, " rounded up): ", reserved, " of ", limit,
                " are pinned");
    reserved += size;
    void* p = blocks->arena.host + off;
    return {p, p, &deleter, c10::Device(c10::kCPU)};
  }

  void release(void* p) {
    if (life() == Life::forked) return;
    std::lock_guard<std::mutex> l(world());
    size_t off = (char*)p - blocks->arena.host;
    Block& b = blocks->at.at(off);
    checker().freed(blocks->range(off, b.size), kNobody, {});
    if (reached(b.uses)) give(off); else blocks->leaving.emplace_back(off, std::move(b.uses));
  }

  bool has(const void* p) {
    std::lock_guard<std::mutex> l(world());
    if (blocks && blocks->arena.has(p)) return blocks->find(p)->taken;
    auto it = registered.upper_bound((const char*)p);
    return it != registered.begin() && (const char*)p < std::prev(it)->first + std::prev(it)->second;
  }

  // The whole pages in which a range is all that is allocated: those can be guarded without hurting anybody else.
  Range guardable(Range r) {
    if (!blocks->arena.has(r.lo)) return {};
    auto it = std::prev(blocks->at.upper_bound(r.lo - blocks->arena.host));
    Range block = blocks->range(it->first, it->second.wanted);
    auto page = [&](const char* p) { return blocks->arena.host + (p - blocks->arena.host) / kPage * kPage; };
    Range g{r.lo == block.lo ? r.lo : page(r.lo + kPage - 1), r.hi == block.hi ? page(r.hi + kPage - 1) : page(r.hi)};
    return g.lo < g.hi ? g : Range{};
  }

  void used(const void* p, int stream, uint64_t task) {
    std::lock_guard<std::mutex> l(world());
    if (!blocks->arena.has(p)) return;
    auto& uses = blocks->find(p)->uses;
    uses.erase(std::remove_if(uses.begin(), uses.end(), [&](auto& u) { return u.first == stream; }), uses.end());
    uses.emplace_back(stream, task);
  }
};
SIMDEV_GLOBAL(PinnedMemory, pinned_memory)
inline void PinnedMemory::deleter(void* p) { if (p) pinned_memory().release(p); }

// The host touched what it may not: device memory is fatal; a pinned buffer that a copy still writes is a hazard.
inline struct sigaction& previous_handler() { static struct sigaction it; return it; }

inline void on_fault(int, siginfo_t* info, void* context) {
  auto p = (const char*)info->si_addr;
  auto& a = arenas();
  if (a.pinned.has(p) && life() == Life::running) {
#if defined(__x86_64__)
    bool write = ((ucontext_t*)context)->uc_mcontext.gregs[REG_ERR] & 2;
#else
    bool write = !context;  // which of the two it was is not told in the same way everywhere
#endif
    std::lock_guard<std::mutex> l(world());
    checker().touched(p, write);
    mprotect((void*)((uintptr_t)p / kPage * kPage), kPage, PROT_READ | PROT_WRITE);
    return;
  }
  if (a.dev.has(p)) {
    char text[160];
    int n = snprintf(text, sizeof text, "simdev: the host touched device memory (offset %zu): copy it with .cpu() first\n",
                     (size_t)(p - a.dev.host));
    (void)!write(2, text, n);
  }
  sigaction(SIGSEGV, &previous_handler(), nullptr);  // the instruction is tried again, and goes the usual way
  if (info->si_code <= 0) raise(SIGSEGV);            // no instruction, somebody sent the signal
}

inline void start(size_t arena_bytes) {
  if (life() != Life::none) return;
  arenas().dev.map(arena_bytes, PROT_NONE);
  arenas().pinned.map(arena_bytes, PROT_READ | PROT_WRITE);
  device_memory().blocks = std::make_unique<Blocks>(arenas().dev);
  pinned_memory().blocks = std::make_unique<Blocks>(arenas().pinned);
  struct sigaction act {};
  act.sa_sigaction = on_fault;
  act.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGSEGV, &act, &previous_handler());
  main_thread() = std::this_thread::get_id();
  pthread_atfork(nullptr, nullptr, [] { if (life() == Life::running) life() = Life::forked; });
  life() = Life::running;
}

// Lets the streams finish, and ends their threads.
inline void shut_down() {
  auto was = Life::running;
  if (!life().compare_exchange_strong(was, Life::closed)) return;
  WithoutGil g;
  for (auto s : streams().started()) {
    { std::lock_guard<std::mutex> l(s->m); s->stop = true; }
    s->more.notify_all();
  }
  for (auto s : streams().started()) s->thread.join();
  auto text = failure().take();
  if (!text.empty()) fprintf(stderr, "simdev: asynchronous error that nobody waited for: %s\n", text.c_str());
}

}  // namespace simdev
