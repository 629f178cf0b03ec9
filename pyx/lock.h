/* lock.h - the ledger's lock, which takes a few nanoseconds without contention.
 *
 * From Python 3.13 on it is the interpreter's PyMutex.  Before that, the interpreter's locks read
 * the clock at each acquisition, which costs a third of an ack; here it is a pthread mutex.  There
 * is one form for callers with the GIL, which releases it to wait, and one for callers without.  No
 * thread that has the lock acquires the GIL, so the two cannot deadlock.
 */
#ifndef ACKCORE_LOCK_H
#define ACKCORE_LOCK_H

#include <Python.h>

#if PY_VERSION_HEX >= 0x030D0000

typedef PyMutex lock_t;
static inline int lock_init(lock_t *lock) {
    *lock = (PyMutex){0};
    return 0;
}
static inline void lock_destroy(lock_t *lock) { (void)lock; }
static inline void lock_acquire_gil(lock_t *lock) { PyMutex_Lock(lock); }
static inline void lock_acquire_nogil(lock_t *lock) { PyMutex_Lock(lock); }
static inline void lock_release(lock_t *lock) { PyMutex_Unlock(lock); }

#else

#include <pthread.h>
/* Bind to the oldest version of this glibc symbol, so that wheels run on systems that are older
 * than the one that built them: 2.34 moved it from libpthread, unchanged. */
#if defined(__GLIBC__) && defined(__x86_64__) && !defined(__ILP32__)
__asm__(".symver pthread_mutex_trylock, pthread_mutex_trylock@GLIBC_2.2.5");
#elif defined(__GLIBC__) && defined(__aarch64__)
__asm__(".symver pthread_mutex_trylock, pthread_mutex_trylock@GLIBC_2.17");
#endif
typedef pthread_mutex_t lock_t;
static inline int lock_init(lock_t *lock) { return pthread_mutex_init(lock, NULL); }
static inline void lock_destroy(lock_t *lock) { pthread_mutex_destroy(lock); }
static inline void lock_acquire_nogil(lock_t *lock) { pthread_mutex_lock(lock); }
static inline void lock_acquire_gil(lock_t *lock) {
    if (pthread_mutex_trylock(lock) == 0) return;
    Py_BEGIN_ALLOW_THREADS
    pthread_mutex_lock(lock);
    Py_END_ALLOW_THREADS
}
static inline void lock_release(lock_t *lock) { pthread_mutex_unlock(lock); }

#endif
#endif
