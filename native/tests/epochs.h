// An epoch in memory that children share.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <span>

#include "core/epoch.h"

class SharedEpoch {
 public:
  SharedEpoch() : at_(mmap(nullptr, engram::RowEpoch::kBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) {
    engram::RowEpoch::format(bytes());
  }
  ~SharedEpoch() { munmap(at_, engram::RowEpoch::kBytes); }
  SharedEpoch(const SharedEpoch&) = delete;
  SharedEpoch& operator=(const SharedEpoch&) = delete;
  std::span<std::byte> bytes() { return {static_cast<std::byte*>(at_), engram::RowEpoch::kBytes}; }

 private:
  void* at_;
};

inline bool same(const engram::EpochState& a, const engram::EpochState& b) {
  return a.key == b.key && a.rows == b.rows && a.visited == b.visited;
}
