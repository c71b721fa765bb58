/* One mistake of each kind. scripts/sanitize.py expects a report of each before it runs tests. */
#include <pthread.h>
#include <stdlib.h>

#define EXPORT __attribute__((visibility("default")))

static volatile int shared;

static void *write_shared(void *unused)
{
    (void)unused;
    for (int i = 0; i < 1000; i++) shared = i;
    return NULL;
}

/* Reads a byte behind a block. */
EXPORT void overrun(void)
{
    char *volatile block = malloc(8);
    volatile int offset = 8;
    shared = block[offset];
    free(block);
}

/* Adds one to the largest int. */
EXPORT void overflow(void)
{
    volatile int most = 0x7fffffff;
    shared = most + 1;
}

/* Forgets a block. */
EXPORT void leak(void)
{
    void *volatile block = malloc(1000);
    block = NULL;
    (void)block;
}

/* Two threads write to a variable without a lock. */
EXPORT void race(void)
{
    pthread_t other;
    if (pthread_create(&other, NULL, write_shared, NULL)) return;
    write_shared(NULL);
    pthread_join(other, NULL);
}
