// The tables of kernels that this library has, and which of them this machine can run.

#include <cstring>

#include "thinwire.h"

namespace {

struct Choice {
  const char *name;
  const thinwire_kernels *kernels;
  bool (*available)();
};

}  // namespace

extern const thinwire_kernels thinwire_kernels_plain;
#if defined(THINWIRE_HAS_AVX2)
extern const thinwire_kernels thinwire_kernels_avx2;
#endif
#if defined(THINWIRE_HAS_AVX512)
extern const thinwire_kernels thinwire_kernels_avx512;
#endif

namespace {

bool always() { return true; }

#if defined(THINWIRE_HAS_AVX2) || defined(THINWIRE_HAS_AVX512)
// What CMakeLists.txt lets the compiler use.
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
         __builtin_cpu_supports("fma") && __builtin_cpu_supports("popcnt");
}
#endif
#if defined(THINWIRE_HAS_AVX512)
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512cd") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

// Best first. On arm64 the base instruction set has NEON, so the plain build is the NEON build.
const Choice kChoices[] = {
#if defined(THINWIRE_HAS_AVX512)
    {"avx512", &thinwire_kernels_avx512, has_avx512},
#endif
#if defined(THINWIRE_HAS_AVX2)
    {"avx2", &thinwire_kernels_avx2, has_avx2},
#endif
#if defined(__aarch64__)
    {"neon", &thinwire_kernels_plain, always},
#else
    {"plain", &thinwire_kernels_plain, always},
#endif
};

const Choice *best() {
  for (const Choice &choice : kChoices)
    if (choice.available()) return &choice;
  return &kChoices[sizeof kChoices / sizeof kChoices[0] - 1];
}

}  // namespace

extern "C" {

const thinwire_kernels *thinwire_kernels_for(const char *isa) {
  for (const Choice &choice : kChoices)
    if (!std::strcmp(choice.name, isa) && choice.available()) return choice.kernels;
  return nullptr;
}

const char *thinwire_best_isa(void) { return best()->name; }

const char *thinwire_declarations(void) {
#define THINWIRE_KERNEL(result, name, parameters, ...) #result " " #name " " #parameters "\n"
  return
#include "kernels.def"
      ;
#undef THINWIRE_KERNEL
}

}  // extern "C"
