// The table of all kernels for one instruction set, joined from the tables of the files (kernels.cpp). It is compiled
// without the flags of the set, because it runs on every machine that loads the library. CMake defines
//   THINWIRE_TABLE  the name of the table
//   THINWIRE_PARTS  the tables of the files, as EACH(name) EACH(name) ...

#include <cstring>

#include "thinwire.h"

#define EACH(part) extern const thinwire_kernels part;
THINWIRE_PARTS
#undef EACH

namespace {

constexpr int kKernels = sizeof(thinwire_kernels) / sizeof(void (*)());

// A kernel that no file defines stays null: kernels/native/library.py refuses such a library.
thinwire_kernels joined() {
#define EACH(part) &part,
  const thinwire_kernels *const parts[] = {THINWIRE_PARTS};
#undef EACH
  void (*kernels[kKernels])() = {};
  for (const thinwire_kernels *part : parts) {
    void (*defined[kKernels])();
    std::memcpy(defined, part, sizeof defined);
    for (int i = 0; i < kKernels; ++i)
      if (defined[i]) kernels[i] = defined[i];
  }
  thinwire_kernels all;
  std::memcpy(&all, kernels, sizeof all);
  return all;
}

}  // namespace

extern const thinwire_kernels THINWIRE_TABLE;
const thinwire_kernels THINWIRE_TABLE = joined();
