// The kernels that kernels.def divides, on several threads, which call the kernel of one instruction set with a part of its
// work at a time: kernels know nothing of threads.
//
// The bits are those of one call. Elements do not depend on each other, and random numbers depend on the element. Sums are
// taken of 32 words at a time, each by a call of its own, and then added as word.h adds them: in the order of the run.

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#include "pool.h"
#include "thinwire.h"

namespace {

constexpr int64_t kWord = 64;
constexpr int64_t kUnit = 32 * kWord;  // elements whose sums word.h adds first
constexpr int64_t kTogether = 8;       // units that a thread takes at a time: enough that taking them costs nothing

// How kernels.def divides a kernel: between runs and within them, where a word of 64 elements has `word_bytes` in a packet, and
// a row of `sums` has so many sums, and after them so many maxima.
struct ByWords {
  int64_t word_bytes;
  int sums, maxima;
};
constexpr ByWords by_words(int64_t word_bytes, int sums = 0, int maxima = 0) { return {word_bytes, sums, maxima}; }

// By a function of its own.
template <auto kFunction>
struct By {};
template <auto kFunction>
constexpr By<kFunction> by() {
  return {};
}

// Not at all.
struct Whole {};

template <class Division>
constexpr Division division(Division given) {
  return given;
}
constexpr Whole division() { return {}; }

// Units of work, which threads take a few at a time until none is left.
class Units {
 public:
  Units(int64_t count, int threads, int64_t together = kTogether) : count_(count) {
    together_ = count / (8 * threads);
    together_ = together_ < 1 ? 1 : together_ > together ? together : together_;
  }

  bool take(int64_t *first, int64_t *last) {
    *first = next_.fetch_add(together_, std::memory_order_relaxed);
    *last = *first + together_ < count_ ? *first + together_ : count_;
    return *first < count_;
  }

  // Calls `body()` on so many threads, if there is work for them.
  template <class Body>
  void share(int threads, Body body) {
    const int64_t shares = (count_ + together_ - 1) / together_;
    const int64_t helpers = (threads < shares ? threads : shares) - 1;
    thinwire::with_helpers(int(helpers), [](void *context) { (*static_cast<Body *>(context))(); }, &body);
  }

 private:
  std::atomic<int64_t> next_{0};
  int64_t count_, together_;
};

// Room for the sums of all units. Without memory the caller does the work alone.
class Sums {
 public:
  Sums(int64_t units, int columns) : at(columns ? static_cast<double *>(std::malloc(size_t(units * columns) * sizeof(double))) : nullptr) {}
  ~Sums() { std::free(at); }
  Sums(const Sums &) = delete;

  double *const at;
};

// Runs -------------------------------------------------------------------------------------------------------------------

int64_t units_of(const thinwire_run &run) { return (run.count + kUnit - 1) / kUnit; }

int64_t units_of(const thinwire_run *runs, int64_t n_runs) {
  int64_t units = 0;
  for (int64_t i = 0; i < n_runs; ++i) units += units_of(runs[i]);
  return units;
}

// Some units of a run, as a run.
thinwire_run part_of(const thinwire_run &run, int64_t first, int64_t last, int64_t word_bytes) {
  thinwire_run part = run;
  part.element += first * kUnit;
  part.in_param += first * kUnit;
  part.byte += first * (kUnit / kWord) * word_bytes;
  part.count = (last * kUnit < run.count ? last * kUnit : run.count) - first * kUnit;
  return part;
}

// A walk through the units of a table, forwards.
struct Walk {
  const thinwire_run *run;
  int64_t before = 0;  // units of the runs before `run`

  void to(int64_t unit) {
    while (unit - before >= units_of(*run)) before += units_of(*run++);
  }
};

// The sums of runs from those of their units. Maxima compare by their bits, as in word.h: numbers are not negative, and NaN
// is larger than all of them.
void add_up(const thinwire_run *runs, int64_t n_runs, const double *of_units, ByWords division, double *sums) {
  const int columns = division.sums + division.maxima;
  for (int64_t i = 0; i < n_runs; ++i, sums += columns) {
    for (int c = 0; c < columns; ++c) sums[c] = 0.0;
    for (int64_t unit = 0; unit < units_of(runs[i]); ++unit, of_units += columns) {
      for (int c = 0; c < division.sums; ++c) sums[c] += of_units[c];
      for (int c = division.sums; c < columns; ++c) {
        uint64_t largest, here;
        std::memcpy(&largest, sums + c, 8);
        std::memcpy(&here, of_units + c, 8);
        if (here > largest) sums[c] = of_units[c];
      }
    }
  }
}

// An argument of a call for a part: the kernel's only `double *` is `sums`.
template <class Argument>
Argument of_part(Argument argument, double *) {
  return argument;
}
double *of_part(double *sums, double *of_units) { return of_units ? of_units : sums; }

template <auto kKernel, auto kDivision, class Type>
struct Divided;

template <auto kKernel, auto kDivision, class Result, class... Arguments>
struct Divided<kKernel, kDivision, Result (*thinwire_kernels::*)(const thinwire_run *, int64_t, Arguments...)> {
  static Result on_threads(const thinwire_kernels *kernels, int threads, const thinwire_run *runs, int64_t n_runs, Arguments... arguments) {
    constexpr bool kReturnsSum = std::is_same_v<Result, double>;
    const auto kernel = kernels->*kKernel;
    const ByWords division = kDivision(runs, n_runs, arguments...);
    const int columns = division.sums + division.maxima + kReturnsSum;
    const int64_t n_units = units_of(runs, n_runs);
    const Sums sums(n_units, columns);
    if (!sums.at && columns) return kernel(runs, n_runs, arguments...);

    Units units(n_units, threads);
    std::atomic<int> found{0};
    units.share(threads, [&] {
      Walk walk{runs};
      thinwire_run parts[kTogether];
      int64_t first, last;
      int found_here = 0;
      while (units.take(&first, &last)) {
        int64_t n_parts = 0;
        for (int64_t unit = first, next; unit < last; unit = next) {
          walk.to(unit);
          const int64_t end = walk.before + units_of(*walk.run);
          next = columns ? unit + 1 : end < last ? end : last;
          parts[n_parts++] = part_of(*walk.run, unit - walk.before, next - walk.before, division.word_bytes);
        }
        double *const of_units = columns ? sums.at + first * columns : nullptr;
        if constexpr (kReturnsSum)
          for (int64_t i = 0; i < n_parts; ++i) of_units[i] = kernel(parts + i, 1, arguments...);
        else if constexpr (std::is_void_v<Result>)
          kernel(parts, n_parts, of_part(arguments, of_units)...);
        else
          found_here |= kernel(parts, n_parts, of_part(arguments, of_units)...);
      }
      if (found_here) found.store(1, std::memory_order_relaxed);
    });

    if constexpr (kReturnsSum) {
      double total = 0.0;
      const double *of_units = sums.at;
      for (int64_t i = 0; i < n_runs; ++i) {
        double of_run = 0.0;
        for (int64_t unit = 0; unit < units_of(runs[i]); ++unit) of_run += *of_units++;
        total += of_run;
      }
      return total;
    } else {
      if (columns) (add_up_into(runs, n_runs, sums.at, division, arguments), ...);
      if constexpr (!std::is_void_v<Result>) return found.load(std::memory_order_relaxed);
    }
  }

 private:
  template <class Argument>
  static void add_up_into(const thinwire_run *, int64_t, const double *, ByWords, Argument) {}
  static void add_up_into(const thinwire_run *runs, int64_t n_runs, const double *of_units, ByWords division, double *sums) {
    add_up(runs, n_runs, of_units, division, sums);
  }
};

// Ranges -----------------------------------------------------------------------------------------------------------------

// Votes measure their signal in every 16th block of 64 words, counted from the first word of a call.
constexpr int64_t kVoteWords = 16 * 64;

// Calls `vote(first, count, signal)` for ranges of words; their signals are numbers of elements, which are exact in any order.
template <class Vote>
void vote_on_threads(int threads, int64_t words, int64_t *signal, Vote vote) {
  Units units((words + kVoteWords - 1) / kVoteWords, threads, 1);
  std::atomic<int64_t> total[2] = {{0}, {0}};
  units.share(threads, [&] {
    int64_t first, last, here[2] = {0, 0};
    while (units.take(&first, &last)) {
      const int64_t word = first * kVoteWords;
      vote(word, words - word < kVoteWords ? words - word : kVoteWords, signal ? here : nullptr);
    }
    for (int i = 0; i < 2; ++i) total[i].fetch_add(here[i], std::memory_order_relaxed);
  });
  for (int i = 0; signal && i < 2; ++i) signal[i] += total[i].load(std::memory_order_relaxed);
}

void vote_bit(const thinwire_kernels *kernels, int threads, const uint8_t *rows, int64_t rows_stride, int64_t n_rows, int64_t byte,
              const uint64_t *active, int64_t first_word, int64_t words, uint8_t *answer, int64_t answer_byte, uint64_t key,
              int64_t *signal) {
  vote_on_threads(threads, words, signal, [&](int64_t word, int64_t count, int64_t *here) {
    kernels->vote_bit(rows, rows_stride, n_rows, byte + 8 * word, active, first_word + word, count, answer, answer_byte + 8 * word, key,
                      here);
  });
}

void vote_majority(const thinwire_kernels *kernels, int threads, const uint8_t *rows, int64_t rows_stride, int64_t n_rows, int64_t byte,
                   const uint64_t *active, int64_t first_word, int64_t words, uint8_t *answer, int64_t answer_byte, int64_t casting,
                   int64_t *signal) {
  vote_on_threads(threads, words, signal, [&](int64_t word, int64_t count, int64_t *here) {
    kernels->vote_majority(rows, rows_stride, n_rows, byte + 8 * word, active, first_word + word, count, answer, answer_byte + 8 * word,
                           casting, here);
  });
}

// The planes of an answer lie one after another: those of a range go to their places by a copy.
void vote_count(const thinwire_kernels *kernels, int threads, const uint8_t *rows, int64_t rows_stride, int64_t n_rows, int64_t byte,
                const uint64_t *active, int64_t first_word, int64_t words, int64_t planes, uint8_t *answer, int64_t answer_byte,
                int64_t *signal) {
  vote_on_threads(threads, words, signal, [&](int64_t word, int64_t count, int64_t *here) {
    constexpr int kMaxPlanes = 32;
    uint8_t of_range[8 * kVoteWords * kMaxPlanes];
    kernels->vote_count(rows, rows_stride, n_rows, byte + 8 * word, active, first_word + word, count, planes, of_range, 0, here);
    for (int64_t p = 0; p < planes; ++p)
      std::memcpy(answer + answer_byte + 8 * (p * words + word), of_range + 8 * p * count, size_t(8 * count));
  });
}

void mean(const thinwire_kernels *kernels, int threads, const void *rows, int64_t rows_stride, int64_t n_rows, int rows_dtype,
          int64_t rows_columns, float *out) {
  const int64_t size = rows_dtype == THINWIRE_F32 ? 4 : 2;
  Units units((rows_columns + kUnit - 1) / kUnit, threads);
  units.share(threads, [&] {
    int64_t first, last;
    while (units.take(&first, &last)) {
      const int64_t from = first * kUnit, to = last * kUnit < rows_columns ? last * kUnit : rows_columns;
      kernels->mean(static_cast<const uint8_t *>(rows) + from * size, rows_stride, n_rows, rows_dtype, to - from, out + from);
    }
  });
}

double square_sum(const thinwire_kernels *kernels, int threads, const float *values, int64_t values_size) {
  const int64_t n_units = (values_size + kUnit - 1) / kUnit;
  const Sums sums(n_units, 1);
  if (!sums.at) return kernels->square_sum(values, values_size);
  Units units(n_units, threads);
  units.share(threads, [&] {
    int64_t first, last;
    while (units.take(&first, &last))
      for (int64_t unit = first; unit < last; ++unit) {
        const int64_t left = values_size - unit * kUnit;
        sums.at[unit] = kernels->square_sum(values + unit * kUnit, left < kUnit ? left : kUnit);
      }
  });
  double total = 0.0;
  for (int64_t unit = 0; unit < n_units; ++unit) total += sums.at[unit];
  return total;
}

// The table --------------------------------------------------------------------------------------------------------------

// What kernels.def says of each kernel, given the arguments of a call.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"
#pragma GCC diagnostic ignored "-Wunused-function"
#define THINWIRE_KERNEL(result, name, parameters, ...) \
  auto division_of_##name parameters { return division(__VA_ARGS__); }
#include "kernels.def"
#undef THINWIRE_KERNEL
#pragma GCC diagnostic pop

template <auto kKernel, auto kDivision>
constexpr auto on_threads(ByWords) {
  return &Divided<kKernel, kDivision, decltype(kKernel)>::on_threads;
}
template <auto, auto, auto kFunction>
constexpr auto on_threads(By<kFunction>) {
  return kFunction;
}
template <auto, auto>
constexpr auto on_threads(Whole) {
  return nullptr;
}

template <class Result, class... Arguments>
Result result_of(Result (*)(Arguments...));

constexpr thinwire_kernels_on_threads kTable = {
#define THINWIRE_KERNEL(result, name, parameters, ...) \
  on_threads<&thinwire_kernels::name, &division_of_##name>(decltype(result_of(&division_of_##name))()),
#include "kernels.def"
#undef THINWIRE_KERNEL
};

}  // namespace

extern "C" const thinwire_kernels_on_threads *thinwire_on_threads(void) { return &kTable; }
