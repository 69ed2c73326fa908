// Threads that help a call of a kernel, made when a call first asks for them.
#ifndef THINWIRE_POOL_H
#define THINWIRE_POOL_H

namespace thinwire {

// Calls `body(context)` on this thread and on at most `helpers` others, and returns when all these calls have. Threads
// that are busy with another call, or that cannot be made, do not help: `body` takes its share of the work from `context`.
void with_helpers(int helpers, void (*body)(void *context), void *context);

}  // namespace thinwire

#endif
