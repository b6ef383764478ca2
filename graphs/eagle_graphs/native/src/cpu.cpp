#include "cpu.h"

#include <cstdlib>
#include <string>

#include "error.h"

namespace eagle {
namespace {

constexpr const char* kNames[] = {"portable", "avx2", "avx512"};

Isa best_isa() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni")) {
    return Isa::kAvx512;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return Isa::kAvx2;
#endif
  return Isa::kPortable;
}

}  // namespace

Isa isa_from_environment() {
  const Isa best = best_isa();
  const char* wanted = std::getenv("EAGLE_CPU_ISA");
  if (wanted == nullptr || *wanted == '\0') return best;
  for (int isa = 0; isa <= static_cast<int>(best); ++isa) {
    if (kNames[isa] == std::string(wanted)) return static_cast<Isa>(isa);
  }
  std::string names = kNames[0];
  for (int isa = 1; isa <= static_cast<int>(best); ++isa) names += std::string(", ") + kNames[isa];
  throw Error("EAGLE_CPU_ISA is '", wanted, "', but this CPU offers ", names, ": name one of them or unset it");
}

}  // namespace eagle
