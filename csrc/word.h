// What kernels over runs have in common: 64 elements at a time, their bits, their sums, and the types of their tensors.
// Internal linkage throughout, for the reason that scalar.h gives.
#ifndef THINWIRE_WORD_H
#define THINWIRE_WORD_H

#include "scalar.h"
#include "thinwire.h"

#define THINWIRE_INLINE_LAMBDA __attribute__((always_inline))

namespace {

// States stay below this, and a gradient that would bring one here counts as infinite.
constexpr float kTooLarge = 0x1p60f;

// Calls `each(done, n)` for the words of a run, `n` being 64, a constant to the compiler, for all but a shorter last one.
template <class Each>
THINWIRE_INLINE void for_words(int64_t count, Each each) {
  int64_t done = 0;
  for (; done + 64 <= count; done += 64) each(done, 64);
  if (done < count) each(done, int(count - done));
}

// Room for a word's values, zeros beyond the n that it has.
struct Values {
  float at[64];

  THINWIRE_INLINE_MEMBER explicit Values(int n) {
    if (n < 64) std::memset(at, 0, sizeof at);
  }
  THINWIRE_INLINE_MEMBER float &operator[](int j) { return at[j]; }
  THINWIRE_INLINE_MEMBER const float &operator[](int j) const { return at[j]; }
};

// The sum of 64 values in the one order that all backends add in: halves onto halves.
template <int kHalf>
THINWIRE_INLINE float fold(float *values) {
  for (int j = 0; j < kHalf; ++j) values[j] += values[j + kHalf];
  if constexpr (kHalf > 1)
    return fold<kHalf / 2>(values);
  else
    return values[0];
}

// Functions of their own: within a larger loop GCC 12 takes most of the halves apart into single additions.
[[maybe_unused]] __attribute__((noinline)) double sum_of(const float *__restrict values) {
  float halves[32];
  for (int j = 0; j < 32; ++j) halves[j] = values[j] + values[j + 32];
  return double(fold<16>(halves));
}

[[maybe_unused]] __attribute__((noinline)) double sum_of_squares(const float *__restrict values) {
  float halves[32];
  for (int j = 0; j < 32; ++j) halves[j] = values[j] * values[j] + values[j + 32] * values[j + 32];
  return double(fold<16>(halves));
}

// The sum of a run, in the one order: 32 words at a time halves onto halves, as a program of a GPU has so many, and those one
// after another.
class Sum {
 public:
  THINWIRE_INLINE_MEMBER void add(double word) {
    words_[count_++] = word;
    if (count_ == kTogether) add_up();
  }
  THINWIRE_INLINE_MEMBER double value() {
    if (count_ > 0) {
      for (int j = count_; j < kTogether; ++j) words_[j] = 0.0;
      add_up();
    }
    return total_;
  }

 private:
  static constexpr int kTogether = 32;

  THINWIRE_INLINE_MEMBER void add_up() {
    for (int half = kTogether / 2; half > 0; half /= 2)
      for (int j = 0; j < half; ++j) words_[j] += words_[j + half];
    total_ += words_[0];
    count_ = 0;
  }

  double words_[kTogether];
  int count_ = 0;
  double total_ = 0.0;
};

// The bits of the largest of 64 values that are not negative, which compare as the values do; NaN is the largest of all.
[[maybe_unused]] __attribute__((noinline)) u32 largest(const float *__restrict values) {
  u32 most = 0;
  for (int j = 0; j < 64; ++j) most = bits_of(values[j]) > most ? bits_of(values[j]) : most;
  return most;
}

// Bits to values: `one` for each bit that is set, `zero` for the others.
template <class Value>
THINWIRE_INLINE void spread(u64 word, Value one, Value zero, Value *__restrict values) {
  for (int h = 0; h < 2; ++h) {
    const u32 bits = u32(word >> (32 * h));
    for (int j = 0; j < 32; ++j) values[32 * h + j] = bits & kBit[j] ? one : zero;
  }
}

// Bits to signs: +scale for each bit that is set, -scale for the others.
THINWIRE_INLINE void spread_signs(u64 word, float scale, float *__restrict values) {
  for (int h = 0; h < 2; ++h) {
    const u32 bits = u32(word >> (32 * h));
    for (int j = 0; j < 32; ++j) values[32 * h + j] = with_sign(bits, j, scale);
  }
}

THINWIRE_INLINE void add_signs(u64 word, float scale, float *__restrict values) {
  for (int h = 0; h < 2; ++h) {
    const u32 bits = u32(word >> (32 * h));
    for (int j = 0; j < 32; ++j) values[32 * h + j] += with_sign(bits, j, scale);
  }
}

// Floats to bits: which of the word's n values are not negative.
THINWIRE_INLINE u64 signs(const Values &values, int n) {
  u32 half[2];
  for (int h = 0; h < 2; ++h) {
    u32 bits = 0;
    for (int j = 0; j < 32; ++j) bits |= values[32 * h + j] >= 0.0f ? kBit[j] : 0u;
    half[h] = bits;
  }
  return (half[0] | u64(half[1]) << 32) & (~u64(0) >> (64 - n));
}

// The floats of a run in a packet buffer, from its element `done` on.
THINWIRE_INLINE float *floats_at(uint8_t *packets, const thinwire_run &run, int64_t done) {
  return reinterpret_cast<float *>(packets + run.byte + 4 * done);
}
THINWIRE_INLINE const float *floats_at(const uint8_t *packets, const thinwire_run &run, int64_t done) {
  return reinterpret_cast<const float *>(packets + run.byte + 4 * done);
}

// A master that no longer rounds to its low-precision parameter, because weights were loaded, is replaced by it.
template <class Low>
THINWIRE_INLINE void load_master(float *__restrict x, const Low *__restrict low, int64_t n) {
  for (int64_t j = 0; j < n; ++j) {
    Low rounded;
    store(rounded, x[j]);
    x[j] = same(rounded, low[j]) ? x[j] : load(low[j]);
  }
}

template <class Low>
THINWIRE_INLINE void store_master(Low *__restrict low, const float *__restrict x, int64_t n) {
  for (int64_t j = 0; j < n; ++j) store(low[j], x[j]);
}

// Without masters, Low is float and `low` is not touched.
THINWIRE_INLINE void load_master(float *, const float *, int64_t) {}
THINWIRE_INLINE void store_master(float *, const float *, int64_t) {}

// A parameter in fp32, or the master of one in low precision. The type is looked up for every word: that is cheap, and a
// template would compile every kernel three times.
struct Parameter {
  float *x;
  void *low;
  int dtype;

  THINWIRE_INLINE_MEMBER void load(int64_t at, int n) const {
    if (low && dtype == THINWIRE_BF16) load_word_of(x + at, static_cast<const bf16 *>(low) + at, n);
    if (low && dtype == THINWIRE_F16) load_word_of(x + at, static_cast<const f16 *>(low) + at, n);
  }

  THINWIRE_INLINE_MEMBER void store(int64_t at, int n) const {
    if (low && dtype == THINWIRE_BF16) store_word_of(static_cast<bf16 *>(low) + at, x + at, n);
    if (low && dtype == THINWIRE_F16) store_word_of(static_cast<f16 *>(low) + at, x + at, n);
  }

 private:
  template <class Low>
  __attribute__((noinline)) static void load_word_of(float *x, const Low *low, int n) {
    ::load_master(x, low, n);
  }

  template <class Low>
  __attribute__((noinline)) static void store_word_of(Low *low, const float *x, int n) {
    store_master(low, x, n);
  }
};

// A gradient of any type, or none.
struct Gradient {
  const void *values;
  int dtype;

  // A word of it in fp32, for which there is `room` where it is not there already.
  THINWIRE_INLINE_MEMBER const float *get(int64_t at, int n, float *room) const {
    if (dtype == THINWIRE_F32) {
      fetch_ahead(static_cast<const float *>(values) + at);
      return static_cast<const float *>(values) + at;
    }
    if (dtype == THINWIRE_BF16)
      widen(static_cast<const bf16 *>(values) + at, n, room);
    else
      widen(static_cast<const f16 *>(values) + at, n, room);
    return room;
  }

 private:
  template <class Grad>
  __attribute__((noinline)) static void widen(const Grad *__restrict grad, int n, float *__restrict room) {
    for (int j = 0; j < n; ++j) room[j] = load(grad[j]);
  }
};

// Calls `body` with a state by its type.
template <class Body>
THINWIRE_INLINE auto with_state(void *state, int dtype, Body body) {
  if (dtype == THINWIRE_BF16) return body(static_cast<bf16 *>(state));
  return body(static_cast<float *>(state));
}

}  // namespace

#endif
