/* The C interface of thinwire's kernels. No torch, no Python: one build serves every version of both.
 *
 * docs/protocol.md defines what each of these computes; src/thinwire/kernels/reference/ is the same in torch and is
 * the truth. All pointers are to memory of the caller; nothing is allocated, nothing is kept between calls.
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

/* Bumped whenever a signature below changes, so that a stale library is recognised instead of called wrongly. */
#define THINWIRE_ABI 7

enum thinwire_dtype { THINWIRE_F32 = 0, THINWIRE_BF16 = 1, THINWIRE_F16 = 2 };

/* Elements that lie together in the flat space, in one parameter and in one packet. `element` is a multiple of 64. */
typedef struct {
  int64_t element;  /* index of the first one in the flat space */
  int64_t in_param; /* index of the first one in its parameter */
  int64_t count;
  int64_t byte;        /* where its words begin in the packet buffer */
  int64_t plane_bytes; /* from one plane of its bits to the next, where an answer has several */
  int64_t shard;       /* its shard's number in the whole model, at which tables of scales are read */
} thinwire_run;

THINWIRE_API int thinwire_abi(void);

/* The instruction set in use: "avx512", "avx2", "neon" or "plain". */
THINWIRE_API const char *thinwire_isa(void);

/* Uses another one; 0 on success, -1 when this build or this machine does not have it. */
THINWIRE_API int thinwire_use_isa(const char *name);

/* Birder's local rule, sampled and packed in one pass. `m` and `b` have the flat element e at e - shift; `grad` is one
 * parameter's; without a gradient (NULL) the bits are sampled from `m` and `b` as they are. Returns 1 when a gradient
 * was not finite: such elements keep their `m` and `b`. */
THINWIRE_API int thinwire_birder_encode(const thinwire_run *runs, int64_t n_runs, const void *grad, int grad_dtype, void *m, void *b,
                                        int state_dtype, int64_t shift, const uint64_t *active, uint8_t *packets, float beta,
                                        float one_minus_beta, float beta_b, float one_minus_beta_b, float level, float eps, float scale,
                                        int amsgrad, uint64_t key);

/* The same rule, unsampled: m / ((b + eps) level) as a float in [-1, 1] for each element, NaN for those without life. */
THINWIRE_API int thinwire_birder_direction(const thinwire_run *runs, int64_t n_runs, const void *grad, int grad_dtype, void *m, void *b,
                                           int state_dtype, int64_t shift, uint8_t *packets, float beta, float one_minus_beta,
                                           float beta_b, float one_minus_beta_b, float level, float eps, float scale, int amsgrad);

/* mean[e] <- (rows[0][e] + rows[1][e] + ...) * (1 / n) in that order, for `count` elements; rows are `stride` bytes apart.
 * Where that is not finite: rows[0][e] * (1 / n) + rows[1][e] * (1 / n) + ..., for a sum can overflow whose mean does not. */
THINWIRE_API void thinwire_mean(const uint8_t *rows, int64_t stride, int64_t n, int dtype, int64_t count, float *mean);

/* For each of `shards` shards, the life (|state| > eps) of its words w with w mod `period` = `phase`, written to
 * `packets` + shard * stride + offset. Flat element e is state[e - shift]. */
THINWIRE_API void thinwire_activity_refresh(const void *state, int state_dtype, int64_t shift, int64_t first_word, int64_t shard_words,
                                     int64_t shards, int64_t period, int64_t phase, float eps, uint8_t *packets, int64_t stride,
                                     int64_t offset);

/* The answer to `n` rows of votes: a random worker's bit where `active`, the or of all bits elsewhere. `active` may be
 * NULL: or everywhere. `signal`, if not NULL, gets {sum of |2c - n|, number of active_bits elements} over a sixteenth. */
THINWIRE_API void thinwire_vote_bit(const uint8_t *rows, int64_t stride, int64_t n, const uint64_t *active, int64_t first_word,
                                    int64_t words, uint64_t *answer, uint64_t key, int64_t *signal);

/* The same with what most workers say where `active`, and in a tie what row `casting` says. `active` may not be NULL. */
THINWIRE_API void thinwire_vote_majority(const uint8_t *rows, int64_t stride, int64_t n, const uint64_t *active, int64_t words,
                                         uint64_t *answer, int64_t casting, int64_t *signal);

/* The number of votes as planes of bits, lowest first, plane p at answer + p * words. */
THINWIRE_API void thinwire_vote_count(const uint8_t *rows, int64_t stride, int64_t n, const uint64_t *active, int64_t words, int64_t planes,
                                      uint64_t *answer, int64_t *signal);

/* Brings `active` up to date with the answers of `shards` shards, `stride` bytes apart: hellos where it was 0, and the
 * roll call's words, which follow the planes of the answer. */
THINWIRE_API void thinwire_adopt(uint64_t *active, int64_t first_word, int64_t shard_words, int64_t shards, const uint8_t *answers,
                                 int64_t stride, int64_t planes, int64_t period, int64_t phase);

/* x <- decay x - lr Q where active; Q is the answer's sign (planes = 1, workers = 0) or (2c - workers) / workers, with
 * `rate` = lr or lr / workers. `low`, if not NULL, is a parameter of `low_dtype` whose fp32 master is `x`: it is
 * rounded from the master, and a master that no longer rounds to it (somebody loaded weights) is first replaced by
 * it. */
THINWIRE_API void thinwire_birder_apply(const thinwire_run *runs, int64_t n_runs, float *x, void *low, int low_dtype,
                                        const uint64_t *active, const uint8_t *answers, int64_t planes, int64_t workers,
                                        float rate, float decay);

/* x <- decay x - lr u with a float u for each element, where u is not NaN; masters as above. */
THINWIRE_API void thinwire_dense_apply(const thinwire_run *runs, int64_t n_runs, float *x, void *low, int low_dtype,
                                       const uint8_t *answers, float lr, float decay);

/* The gradient times `scale`, as a float for each element; zeros without a gradient (NULL). Returns 1 when the magnitude of
 * one of them is not at most `largest`: it is larger, infinite or NaN. Here and below, `largest` is what the squares of
 * gradients have to be finite for; the largest float where nobody squares them. */
THINWIRE_API int thinwire_dense_encode(const thinwire_run *runs, int64_t n_runs, const void *grad, int grad_dtype, uint8_t *packets,
                                       float scale, float largest);

/* The sum of squares, in the order of a run's (below). */
THINWIRE_API double thinwire_square_sum(const float *values, int64_t count);

/* In all that follows, `x`, `low` and `anchor` are a parameter's; `m`, `v`, `w` and `p` have the flat element e at e, and
 * `c` and `y`, which are of `state_dtype`, at e - shift. `heard` and `before` are words of the flat space, a bit an
 * element, which a scale a shard makes floats of: +scale where the bit is 1, -scale where it is 0. `sums` gets for each
 * run what it says: sums over the words of a run in double, 32 at a time halves added to halves
 * and those in order; the sum of a word is one in float32, halves added to halves. */

/* Adam: m, v and x, where v > 0. The gradient is the packets' floats, or with `scales` the words of the flat space.
 * Returns the sum of all v. */
THINWIRE_API double thinwire_adam_apply(const thinwire_run *runs, int64_t n_runs, float *x, void *low, int low_dtype, float *m, float *v,
                                        const void *gradient, const float *scales, float beta1, float one_minus_beta1, float beta2,
                                        float one_minus_beta2, float eps, float rate, float correction, float decay, int update_variance);

/* c <- its error, that is c less the sign that was sent of it, plus beta times what was heard, plus weight times the
 * gradient, if there is one. Writes the signs of c; `sums`: c squared. Returns 1 when c would not be finite, or 2^60 and
 * more, with a gradient: such elements go without. */
THINWIRE_API int thinwire_sign_encode(const thinwire_run *runs, int64_t n_runs, const void *grad, int grad_dtype, void *c, int state_dtype,
                                      int64_t shift, const uint64_t *heard, uint8_t *packets, const float *sent_scales,
                                      const float *heard_scales, double *sums, float beta, float weight, float scale);

/* The owner's answer to `n_rows` rows of one shard, which are `stride` bytes apart and have a scale each: y <- their mean
 * plus its own error, and the signs of y. A run's `byte` counts from the beginning of a row and of the answer. `sums`: y
 * squared. */
THINWIRE_API void thinwire_sign_merge(const thinwire_run *runs, int64_t n_runs, const uint8_t *rows, int64_t stride, int64_t n_rows,
                                      void *y, int state_dtype, int64_t shift, uint8_t *answer, const float *scales, float last_scale,
                                      double *sums);

/* x <- decay x - rate h p where p > 0, h being what was heard; from `anchor` instead of x, if not NULL. `m`, if not NULL,
 * becomes momentum h. */
THINWIRE_API void thinwire_sign_apply(const thinwire_run *runs, int64_t n_runs, float *x, void *low, int low_dtype, const float *p,
                                      const uint64_t *heard, const float *scales, float rate, float decay, const float *anchor, float *m,
                                      float momentum);

/* A step between two exchanges: m takes the gradient, if there is one, and c takes rate m and loses what was sent of it.
 * `output`: 0 nothing, 1 the signs of c, and `sums` c squared, 2 the floats of m. Returns 1 when m would not be finite,
 * or 2^60 and more: such elements keep it. */
THINWIRE_API int thinwire_momentum_encode(const thinwire_run *runs, int64_t n_runs, const void *grad, int grad_dtype, float *m, void *c,
                                          int state_dtype, int64_t shift, uint8_t *packets, const float *sent_scales, double *sums,
                                          float beta, float weight, float scale, float rate, int output);

/* x <- decay x - rate u p where p > 0, with a float u for each element; `anchor`, if not NULL, gets x as it was. */
THINWIRE_API void thinwire_step_apply(const thinwire_run *runs, int64_t n_runs, float *x, void *low, int low_dtype, const float *p,
                                      const uint8_t *values, float rate, float decay, float *anchor);

/* v <- 1 / (max(sqrt(v) correction, floor) + eps) where v > 0, else 0: what a variance, once it is frozen, multiplies steps
 * by. */
THINWIRE_API void thinwire_precondition(float *v, int64_t count, float correction, float floor, float eps);

/* LAMB's m and v, and what its step would be: `sums`, three a run: x squared, the step squared, v. Masters take over their
 * parameter, which is not written. */
THINWIRE_API void thinwire_lamb_measure(const thinwire_run *runs, int64_t n_runs, float *x, void *low, int low_dtype, float *m, float *v,
                                        const uint8_t *gradient, float beta1, float one_minus_beta1, float beta2, float one_minus_beta2,
                                        float eps, float unbias, float correction, float weight_decay, double *sums);

/* x <- x - rate times the step that was measured. Masters do not take over again. */
THINWIRE_API void thinwire_lamb_apply(const thinwire_run *runs, int64_t n_runs, float *x, void *low, int low_dtype, const float *m,
                                      const float *v, float eps, float unbias, float correction, float weight_decay, float rate);

/* 1-bit LAMB's variance w, taken from two momenta in a row, and what its step would be. `inverse` = 1 / (1 - beta1).
 * `sums`, three a run: the step without and with weight decay, both squared, and the largest 1 / (p (sqrt(w) + eps)).
 * Masters as in thinwire_lamb_measure. */
THINWIRE_API void thinwire_onebit_lamb_measure(const thinwire_run *runs, int64_t n_runs, float *x, void *low, int low_dtype, const float *p,
                                               float *w, const uint64_t *heard, const float *scales, const uint64_t *before,
                                               const float *scales_before, float shrink, float beta1, float inverse, float beta2,
                                               float one_minus_beta2, float eps, float unbias, float weight_decay, double *sums);

/* CD-Adam (below) says what changed: `known` is what of a worker's wish everybody knew before its last message, `said` the
 * bits of that message, both with the flat element e at e - shift, a word at (e - shift) / 64; `mean` is the owner's mean of
 * all of them, `g` everybody's memory of what owners answered. `spoke` and `active` are words of the whole flat space.
 * `sums`, three a run: |c|, c squared and the number of those, over the active_bits elements. */

/* known <- known plus what was said, with `sent_scales`, where `spoke`; c <- the wish less that. Writes the signs of c where
 * `active`, elsewhere whether the wish is anything but 0, to `packets` and to `said`, and to `busy`, at (e - shift) / 64, 1 for a
 * word with a wish that is anything but 0, else 0. The wish is the gradient, or `m`, if not
 * NULL, after it took the gradient, if there is one. `mode`: 0 as said; 1 a greeting: elements not yet active, if they have
 * no `m`, make the wish known; 2 a recall: the wish is what was known, and nothing is known any more. Returns 1 when c or m
 * would not be finite, or 2^60 and more, with a gradient, or when the scaled gradient is not at most `largest`: such elements
 * wish for what is known, and keep m. */
THINWIRE_API int thinwire_markov_encode(const thinwire_run *runs, int64_t n_runs, const void *grad, int grad_dtype, float *m, float *known,
                                        int64_t shift, uint64_t *said, uint8_t *busy, const uint64_t *spoke, const uint64_t *active,
                                        uint8_t *packets, const float *sent_scales, double *sums, float beta, float weight, float scale,
                                        float largest, int mode);

/* The owner's answer to `n_rows` rows of one shard, which are `stride` bytes apart and have a scale each. Where `active`, mean
 * takes their mean and the answer is the sign of c = mean - g; elsewhere it is the or of all bits. A run's `byte` counts from
 * the beginning of a row and of the answer. */
THINWIRE_API void thinwire_markov_merge(const thinwire_run *runs, int64_t n_runs, const uint8_t *rows, int64_t stride, int64_t n_rows,
                                        float *mean, int64_t shift, const float *g, const uint64_t *active, uint8_t *answer,
                                        const float *scales, double *sums);

/* c <- the wish less `known`, which stays; `c` has the flat element e at e - shift. Wish, limits and result as in
 * thinwire_markov_encode; a bad element gets 0. */
THINWIRE_API int thinwire_markov_difference(const thinwire_run *runs, int64_t n_runs, const void *grad, int grad_dtype, float *m,
                                            const float *known, float *c, int64_t shift, float beta, float weight, float scale,
                                            float largest);

/* AMSGrad: m, v, peak (the largest v so far) and x, where peak > 0. `source` of the gradient: 0 `g` as it stands, 1 `g` after
 * it took the packets' signs times `scales`, where `active`, 2 the packets' floats. Without `x` (NULL) only g takes the
 * signs. */
THINWIRE_API void thinwire_amsgrad_apply(const thinwire_run *runs, int64_t n_runs, float *x, void *low, int low_dtype, float *g, float *m,
                                         float *v, float *peak, const uint8_t *packets, const float *scales, const uint64_t *active,
                                         float beta1, float one_minus_beta1, float beta2, float one_minus_beta2, float eps, float rate,
                                         float correction, float decay, int source);

/* SketchedAMSGrad's local rule, where all three have the flat element e at e - shift: m <- beta m + weight g, e <- m + ratio e,
 * and g <- the gradient times `scale`, zeros without one (NULL). Returns 1 when m or e would not be finite, or 2^60 and more,
 * or when the scaled gradient is not at most `largest`: such elements keep both, and g is 0. */
THINWIRE_API int thinwire_momentum_sum(const thinwire_run *runs, int64_t n_runs, const void *grad, int grad_dtype, float *m, float *e,
                                       float *g, int64_t shift, float beta, float weight, float scale, float ratio, float largest);

/* Its step, at `k` ascending flat elements of one parameter, whose element 0 is `first`: v, peak and x <- x - rate p /
 * sqrt(peak), where momentum p and gradient are not both 0; `v` and `peak` are the parameter's. Before that, all elements that
 * were ever picked, that is whose v is not `eps`, decay. Masters as in thinwire_birder_apply. Returns 1, or 0 when an element
 * was outside of the parameter, and nothing was done at all. */
THINWIRE_API int thinwire_sparse_amsgrad(float *x, int64_t count, void *low, int low_dtype, float *v, float *peak, const int32_t *indices,
                                         const float *momenta, const float *gradients, int64_t k, int64_t first, float beta2,
                                         float one_minus_beta2, float eps, float rate, float decay);

/* The indices, ascending, of the `k` largest |values|; the lower index wins a tie, and NaN is larger than all. `scratch` has
 * room for 2k, here and below. */
THINWIRE_API void thinwire_top_k(const float *values, int64_t count, int64_t k, int32_t *indices, uint64_t *scratch);

/* values[indices[i]] <- itself plus weight amounts[i], in order. Returns 1, or 0 when an index was outside of the `count`
 * values, and nothing was added at all. */
THINWIRE_API int thinwire_sparse_add(float *values, int64_t count, const int32_t *indices, const float *amounts, int64_t k, float weight);

/* A count sketch: `table` has `rows` <= 15 rows of `columns` <= 2^30 cells, and each row hashes an element e < 2^31 - 1 to a
 * column and a sign with four coefficients of a polynomial modulo 2^31 - 1. `first` is a multiple of 64. */

/* Adds `count` values, elements `first` and on, to their cells in ascending order. */
THINWIRE_API void thinwire_sketch_add(const float *values, int64_t first, int64_t count, float *table, int64_t rows, int64_t columns,
                                      const int64_t *coefficients);

/* values <- values plus weight times their estimates, that is the medians over the rows. */
THINWIRE_API void thinwire_sketch_estimate(const float *table, int64_t rows, int64_t columns, const int64_t *coefficients, int64_t first,
                                           int64_t count, float weight, float *values);

/* The elements, ascending, of the `k` largest |estimate| / sqrt(peak) in `ranges`, pairs of first element and count; the lower
 * element wins a tie. `peak` has the flat element e at e. With NaN in the table it is some k elements of `ranges`. */
THINWIRE_API void thinwire_sketch_top_k(const float *table, int64_t rows, int64_t columns, const int64_t *coefficients, const float *peak,
                                        const int64_t *ranges, int64_t n_ranges, int64_t k, int32_t *indices, uint64_t *scratch);

/* CRC-32C (RFC 3720) of `count` bytes that follow others, whose CRC is `crc`; 0 where none do. */
THINWIRE_API uint32_t thinwire_crc32c(const uint8_t *data, int64_t count, uint32_t crc);

#ifdef __cplusplus
}
#endif
#endif
