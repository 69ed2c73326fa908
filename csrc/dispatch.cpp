// Picks the kernels for this machine once, and forwards the C interface to them.

#include <cstring>

#include "table.h"

namespace {

struct Choice {
  const char *name;
  const thinwire_table *table;
  bool (*available)();
};

}  // namespace

extern const thinwire_table thinwire_table_plain;
#if defined(THINWIRE_HAS_AVX2)
extern const thinwire_table thinwire_table_avx2;
#endif
#if defined(THINWIRE_HAS_AVX512)
extern const thinwire_table thinwire_table_avx512;
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
    {"avx512", &thinwire_table_avx512, has_avx512},
#endif
#if defined(THINWIRE_HAS_AVX2)
    {"avx2", &thinwire_table_avx2, has_avx2},
#endif
#if defined(__aarch64__)
    {"neon", &thinwire_table_plain, always},
#else
    {"plain", &thinwire_table_plain, always},
#endif
};

const Choice *best() {
  for (const Choice &choice : kChoices)
    if (choice.available()) return &choice;
  return &kChoices[sizeof kChoices / sizeof kChoices[0] - 1];
}

const Choice *in_use = best();

}  // namespace

extern "C" {

int thinwire_abi(void) { return THINWIRE_ABI; }

const char *thinwire_isa(void) { return in_use->name; }

int thinwire_use_isa(const char *name) {
  for (const Choice &choice : kChoices)
    if (!std::strcmp(choice.name, name) && choice.available()) {
      in_use = &choice;
      return 0;
    }
  return -1;
}

int thinwire_birder_encode(const thinwire_run *runs, int64_t n_runs, const void *grad, int grad_dtype, void *m, void *b, int state_dtype,
                           int64_t shift, const uint64_t *active, uint8_t *packets, float beta, float one_minus_beta, float beta_b,
                           float one_minus_beta_b, float level, float eps, float scale, int amsgrad, uint64_t key) {
  return in_use->table->birder_encode(runs, n_runs, grad, grad_dtype, m, b, state_dtype, shift, active, packets, beta, one_minus_beta, beta_b,
                                      one_minus_beta_b, level, eps, scale, amsgrad, key);
}

int thinwire_birder_direction(const thinwire_run *runs, int64_t n_runs, const void *grad, int grad_dtype, void *m, void *b, int state_dtype,
                              int64_t shift, uint8_t *packets, float beta, float one_minus_beta, float beta_b, float one_minus_beta_b,
                              float level, float eps, float scale, int amsgrad) {
  return in_use->table->birder_direction(runs, n_runs, grad, grad_dtype, m, b, state_dtype, shift, packets, beta, one_minus_beta, beta_b,
                                         one_minus_beta_b, level, eps, scale, amsgrad);
}

void thinwire_mean(const uint8_t *rows, int64_t stride, int64_t n, int dtype, int64_t count, float *mean) {
  in_use->table->mean(rows, stride, n, dtype, count, mean);
}

void thinwire_activity_refresh(const void *state, int state_dtype, int64_t shift, int64_t first_word, int64_t shard_words, int64_t shards,
                        int64_t period, int64_t phase, float eps, uint8_t *packets, int64_t stride, int64_t offset) {
  in_use->table->activity_refresh(state, state_dtype, shift, first_word, shard_words, shards, period, phase, eps, packets, stride, offset);
}

void thinwire_vote_bit(const uint8_t *rows, int64_t stride, int64_t n, const uint64_t *active, int64_t first_word, int64_t words,
                       uint64_t *answer, uint64_t key, int64_t *signal) {
  in_use->table->vote_bit(rows, stride, n, active, first_word, words, answer, key, signal);
}

void thinwire_vote_majority(const uint8_t *rows, int64_t stride, int64_t n, const uint64_t *active, int64_t words, uint64_t *answer,
                            int64_t casting, int64_t *signal) {
  in_use->table->vote_majority(rows, stride, n, active, words, answer, casting, signal);
}

void thinwire_vote_count(const uint8_t *rows, int64_t stride, int64_t n, const uint64_t *active, int64_t words, int64_t planes,
                         uint64_t *answer, int64_t *signal) {
  in_use->table->vote_count(rows, stride, n, active, words, planes, answer, signal);
}

void thinwire_adopt(uint64_t *active, int64_t first_word, int64_t shard_words, int64_t shards, const uint8_t *answers, int64_t stride,
                    int64_t planes, int64_t period, int64_t phase) {
  in_use->table->adopt(active, first_word, shard_words, shards, answers, stride, planes, period, phase);
}

void thinwire_birder_apply(const thinwire_run *runs, int64_t n_runs, float *x, void *low, int low_dtype, const uint64_t *active,
                           const uint8_t *answers, int64_t planes, int64_t workers, float rate, float decay) {
  in_use->table->birder_apply(runs, n_runs, x, low, low_dtype, active, answers, planes, workers, rate, decay);
}

void thinwire_dense_apply(const thinwire_run *runs, int64_t n_runs, float *x, void *low, int low_dtype, const uint8_t *answers, float lr,
                          float decay) {
  in_use->table->dense_apply(runs, n_runs, x, low, low_dtype, answers, lr, decay);
}

int thinwire_dense_encode(const thinwire_run *runs, int64_t n_runs, const void *grad, int grad_dtype, uint8_t *packets, float scale,
                          float largest) {
  return in_use->table->dense_encode(runs, n_runs, grad, grad_dtype, packets, scale, largest);
}

double thinwire_square_sum(const float *values, int64_t count) { return in_use->table->square_sum(values, count); }

void thinwire_precondition(float *v, int64_t count, float correction, float floor, float eps) {
  in_use->table->precondition(v, count, correction, floor, eps);
}

double thinwire_adam_apply(const thinwire_run *runs, int64_t n_runs, float *x, void *low, int low_dtype, float *m, float *v,
                           const void *gradient, const float *scales, float beta1, float one_minus_beta1, float beta2,
                           float one_minus_beta2, float eps, float rate, float correction, float decay, int update_variance) {
  return in_use->table->adam_apply(runs, n_runs, x, low, low_dtype, m, v, gradient, scales, beta1, one_minus_beta1, beta2, one_minus_beta2,
                                   eps, rate, correction, decay, update_variance);
}

int thinwire_sign_encode(const thinwire_run *runs, int64_t n_runs, const void *grad, int grad_dtype, void *c, int state_dtype,
                         int64_t shift, const uint64_t *heard, uint8_t *packets, const float *sent_scales, const float *heard_scales,
                         double *sums, float beta, float weight, float scale) {
  return in_use->table->sign_encode(runs, n_runs, grad, grad_dtype, c, state_dtype, shift, heard, packets, sent_scales, heard_scales, sums,
                                    beta, weight, scale);
}

void thinwire_sign_merge(const thinwire_run *runs, int64_t n_runs, const uint8_t *rows, int64_t stride, int64_t n_rows, void *y,
                         int state_dtype, int64_t shift, uint8_t *answer, const float *scales, float last_scale, double *sums) {
  in_use->table->sign_merge(runs, n_runs, rows, stride, n_rows, y, state_dtype, shift, answer, scales, last_scale, sums);
}

void thinwire_sign_apply(const thinwire_run *runs, int64_t n_runs, float *x, void *low, int low_dtype, const float *p,
                         const uint64_t *heard, const float *scales, float rate, float decay, const float *anchor, float *m,
                         float momentum) {
  in_use->table->sign_apply(runs, n_runs, x, low, low_dtype, p, heard, scales, rate, decay, anchor, m, momentum);
}

int thinwire_momentum_encode(const thinwire_run *runs, int64_t n_runs, const void *grad, int grad_dtype, float *m, void *c, int state_dtype,
                             int64_t shift, uint8_t *packets, const float *sent_scales, double *sums, float beta, float weight, float scale,
                             float rate, int output) {
  return in_use->table->momentum_encode(runs, n_runs, grad, grad_dtype, m, c, state_dtype, shift, packets, sent_scales, sums, beta, weight,
                                        scale, rate, output);
}

void thinwire_step_apply(const thinwire_run *runs, int64_t n_runs, float *x, void *low, int low_dtype, const float *p,
                         const uint8_t *values, float rate, float decay, float *anchor) {
  in_use->table->step_apply(runs, n_runs, x, low, low_dtype, p, values, rate, decay, anchor);
}

void thinwire_lamb_measure(const thinwire_run *runs, int64_t n_runs, float *x, void *low, int low_dtype, float *m, float *v,
                           const uint8_t *gradient, float beta1, float one_minus_beta1, float beta2, float one_minus_beta2, float eps,
                           float unbias, float correction, float weight_decay, double *sums) {
  in_use->table->lamb_measure(runs, n_runs, x, low, low_dtype, m, v, gradient, beta1, one_minus_beta1, beta2, one_minus_beta2, eps, unbias,
                              correction, weight_decay, sums);
}

void thinwire_lamb_apply(const thinwire_run *runs, int64_t n_runs, float *x, void *low, int low_dtype, const float *m, const float *v,
                         float eps, float unbias, float correction, float weight_decay, float rate) {
  in_use->table->lamb_apply(runs, n_runs, x, low, low_dtype, m, v, eps, unbias, correction, weight_decay, rate);
}

void thinwire_onebit_lamb_measure(const thinwire_run *runs, int64_t n_runs, float *x, void *low, int low_dtype, const float *p, float *w,
                                  const uint64_t *heard, const float *scales, const uint64_t *before, const float *scales_before,
                                  float shrink, float beta1, float inverse, float beta2, float one_minus_beta2, float eps, float unbias,
                                  float weight_decay, double *sums) {
  in_use->table->onebit_lamb_measure(runs, n_runs, x, low, low_dtype, p, w, heard, scales, before, scales_before, shrink, beta1, inverse,
                                     beta2, one_minus_beta2, eps, unbias, weight_decay, sums);
}

int thinwire_markov_encode(const thinwire_run *runs, int64_t n_runs, const void *grad, int grad_dtype, float *m, float *known,
                           int64_t shift, uint64_t *said, uint8_t *busy, const uint64_t *spoke, const uint64_t *active, uint8_t *packets,
                           const float *sent_scales, double *sums, float beta, float weight, float scale, float largest, int mode) {
  return in_use->table->markov_encode(runs, n_runs, grad, grad_dtype, m, known, shift, said, busy, spoke, active, packets, sent_scales,
                                      sums, beta, weight, scale, largest, mode);
}

void thinwire_markov_merge(const thinwire_run *runs, int64_t n_runs, const uint8_t *rows, int64_t stride, int64_t n_rows, float *mean,
                           int64_t shift, const float *g, const uint64_t *active, uint8_t *answer, const float *scales, double *sums) {
  in_use->table->markov_merge(runs, n_runs, rows, stride, n_rows, mean, shift, g, active, answer, scales, sums);
}

int thinwire_markov_difference(const thinwire_run *runs, int64_t n_runs, const void *grad, int grad_dtype, float *m, const float *known,
                               float *c, int64_t shift, float beta, float weight, float scale, float largest) {
  return in_use->table->markov_difference(runs, n_runs, grad, grad_dtype, m, known, c, shift, beta, weight, scale, largest);
}

void thinwire_amsgrad_apply(const thinwire_run *runs, int64_t n_runs, float *x, void *low, int low_dtype, float *g, float *m, float *v,
                            float *peak, const uint8_t *packets, const float *scales, const uint64_t *active, float beta1,
                            float one_minus_beta1, float beta2, float one_minus_beta2, float eps, float rate, float correction, float decay,
                            int source) {
  in_use->table->amsgrad_apply(runs, n_runs, x, low, low_dtype, g, m, v, peak, packets, scales, active, beta1, one_minus_beta1, beta2,
                               one_minus_beta2, eps, rate, correction, decay, source);
}

int thinwire_momentum_sum(const thinwire_run *runs, int64_t n_runs, const void *grad, int grad_dtype, float *m, float *e, float *g,
                          int64_t shift, float beta, float weight, float scale, float ratio, float largest) {
  return in_use->table->momentum_sum(runs, n_runs, grad, grad_dtype, m, e, g, shift, beta, weight, scale, ratio, largest);
}

int thinwire_sparse_amsgrad(float *x, int64_t count, void *low, int low_dtype, float *v, float *peak, const int32_t *indices,
                            const float *momenta, const float *gradients, int64_t k, int64_t first, float beta2, float one_minus_beta2,
                            float eps, float rate, float decay) {
  return in_use->table->sparse_amsgrad(x, count, low, low_dtype, v, peak, indices, momenta, gradients, k, first, beta2, one_minus_beta2,
                                       eps, rate, decay);
}

void thinwire_top_k(const float *values, int64_t count, int64_t k, int32_t *indices, uint64_t *scratch) {
  in_use->table->top_k(values, count, k, indices, scratch);
}

int thinwire_sparse_add(float *values, int64_t count, const int32_t *indices, const float *amounts, int64_t k, float weight) {
  return in_use->table->sparse_add(values, count, indices, amounts, k, weight);
}

void thinwire_sketch_add(const float *values, int64_t first, int64_t count, float *table, int64_t rows, int64_t columns,
                         const int64_t *coefficients) {
  in_use->table->sketch_add(values, first, count, table, rows, columns, coefficients);
}

void thinwire_sketch_estimate(const float *table, int64_t rows, int64_t columns, const int64_t *coefficients, int64_t first, int64_t count,
                              float weight, float *values) {
  in_use->table->sketch_estimate(table, rows, columns, coefficients, first, count, weight, values);
}

void thinwire_sketch_top_k(const float *table, int64_t rows, int64_t columns, const int64_t *coefficients, const float *peak,
                           const int64_t *ranges, int64_t n_ranges, int64_t k, int32_t *indices, uint64_t *scratch) {
  in_use->table->sketch_top_k(table, rows, columns, coefficients, peak, ranges, n_ranges, k, indices, scratch);
}

uint32_t thinwire_crc32c(const uint8_t *data, int64_t count, uint32_t crc) { return in_use->table->crc32c(data, count, crc); }

}  // extern "C"
