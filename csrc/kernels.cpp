// All kernels for one instruction set. CMake compiles this file once per set, with its flags and its name in
// THINWIRE_ISA; nothing but the table leaves the file.

#include <cstddef>

#include "scalar.h"
#include "thinwire.h"
#include "word.h"

#include "adam.inc"
#include "amsgrad.inc"
#include "birder.inc"
#include "crc.inc"
#include "dense.inc"
#include "lamb.inc"
#include "markov.inc"
#include "quantize.inc"
#include "sign.inc"
#include "top_k.inc"
#include "vote.inc"

#include "sketch.inc"  // selects with top_k.inc

#define THINWIRE_JOIN_(a, b) a##b
#define THINWIRE_JOIN(a, b) THINWIRE_JOIN_(a, b)

extern const thinwire_kernels THINWIRE_JOIN(thinwire_kernels_, THINWIRE_ISA);
const thinwire_kernels THINWIRE_JOIN(thinwire_kernels_, THINWIRE_ISA) = {
#define THINWIRE_KERNEL(result, name, parameters) name,
#include "kernels.def"
#undef THINWIRE_KERNEL
};
