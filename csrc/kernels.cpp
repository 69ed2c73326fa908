// All kernels for one instruction set. CMake compiles this file once per set, with its flags and its name in
// THINWIRE_ISA; nothing but the table leaves the file.

#include <cstddef>

#include "scalar.h"
#include "table.h"
#include "word.h"

#include "adam.inc"
#include "amsgrad.inc"
#include "birder.inc"
#include "crc.inc"
#include "dense.inc"
#include "lamb.inc"
#include "markov.inc"
#include "sign.inc"
#include "top_k.inc"
#include "vote.inc"

#include "sketch.inc"  // selects with top_k.inc

#define THINWIRE_JOIN_(a, b) a##b
#define THINWIRE_JOIN(a, b) THINWIRE_JOIN_(a, b)

extern const thinwire_table THINWIRE_JOIN(thinwire_table_, THINWIRE_ISA);
const thinwire_table THINWIRE_JOIN(thinwire_table_, THINWIRE_ISA) = {
    birder_encode, birder_direction, mean, activity_refresh, vote_bit, vote_majority, vote_count, adopt, birder_apply, dense_apply, dense_encode,
    square_sum, precondition, adam_apply, sign_encode, sign_merge, sign_apply, momentum_encode, step_apply, lamb_measure, lamb_apply,
    onebit_lamb_measure, markov_encode, markov_merge, markov_difference, amsgrad_apply, momentum_sum, sparse_amsgrad, top_k, sparse_add,
    sketch_add, sketch_estimate, sketch_top_k, crc32c,
};
