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
};

#endif
