# Words that threads share without a lock. GCC's builtins, because Cython has no C11 atomics; the
# instructions are the same.

from libc.stdint cimport int64_t, uint8_t

cdef extern from * nogil:
    """
    #include <stdint.h>
    static inline int64_t gds_add(int64_t *word, int64_t by) {
        return __atomic_add_fetch(word, by, __ATOMIC_ACQ_REL);
    }
    static inline int64_t gds_load(int64_t *word) {
        return __atomic_load_n(word, __ATOMIC_ACQUIRE);
    }
    static inline void gds_store(int64_t *word, int64_t value) {
        __atomic_store_n(word, value, __ATOMIC_RELEASE);
    }
    static inline uint8_t gds_load_flag(uint8_t *flag) {
        return __atomic_load_n(flag, __ATOMIC_ACQUIRE);
    }
    static inline void gds_store_flag(uint8_t *flag, uint8_t value) {
        __atomic_store_n(flag, value, __ATOMIC_RELEASE);
    }
    /* Writes to a byte without changing it, also if other threads write to it. Volatile, or the
       compiler may use a load only. */
    static inline void gds_touch(volatile char *byte) {
        __atomic_fetch_or(byte, 0, __ATOMIC_RELAXED);
    }
    """
    int64_t gds_add(int64_t *word, int64_t by)
    int64_t gds_load(int64_t *word)
    void gds_store(int64_t *word, int64_t value)
    uint8_t gds_load_flag(uint8_t *flag)
    void gds_store_flag(uint8_t *flag, uint8_t value)
    void gds_touch(char *byte)
