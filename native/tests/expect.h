// The smallest test framework that will do: a table of functions, macros that print what they saw, and main().
//
//   TEST(adds) { EXPECT_EQ(1 + 1, 2); }
//
// A test file is a program of its own; its argument picks tests by a part of their name.
#pragma once

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <exception>
#include <sstream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace expect {

struct Test {
  const char* name;
  void (*run)();
};

inline std::vector<Test>& tests() {
  static std::vector<Test> table;
  return table;
}

struct Register {
  Register(const char* name, void (*run)()) { tests().push_back({name, run}); }
};

inline std::atomic<int> failures{0};

// What tests call in many places is not inlined: sanitizers would instrument each, and compilers take most of the time of the tests.
#define EXPECT_OUT_OF_LINE [[gnu::noinline, gnu::cold]]

EXPECT_OUT_OF_LINE inline void fail(const char* file, int line, const std::string& what) {
  constexpr int kPrinted = 20;
  const int before = failures.fetch_add(1);
  if (before < kPrinted) std::fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
  if (before == kPrinted) std::fprintf(stderr, "... and more\n");
}

EXPECT_OUT_OF_LINE inline void not_true(const char* file, int line, const char* what) {
  fail(file, line, std::string("not true: ") + what);
}

template <class T>
EXPECT_OUT_OF_LINE std::string show(const T& value) {
  if constexpr (std::is_enum_v<T>) {
    return std::to_string(static_cast<long long>(value));
  } else if constexpr (requires(std::ostream& out) { out << value; }) {
    std::ostringstream out;
    out << value;
    return out.str();
  } else if constexpr (requires { value.begin(); }) {
    std::string text = "[";
    std::size_t shown = 0;
    for (const auto& item : value) {
      if (shown++ == 32) {
        text += " ...";
        break;
      }
      text += (shown == 1 ? "" : ", ") + show(item);
    }
    return text + "]";
  } else {
    return "?";
  }
}

template <class T>
constexpr bool is_number = std::is_integral_v<T> && !std::is_same_v<T, bool>;

template <class A, class B>
bool equal(const A& a, const B& b) {
  if constexpr (is_number<A> && is_number<B>) {
    return std::cmp_equal(a, b);
  } else {
    return a == b;
  }
}

template <class A, class B>
EXPECT_OUT_OF_LINE void expect_eq(const char* file, int line, const char* text_a, const A& a, const char* text_b, const B& b) {
  if (!equal(a, b)) {
    fail(file, line, std::string(text_a) + " is " + show(a) + ", but " + text_b + " is " + show(b));
  }
}

/// How many standard deviations the chi-square statistic of equally likely counts lies from its expectation (Wilson
/// and Hilferty's approximation). Far below zero is as suspicious as far above.
inline double chi_square(const std::vector<std::uint64_t>& counts) {
  double total = 0, statistic = 0;
  for (const std::uint64_t count : counts) total += static_cast<double>(count);
  const double expected = total / static_cast<double>(counts.size());
  for (const std::uint64_t count : counts) statistic += std::pow(static_cast<double>(count) - expected, 2) / expected;
  const double freedom = static_cast<double>(counts.size()) - 1, spread = 2 / (9 * freedom);
  return (std::cbrt(statistic / freedom) - (1 - spread)) / std::sqrt(spread);
}

inline void expect_uniform(const char* file, int line, const char* text, const std::vector<std::uint64_t>& counts) {
  const double z = chi_square(counts);
  if (!(std::abs(z) < 5)) fail(file, line, std::string(text) + " is not uniform: z = " + show(z) + ", " + show(counts));
}

}  // namespace expect

#define TEST(name)                                             \
  static void name();                                          \
  static const expect::Register register_##name(#name, name); \
  static void name()

#define EXPECT(condition) \
  ((condition) ? void() : expect::not_true(__FILE__, __LINE__, #condition))

#define EXPECT_EQ(a, b) expect::expect_eq(__FILE__, __LINE__, #a, a, #b, b)

#define EXPECT_UNIFORM(counts) expect::expect_uniform(__FILE__, __LINE__, #counts, counts)

#define EXPECT_THROWS(Type, ...)                                                               \
  do {                                                                                         \
    try {                                                                                      \
      __VA_ARGS__;                                                                             \
      expect::fail(__FILE__, __LINE__, "did not throw " #Type ": " #__VA_ARGS__);              \
    } catch (const Type&) {                                                                    \
    } catch (const std::exception& e) {                                                        \
      expect::fail(__FILE__, __LINE__, std::string("threw another error than " #Type ": ") + e.what()); \
    }                                                                                          \
  } while (false)

int main(int argc, char** argv) {
  for (const expect::Test& test : expect::tests()) {
    if (argc > 1 && std::string(test.name).find(argv[1]) == std::string::npos) continue;
    const int before = expect::failures;
    const auto start = std::chrono::steady_clock::now();
    try {
      test.run();
    } catch (const std::exception& e) {
      expect::fail(test.name, 0, std::string("ended with an exception: ") + e.what());
    }
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    std::printf("    %s %s (%.2f s)\n", expect::failures == before ? "ok    " : "FAILED", test.name, took.count());
    std::fflush(stdout);
  }
  return expect::failures == 0 ? 0 : 1;
}
