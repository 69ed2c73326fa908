// One table of kernels per instruction set; dispatch.cpp picks one at run time.
#ifndef THINWIRE_TABLE_H
#define THINWIRE_TABLE_H

#include "thinwire.h"

struct thinwire_table {
  decltype(&thinwire_birder_encode) birder_encode;
  decltype(&thinwire_birder_direction) birder_direction;
  decltype(&thinwire_mean) mean;
  decltype(&thinwire_activity_refresh) activity_refresh;
  decltype(&thinwire_vote_bit) vote_bit;
  decltype(&thinwire_vote_majority) vote_majority;
  decltype(&thinwire_vote_count) vote_count;
  decltype(&thinwire_adopt) adopt;
  decltype(&thinwire_birder_apply) birder_apply;
  decltype(&thinwire_dense_apply) dense_apply;
  decltype(&thinwire_dense_encode) dense_encode;
  decltype(&thinwire_square_sum) square_sum;
  decltype(&thinwire_precondition) precondition;
  decltype(&thinwire_adam_apply) adam_apply;
  decltype(&thinwire_sign_encode) sign_encode;
  decltype(&thinwire_sign_merge) sign_merge;
  decltype(&thinwire_sign_apply) sign_apply;
  decltype(&thinwire_momentum_encode) momentum_encode;
  decltype(&thinwire_step_apply) step_apply;
  decltype(&thinwire_lamb_measure) lamb_measure;
  decltype(&thinwire_lamb_apply) lamb_apply;
  decltype(&thinwire_onebit_lamb_measure) onebit_lamb_measure;
  decltype(&thinwire_markov_encode) markov_encode;
  decltype(&thinwire_markov_merge) markov_merge;
  decltype(&thinwire_markov_difference) markov_difference;
  decltype(&thinwire_amsgrad_apply) amsgrad_apply;
  decltype(&thinwire_momentum_sum) momentum_sum;
  decltype(&thinwire_sparse_amsgrad) sparse_amsgrad;
  decltype(&thinwire_top_k) top_k;
  decltype(&thinwire_sparse_add) sparse_add;
  decltype(&thinwire_sketch_add) sketch_add;
  decltype(&thinwire_sketch_estimate) sketch_estimate;
  decltype(&thinwire_sketch_top_k) sketch_top_k;
  decltype(&thinwire_crc32c) crc32c;
};

#endif
