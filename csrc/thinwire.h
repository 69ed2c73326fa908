/* The C interface of thinwire's kernels. It needs neither torch nor Python, so one build serves every version of both.
 *
 * kernels.def declares and documents the kernels. All pointers are to memory of the caller. Kernels allocate nothing and
 * keep nothing between calls; on several threads a call allocates a few numbers per 2,048 elements, and threads are kept.
 */
#ifndef THINWIRE_H
#define THINWIRE_H

#include <stdint.h>

#if defined(_WIN32)
#define THINWIRE_API __declspec(dllexport)
#else
#define THINWIRE_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

enum thinwire_dtype { THINWIRE_F32 = 0, THINWIRE_BF16 = 1, THINWIRE_F16 = 2 };

/* A contiguous range of elements of the flat space, in one parameter and one packet. `element` is a multiple of 64. */
typedef struct {
  int64_t element;  /* index of the first one in the flat space */
  int64_t in_param; /* index of the first one in its parameter */
  int64_t count;
  int64_t byte;        /* offset of its words in the packet buffer */
  int64_t plane_bytes; /* distance from one plane of its bits to the next, where an answer has several */
  int64_t shard;       /* index of its shard in the whole model, at which tables of scales are read */
} thinwire_run;

/* The kernels of one instruction set. */
typedef struct {
#define THINWIRE_KERNEL(result, name, parameters, ...) result(*name) parameters;
#include "kernels.def"
#undef THINWIRE_KERNEL
} thinwire_kernels;

/* The same kernels of any instruction set on at most `threads` threads, of which the caller is one. NULL for those that
 * only run on the caller's. A call gives the same bits as one of the kernel itself. */
typedef struct {
#define THINWIRE_LIST(...) __VA_ARGS__
#define THINWIRE_KERNEL(result, name, parameters, ...) \
  result(*name)(const thinwire_kernels *kernels, int threads, THINWIRE_LIST parameters);
#include "kernels.def"
#undef THINWIRE_KERNEL
#undef THINWIRE_LIST
} thinwire_kernels_on_threads;

/* The kernels for "avx512", "avx2", "neon" or "plain"; NULL if this build or this machine does not have them. */
THINWIRE_API const thinwire_kernels *thinwire_kernels_for(const char *isa);

/* The kernels on several threads. Helpers are made by the first call that wants some, and then wait for the next. A child
 * of fork() makes its own. */
THINWIRE_API const thinwire_kernels_on_threads *thinwire_on_threads(void);

/* The best instruction set of this machine. */
THINWIRE_API const char *thinwire_best_isa(void);

/* The declarations of kernels.def in the order of thinwire_kernels, one per line: "result name (parameters)". */
THINWIRE_API const char *thinwire_declarations(void);

#ifdef __cplusplus
}
#endif
#endif
