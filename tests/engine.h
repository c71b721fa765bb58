/* The interface between the pump and its engines (src/gdsload/_native/engine.pxd) in C, for the engines
 * of tests and benchmarks. */
#include <stdint.h>

struct read {
    int fd, file_number, buffer, io_mode;
    char *address;
    void *memory;
    uint64_t length, offset, cookie;
};
struct completion { uint64_t cookie; int64_t result; };
struct buffer { char *address; uint64_t length; };
struct ops {
    int (*open)(void **, void *, int, const struct buffer *, int);
    int (*submit)(void *, const struct read *, int);
    int (*reap)(void *, struct completion *, int, int, int64_t);
    void (*cancel)(void *);
    void (*close)(void *);
    int (*take_back)(void *);
};
