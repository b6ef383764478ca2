// Work shared out among threads so that each walks through neighbours.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace eagle {

// The numbers from 0 to `size`. The first worker has them all; one that has none takes the upper half of what another
// still has. So threads that come late or are put aside get less, each reads memory in order, and a worker seldom
// touches what another one writes, which would cost as much as some kilobytes of memory.
class SharedRange {
 public:
  static constexpr size_t kMaxWorkers = 64;

  SharedRange(size_t workers, uint32_t size) : workers_(workers) {
    for (size_t worker = 0; worker < workers; ++worker) shares_[worker].span.store(span(0, worker == 0 ? size : 0));
  }

  // The worker's next number; false when all are taken.
  bool take(size_t worker, uint32_t* number) {
    std::atomic<uint64_t>& own = shares_[worker].span;
    do {
      uint64_t seen = own.load();
      while (begin(seen) < end(seen)) {
        *number = begin(seen);
        if (own.compare_exchange_weak(seen, span(*number + 1, end(seen)))) return true;
      }
    } while (take_half(worker));
    return false;
  }

 private:
  struct alignas(64) Share {  // a cache line
    std::atomic<uint64_t> span;
  };

  static uint64_t span(uint32_t begin, uint32_t end) { return uint64_t{end} << 32 | begin; }
  static uint32_t begin(uint64_t span) { return static_cast<uint32_t>(span); }
  static uint32_t end(uint64_t span) { return static_cast<uint32_t>(span >> 32); }

  bool take_half(size_t worker) {
    for (size_t other = 0; other < workers_; ++other) {
      uint64_t seen = shares_[other].span.load();
      while (begin(seen) < end(seen)) {
        const uint32_t middle = begin(seen) + (end(seen) - begin(seen)) / 2;
        if (shares_[other].span.compare_exchange_weak(seen, span(begin(seen), middle))) {
          shares_[worker].span.store(span(middle, end(seen)));
          return true;
        }
      }
    }
    return false;
  }

  const size_t workers_;
  Share shares_[kMaxWorkers];
};

}  // namespace eagle
