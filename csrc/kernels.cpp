// The kernels of one file (sign.inc, ...) for one instruction set. CMake compiles this once for each pair, with the flags
// of the set: compilers take most of their time for a few of the files, and so they work on several at once.
//
// Nothing but a table leaves: the kernels that the file defines, and null for all others. table.cpp joins the tables of
// all files. CMake defines
//   THINWIRE_FILE   the file, in quotes
//   THINWIRE_TABLE  the name of the table

#include <cstddef>

#include "scalar.h"
#include "thinwire.h"
#include "word.h"

#if defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>  // for crc.inc, which is included in a namespace
#endif

extern const thinwire_kernels THINWIRE_TABLE;

// A name that is not found in the inner namespace, where the file defines its kernels, is found in the outer one.
namespace in_other_files {
#define THINWIRE_KERNEL(result, name, parameters, ...) [[maybe_unused]] constexpr std::nullptr_t name = nullptr;
#include "kernels.def"
#undef THINWIRE_KERNEL

namespace in_this_file {
#include THINWIRE_FILE

constexpr thinwire_kernels kTable = {
#define THINWIRE_KERNEL(result, name, parameters, ...) name,
#include "kernels.def"
#undef THINWIRE_KERNEL
};
}  // namespace in_this_file
}  // namespace in_other_files

const thinwire_kernels THINWIRE_TABLE = in_other_files::in_this_file::kTable;
