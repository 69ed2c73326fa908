// The one pool of a process. Its threads belong to no call: they wait, take part in one call after another, and end with
// the process. They are detached, and nothing here has a destructor: at exit there is nothing to join or to free.
//
// pthreads instead of std::thread: that throws when a thread cannot be made, and needs libstdc++, which the library
// otherwise does not.

#include "pool.h"

#include <pthread.h>

// glibc 2.34 moved this function, and a library that is linked there would need that version. The function of before, which
// later versions still have, is the same.
#if defined(__GLIBC__) && !defined(__SANITIZE_THREAD__)
#if defined(__x86_64__) && !defined(__ILP32__)
__asm__(".symver pthread_create, pthread_create@GLIBC_2.2.5");
#elif defined(__aarch64__)
__asm__(".symver pthread_create, pthread_create@GLIBC_2.17");
#endif
#endif

namespace {

// A call that is under way. It lies on the stack of its caller. All but the first two is guarded by `guard`.
struct Call {
  void (*body)(void *);
  void *context;
  int wanted;       // helpers that may still join
  int helping = 0;  // helpers that have joined and not finished
  Call *next = nullptr;
};

pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t called = PTHREAD_COND_INITIALIZER;    // there is a call that wants helpers
pthread_cond_t finished = PTHREAD_COND_INITIALIZER;  // a call has no helpers any more
Call *calls = nullptr;                               // those that want helpers, oldest first
int threads = 0;
bool handles_fork = false;

void remove(const Call *call) {
  for (Call **at = &calls; *at; at = &(*at)->next)
    if (*at == call) {
      *at = call->next;
      return;
    }
}

void *help(void *) {
  pthread_mutex_lock(&guard);
  for (;;) {
    Call *call = calls;
    if (!call) {
      pthread_cond_wait(&called, &guard);
      continue;
    }
    if (--call->wanted == 0) remove(call);
    ++call->helping;
    pthread_mutex_unlock(&guard);
    call->body(call->context);
    pthread_mutex_lock(&guard);
    if (--call->helping == 0) pthread_cond_broadcast(&finished);
  }
}

void before_fork() { pthread_mutex_lock(&guard); }
void after_fork_in_parent() { pthread_mutex_unlock(&guard); }

// A child has only the thread that forked: neither the pool's threads nor those whose calls were under way.
void after_fork_in_child() {
  guard = PTHREAD_MUTEX_INITIALIZER;
  called = PTHREAD_COND_INITIALIZER;
  finished = PTHREAD_COND_INITIALIZER;
  calls = nullptr;
  threads = 0;
}

// Makes threads until there are `wanted`, or the system has no more.
void make_threads(int wanted) {
  if (!handles_fork) handles_fork = pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child) == 0;
  if (!handles_fork || threads >= wanted) return;
  pthread_attr_t detached;
  if (pthread_attr_init(&detached)) return;
  pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
  pthread_t thread;
  while (threads < wanted && pthread_create(&thread, &detached, help, nullptr) == 0) ++threads;
  pthread_attr_destroy(&detached);
}

}  // namespace

void thinwire::with_helpers(int helpers, void (*body)(void *), void *context) {
  Call call{body, context, helpers};
  if (helpers > 0) {
    pthread_mutex_lock(&guard);
    make_threads(helpers);
    Call **last = &calls;
    while (*last) last = &(*last)->next;
    *last = &call;
    for (int i = 0; i < helpers && i < threads; ++i) pthread_cond_signal(&called);
    pthread_mutex_unlock(&guard);
  }
  body(context);
  if (helpers > 0) {
    pthread_mutex_lock(&guard);
    if (call.wanted) remove(&call);
    while (call.helping) pthread_cond_wait(&finished, &guard);
    pthread_mutex_unlock(&guard);
  }
}
