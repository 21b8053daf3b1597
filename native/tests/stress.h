// How much the tests of stress do: ENGRAM_STRESS is small (the default, seconds each), night or release.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

namespace stress {

enum class Size { small, night, release };

inline Size size() {
  const char* name = std::getenv("ENGRAM_STRESS");
  const std::string text = name == nullptr || *name == '\0' ? "small" : name;
  if (text == "small") return Size::small;
  if (text == "night") return Size::night;
  if (text == "release") return Size::release;
  std::fprintf(stderr, "ENGRAM_STRESS: expected small, night or release, got %s\n", text.c_str());
  std::exit(2);
}

template <class T>
T pick(T small, T night, T release) {
  switch (size()) {
    case Size::small: return small;
    case Size::night: return night;
    case Size::release: return release;
  }
  std::abort();
}

/// 1234567 as 1,234,567: what a test counts is quoted.
inline std::string count(std::uint64_t n) {
  std::string text = std::to_string(n);
  for (std::size_t at = text.size(); at > 3; at -= 3) text.insert(at - 3, ",");
  return text;
}

}  // namespace stress
