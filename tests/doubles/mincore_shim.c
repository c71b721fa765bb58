/* A kernel whose mincore counts every mapped page as resident, as that of gVisor. */
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

__attribute__((visibility("default")))
int mincore(void *address, size_t length, unsigned char *vec)
{
    (void)address;
    memset(vec, 1, (length + sysconf(_SC_PAGESIZE) - 1) / sysconf(_SC_PAGESIZE));
    return 0;
}
