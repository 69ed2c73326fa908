// Conversions and random numbers, one element at a time, written so that compilers vectorise the loops around them.
// Everything here has internal linkage on purpose: each instruction set compiles its own copy, and the linker must
// never hand the AVX-512 copy of an inline function to the plain kernels.
#ifndef THINWIRE_SCALAR_H
#define THINWIRE_SCALAR_H

#include <cstdint>
#include <cstring>

#define THINWIRE_INLINE static inline __attribute__((always_inline))
#define THINWIRE_INLINE_MEMBER inline __attribute__((always_inline))

// Before a loop over the 16 to 64 elements of a block. GCC would take such a loop apart before it looks for vectors, and then
// builds them element by element.
#if defined(__clang__)
#define THINWIRE_KEEP_LOOP
#else
#define THINWIRE_KEEP_LOOP _Pragma("GCC unroll 1")
#endif

namespace {

using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;

THINWIRE_INLINE u32 bits_of(float f) {
  u32 x;
  std::memcpy(&x, &f, 4);
  return x;
}

THINWIRE_INLINE float float_of(u32 x) {
  float f;
  std::memcpy(&f, &x, 4);
  return f;
}

THINWIRE_INLINE float magnitude(float f) { return float_of(bits_of(f) & 0x7FFFFFFFu); }

// `wanted ? a : b`, by masks: where several selects depend on one condition, or one select on another, GCC 12 makes
// branches of them and then does not vectorise the loop, or at twice the time.
THINWIRE_INLINE float pick(bool wanted, float a, float b) {
  const u32 mask = 0u - u32(wanted);
  return float_of((bits_of(a) & mask) | (bits_of(b) & ~mask));
}

// Bit j of a lane's 32, looked up instead of shifted into place: SSE2 cannot shift each element by another amount, and
// compilers would give up on the whole loop.
struct Bits {
  u32 at[32] = {};
  constexpr Bits() {
    for (int j = 0; j < 32; ++j) at[j] = 1u << j;
  }
  constexpr u32 operator[](int j) const { return at[j]; }
};
constexpr Bits kBit;

// +f if bit j is set, -f if it is not. Only where lanes cannot be shifted apart is the bit looked up.
THINWIRE_INLINE float with_sign(u32 bits, int j, float f) {
#if defined(__SSE2__) && !defined(__AVX2__)
  return float_of(bits_of(f) ^ (bits & kBit[j] ? 0u : 0x80000000u));
#else
  return float_of(bits_of(f) ^ ((~bits << (31 - j)) & 0x80000000u));
#endif
}

struct bf16 {
  u16 raw;
};
struct f16 {
  u16 raw;
};

THINWIRE_INLINE float load(const float &v) { return v; }
THINWIRE_INLINE float load(const bf16 &v) { return float_of(u32(v.raw) << 16); }

THINWIRE_INLINE float load(const f16 &v) {
  // Moving the exponent into place and multiplying by 2^112 treats normal and subnormal numbers alike.
  const u32 sign = u32(v.raw & 0x8000u) << 16;
  const u32 rest = u32(v.raw & 0x7FFFu) << 13;
  const u32 finite = bits_of(float_of(rest) * 0x1p112f);
  const u32 special = rest | 0x7F800000u;
  return float_of(sign | (rest >= 0x0F800000u ? special : finite));
}

THINWIRE_INLINE void store(float &to, float f) { to = f; }

THINWIRE_INLINE void store(bf16 &to, float f) {
  const u32 x = bits_of(f);
  const u32 rounded = (x + 0x7FFFu + ((x >> 16) & 1u)) >> 16;
  to.raw = u16((x & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : rounded);
}

THINWIRE_INLINE void store(f16 &to, float f) {
  const u32 x = bits_of(f);
  const u32 sign = (x >> 16) & 0x8000u;
  const u32 a = x & 0x7FFFFFFFu;
  // From 65536 on everything is infinite, and NaN is infinity with one bit more: no third and fourth way to select.
  const u32 c = a < 0x47800000u ? a : 0x47800000u;
  const u32 normal = (c + 0xC8000FFFu + ((c >> 13) & 1u)) >> 13;
  // Adding 1/2 lets the floating-point unit round a subnormal half to its last bit.
  const u32 subnormal = bits_of(float_of(c) + 0.5f) - 0x3F000000u;
  const u32 h = (c < 0x38800000u ? subnormal : normal) | u32(a > 0x7F800000u) << 9;
  to.raw = u16(sign | h);
}

// Stores a number that is not NaN, or leaves what is there. One select only: where a second one (for NaN, as in store)
// depends on the first, GCC 12 makes branches of both and then a mask for every path, at twice the time.
THINWIRE_INLINE void store_if(bool wanted, float &to, float f) { to = wanted ? f : to; }

THINWIRE_INLINE void store_if(bool wanted, bf16 &to, float f) {
  const u32 x = bits_of(f);
  const u32 rounded = (x + 0x7FFFu + ((x >> 16) & 1u)) >> 16;
  to.raw = u16(wanted ? rounded : to.raw);
}

THINWIRE_INLINE bool same(const bf16 &a, const bf16 &b) { return a.raw == b.raw; }
THINWIRE_INLINE bool same(const f16 &a, const f16 &b) { return a.raw == b.raw; }

THINWIRE_INLINE u64 splitmix(u64 z) {
  z += 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

// A 32-bit hash of a counter under a 64-bit key; two of the multipliers are those of Wellons' lowbias32.
THINWIRE_INLINE u32 mix(u32 counter, u32 key_low, u32 key_high) {
  u32 x = counter ^ key_low;
  x ^= x >> 16;
  x *= 0x7FEB352Du;
  x ^= x >> 15;
  x += key_high;
  x *= 0x846CA68Bu;
  x ^= x >> 16;
  x *= 0x9E3779B1u;
  return x ^ (x >> 15);
}

// The two halves of the key under which counters with the same upper 32 bits are hashed.
struct Key {
  u32 low, high;
};

THINWIRE_INLINE Key key_for(u64 key, u64 counter) {
  const u64 k = splitmix(key + (counter >> 32));
  return {u32(k), u32(k >> 32)};
}

// Asks for the elements that a kernel reaches some words after the 64, or so many, at `at`. Processors fetch ahead by themselves,
// but later than kernels need that go through several arrays, and not beyond the end of a page. Nothing happens where there is
// no memory.
template <class Cell>
THINWIRE_INLINE void fetch_ahead(const Cell *at, int64_t n = 64) {
  constexpr uintptr_t kLine = 64, kAhead = 2048;
  const uintptr_t first = reinterpret_cast<uintptr_t>(at) + kAhead;
  for (uintptr_t j = 0; j < uintptr_t(n) * sizeof(Cell); j += kLine) __builtin_prefetch(reinterpret_cast<const void *>(first + j));
}

THINWIRE_INLINE u64 load_word(const void *at) {
  u64 w;
  std::memcpy(&w, at, 8);
  return w;
}

THINWIRE_INLINE void store_word(void *at, u64 w) { std::memcpy(at, &w, 8); }

}  // namespace

#endif
