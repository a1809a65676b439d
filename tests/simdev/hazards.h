// Which accesses to memory are ordered? Vector clocks, kept when work is issued: what they say does not depend on timing.
//
// Stream s has a clock: entry t says up to which task of stream t everything is known to be done before whatever s does next.
// An event carries the clock of the stream at the time of recording; a stream that waits for it takes the maximum. So does the
// host, which has one clock for all its threads, when it synchronises; every stream then knows what the host knows, since work
// issued later starts later. Two accesses to the same bytes, at least one of them a write, must be ordered.
#pragma once
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <set>

#include "core.h"

namespace simdev {

constexpr int kMaxStreams = 33;  // the default stream and a pool of 32, as with CUDA

struct Clocks : std::array<uint64_t, kMaxStreams> {
  Clocks() { fill(0); }
  void learn(const Clocks& other) { for (int i = 0; i < kMaxStreams; i++) at(i) = std::max(at(i), other[i]); }
};

// Memory that the host sees at one address and the workers at another.
struct Arena {
  char *host = nullptr, *device = nullptr;
  size_t size = 0;
  int fd = -1;
  void map(size_t n, int host_protection) {
    fd = memfd_create("simdev", 0);
    TORCH_CHECK(fd >= 0 && !ftruncate(fd, n), "simdev: no memory file of ", n, " bytes: ", strerror(errno));
    host = (char*)mmap(nullptr, n, host_protection, MAP_SHARED | MAP_NORESERVE, fd, 0);
    device = (char*)mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    TORCH_CHECK(host != MAP_FAILED && device != MAP_FAILED, "simdev: cannot map ", n, " bytes: ", strerror(errno));
    size = n;
  }
  bool has(const void* p) const { return host && (const char*)p >= host && (const char*)p < host + size; }
  char* to_device(const void* p) const { return device + ((const char*)p - host); }
};
struct Arenas { Arena dev, pinned; };
SIMDEV_GLOBAL(Arenas, arenas)

struct Range { const char *lo = nullptr, *hi = nullptr; };  // host addresses; hi is outside

inline std::string describe(Range r) {
  auto& a = arenas();
  if (a.dev.has(r.lo)) return c10::str("device[", r.lo - a.dev.host, ":", r.hi - a.dev.host, "]");
  if (a.pinned.has(r.lo)) return c10::str("pinned[", r.lo - a.pinned.host, ":", r.hi - a.pinned.host, "]");
  return c10::str("registered[", (const void*)r.lo, "+", r.hi - r.lo, "]");
}

struct Hazard { std::string kind, first, second; int first_stream, second_stream; std::string range; };  // stream -1: the host

struct Access {
  Range at;
  int stream;
  uint64_t tick;
  bool write;
  std::string op;
  bool hashed = false;     // a copy reads pinned memory: its content must stay until the host knows that the copy is done
  uint64_t hash = 0;
  Range guarded;           // a copy writes pinned memory: pages that the host may not touch until it knows
};

inline uint64_t hash_of(Range r) {
  const char* p = arenas().pinned.has(r.lo) ? arenas().pinned.to_device(r.lo) : r.lo;
  size_t n = r.hi - r.lo, i = 0;
  uint64_t h = n;
  for (; i + 8 <= n; i += 8) { uint64_t w; memcpy(&w, p + i, 8); h = (h ^ w) * 0x9E3779B97F4A7C15ull; h ^= h >> 29; }
  for (; i < n; i++) h = (h ^ (unsigned char)p[i]) * 0x9E3779B97F4A7C15ull;
  return h;
}

struct Checker {  // everything here under world()
  std::array<Clocks, kMaxStreams> streams;
  Clocks host;
  std::vector<Access> open;  // accesses of which the host does not know yet that they are over
  std::vector<Hazard> found;
  std::set<std::string> seen;

  void tick(int s) { streams[s].learn(host); streams[s][s]++; }

  void report(std::string kind, const std::string& op1, int s1, const std::string& op2, int s2, Range r) {
    if (found.size() < 1000 && seen.insert(c10::str(kind, op1, s1, op2, s2)).second)
      found.push_back({std::move(kind), op1, op2, s1, s2, describe(r)});
  }

  bool ordered(const Access& a, int s) const { return std::max(streams[s][a.stream], host[a.stream]) >= a.tick; }

  // Stream `s`, after tick(s), reads or writes a range.
  void access(int s, Range r, bool write, const std::string& op, bool hashed = false, Range guarded = {}) {
    if (r.lo == r.hi) return;
    for (auto it = open.begin(); it != open.end();) {
      auto& a = *it;
      bool overlap = a.at.lo < r.hi && r.lo < a.at.hi;
      if (overlap) verify(a);
      if (overlap && write) a.hashed = false;     // changes by a later copy are none of the host's doing
      if (overlap && a.write) hashed = false;     // nor is what an earlier one still brings
      if (overlap && (write || a.write) && !ordered(a, s))
        report(!a.write ? "overwritten while read" : write ? "written twice" : "read before ready", a.op, a.stream, op, s,
               {std::max(a.at.lo, r.lo), std::min(a.at.hi, r.hi)});
      bool covered = a.stream == s && a.at.lo >= r.lo && a.at.hi <= r.hi && (write || !a.write) && (!a.guarded.lo || guarded.lo);
      it = covered ? drop(it) : it + 1;  // the new record says all that this one says
    }
    open.push_back({r, s, streams[s][s], write, op, hashed, hashed ? hash_of(r) : 0, guarded});
    if (guarded.lo) mprotect((void*)guarded.lo, guarded.hi - guarded.lo, PROT_NONE);
  }

  // Has the host written to what a copy of its still has to read?
  void verify(Access& a) {
    if (!a.hashed || hash_of(a.at) == a.hash) return;
    report("staging reused", a.op, a.stream, "host write", -1, a.at);
    a.hashed = false;
  }

  std::vector<Access>::iterator drop(std::vector<Access>::iterator it) {
    Range g = it->guarded;
    it = open.erase(it);
    if (g.lo && std::none_of(open.begin(), open.end(), [&](auto& a) { return a.guarded.lo < g.hi && g.lo < a.guarded.hi; }))
      mprotect((void*)g.lo, g.hi - g.lo, PROT_READ | PROT_WRITE);
    return it;
  }

  void host_learns(const Clocks& c) {
    host.learn(c);
    for (auto it = open.begin(); it != open.end();) {
      if (host[it->stream] < it->tick) { ++it; continue; }
      verify(*it);
      it = drop(it);
    }
  }

  // A block of memory is freed; `owner` may use it again when the streams told by record_stream (`recorded`) have come as far
  // as they are now, which includes what those had to wait for.
  void freed(Range r, int owner, const std::set<int>& recorded) {
    for (auto it = open.begin(); it != open.end();) {
      auto& a = *it;
      if (!(a.at.lo < r.hi && r.lo < a.at.hi)) { ++it; continue; }
      verify(a);
      bool covered = ordered(a, owner) || std::any_of(recorded.begin(), recorded.end(), [&](int s) { return ordered(a, s); });
      if (owner >= 0 && !covered)
        report("missing record_stream", a.op, a.stream, "free", owner, a.at);
      it = drop(it);
    }
  }

  // The host touched a guarded page (signal handler).
  void touched(const char* p, bool write) {
    for (auto& a : open) {
      if (!(a.guarded.lo <= p && p < a.guarded.hi)) continue;
      report("host too early", a.op, a.stream, write ? "host write" : "host read", -1, a.at);
      mprotect((void*)a.guarded.lo, a.guarded.hi - a.guarded.lo, PROT_READ | PROT_WRITE);
      a.guarded = {};
    }
  }
};
SIMDEV_GLOBAL(Checker, checker)

}  // namespace simdev
