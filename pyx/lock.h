/* lock.h - the ledger's lock: uncontended it costs a few nanoseconds.
 *
 * From Python 3.13 on it is the interpreter's PyMutex.  Before, the interpreter's locks read the
 * clock each time they are taken, which costs a third of a whole ack; here it is the system's.
 * Who holds the GIL tries first and waits without it: the holder of the lock never needs it.
 */
#ifndef ACKCORE_LOCK_H
#define ACKCORE_LOCK_H

#include <Python.h>

#if PY_VERSION_HEX >= 0x030D0000

typedef PyMutex lock_t;
static inline int lock_open(lock_t *lock) {
    *lock = (PyMutex){0};
    return 0;
}
static inline void lock_close(lock_t *lock) { (void)lock; }
static inline void lock_hold(lock_t *lock) { PyMutex_Lock(lock); }
static inline void lock_wait(lock_t *lock) { PyMutex_Lock(lock); }
static inline void lock_free(lock_t *lock) { PyMutex_Unlock(lock); }

#else

#include <pthread.h>
typedef pthread_mutex_t lock_t;
static inline int lock_open(lock_t *lock) { return pthread_mutex_init(lock, NULL); }
static inline void lock_close(lock_t *lock) { pthread_mutex_destroy(lock); }
static inline void lock_wait(lock_t *lock) { pthread_mutex_lock(lock); } /* without the GIL */
static inline void lock_hold(lock_t *lock) {                            /* with the GIL */
    if (pthread_mutex_trylock(lock) == 0) return;
    Py_BEGIN_ALLOW_THREADS
    pthread_mutex_lock(lock);
    Py_END_ALLOW_THREADS
}
static inline void lock_free(lock_t *lock) { pthread_mutex_unlock(lock); }

#endif
#endif
