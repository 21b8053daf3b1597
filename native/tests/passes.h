// A pass in memory that children share.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <span>

#include "core/pass.h"

class PassRoom {
 public:
  PassRoom() : at_(mmap(nullptr, engram::RowPass::kBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) {
    engram::RowPass::format(bytes());
  }
  ~PassRoom() { munmap(at_, engram::RowPass::kBytes); }
  PassRoom(const PassRoom&) = delete;
  PassRoom& operator=(const PassRoom&) = delete;
  std::span<std::byte> bytes() { return {static_cast<std::byte*>(at_), engram::RowPass::kBytes}; }

 private:
  void* at_;
};

inline bool same(const engram::Walk& a, const engram::Walk& b) {
  return a.key == b.key && a.rows == b.rows && a.visited == b.visited;
}
