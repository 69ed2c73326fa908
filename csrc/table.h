// One table of kernels per instruction set; dispatch.cpp picks one at run time.
#ifndef THINWIRE_TABLE_H
#define THINWIRE_TABLE_H

#include "thinwire.h"

struct thinwire_table {
  decltype(&thinwire_birder_encode) birder_encode;
  decltype(&thinwire_birder_direction) birder_direction;
  decltype(&thinwire_mean) mean;
  decltype(&thinwire_roll_call) roll_call;
  decltype(&thinwire_vote_bit) vote_bit;
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
};

#endif
