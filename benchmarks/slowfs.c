/* slowfs: a read-only FUSE filesystem that shows a directory, with scripted delays and errors.
 *
 *     slowfs SOURCE MOUNTPOINT [name=value ...]
 *
 * latency_us   delay of each read, beside those of the other reads in flight
 * rate         bytes per second of all reads together; 0: not limited
 * depth        reads that are served at the same time
 * max_read     largest read in bytes that the kernel may send
 * background   reads ahead and asynchronous direct reads that the kernel keeps in flight
 * no_direct    1: opening a file with O_DIRECT fails with EINVAL
 * error        errno of failing reads, from byte error_from of a file on, error_times times
 *
 * Prints "ready" when it is mounted; SIGTERM unmounts it. It speaks the kernel's protocol over
 * /dev/fuse, without libfuse. Only regular files and directories.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/fuse.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { MOST_NODES = 4096, HEADER_BYTES = 64 << 10 };

static struct { const char *name; long value; } options[] = {
    {"latency_us", 0}, {"rate", 0}, {"depth", 256}, {"max_read", 1 << 20}, {"background", 12},
    {"no_direct", 0}, {"error", 0}, {"error_from", 0}, {"error_times", -1},
};
enum { LATENCY, RATE, DEPTH, MAX_READ, BACKGROUND, NO_DIRECT, ERROR, ERROR_FROM, ERROR_TIMES };

static int device;
static const char *mountpoint;
static char *nodes[MOST_NODES] = {NULL, NULL}; /* paths by node; FUSE_ROOT_ID is 1 */
static int node_count = 2;
static long long free_at_ns; /* when the simulated link has sent all that was asked for */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static long long now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static void reply(const struct fuse_in_header *in, int error, const void *data, size_t length) {
    struct fuse_out_header out = {.len = sizeof out + length, .error = -error, .unique = in->unique};
    struct iovec parts[2] = {{&out, sizeof out}, {(void *)data, length}};
    if (writev(device, parts, 2) < 0 && errno != ENOENT && errno != ENODEV)
        perror("slowfs: reply");
}

static int node_of(const char *path) {
    int found = 0;
    pthread_mutex_lock(&lock);
    for (int i = 1; i < node_count && !found; i++)
        if (strcmp(nodes[i], path) == 0)
            found = i;
    if (!found && node_count < MOST_NODES) {
        nodes[node_count] = strdup(path);
        found = node_count++;
    }
    pthread_mutex_unlock(&lock);
    return found;
}

static int attributes(const char *path, struct fuse_attr *attr) {
    struct stat status;
    if (stat(path, &status) < 0)
        return errno;
    *attr = (struct fuse_attr){
        .ino = status.st_ino, .size = status.st_size, .blocks = status.st_blocks,
        .atime = status.st_atim.tv_sec, .atimensec = status.st_atim.tv_nsec,
        .mtime = status.st_mtim.tv_sec, .mtimensec = status.st_mtim.tv_nsec,
        .ctime = status.st_ctim.tv_sec, .ctimensec = status.st_ctim.tv_nsec,
        .mode = status.st_mode, .nlink = status.st_nlink, .uid = status.st_uid,
        .gid = status.st_gid, .blksize = 4096,
    };
    return 0;
}

static void lookup(const struct fuse_in_header *in, const char *name) {
    struct fuse_entry_out entry = {.entry_valid = 60, .attr_valid = 60};
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%s", nodes[in->nodeid], name);
    int error = attributes(path, &entry.attr);
    if (!error && !(entry.nodeid = node_of(path)))
        error = ENFILE;
    reply(in, error, &entry, error ? 0 : sizeof entry);
}

static void list(const struct fuse_in_header *in, const struct fuse_read_in *read) {
    char *answer = calloc(1, read->size);
    DIR *folder = opendir(nodes[in->nodeid]);
    size_t filled = 0;
    uint64_t number = 0;
    for (struct dirent *each; folder && (each = readdir(folder));) {
        size_t length = FUSE_DIRENT_ALIGN(FUSE_NAME_OFFSET + strlen(each->d_name));
        if (number++ < read->offset)
            continue;
        if (filled + length > read->size)
            break;
        struct fuse_dirent *entry = (struct fuse_dirent *)(answer + filled);
        entry->ino = each->d_ino;
        entry->off = number;
        entry->namelen = strlen(each->d_name);
        entry->type = each->d_type;
        memcpy(entry->name, each->d_name, entry->namelen);
        filled += length;
    }
    reply(in, folder ? 0 : errno, answer, filled);
    if (folder)
        closedir(folder);
    free(answer);
}

/* When the link has delivered a read that starts now. */
static long long due_ns(long length) {
    long long now = now_ns();
    pthread_mutex_lock(&lock);
    if (options[RATE].value) {
        if (free_at_ns < now)
            free_at_ns = now;
        free_at_ns += length * 1000000000LL / options[RATE].value;
        now = free_at_ns;
    }
    pthread_mutex_unlock(&lock);
    return now + options[LATENCY].value * 1000LL;
}

static int scripted_error(const struct fuse_read_in *read) {
    int error = 0;
    pthread_mutex_lock(&lock);
    if (options[ERROR].value && (long)(read->offset + read->size) > options[ERROR_FROM].value
        && options[ERROR_TIMES].value != 0) {
        options[ERROR_TIMES].value -= options[ERROR_TIMES].value > 0;
        error = options[ERROR].value;
    }
    pthread_mutex_unlock(&lock);
    return error;
}

static void read_file(const struct fuse_in_header *in, const struct fuse_read_in *read, char *room) {
    long long due = due_ns(read->size);
    int error = scripted_error(read);
    ssize_t got = error ? 0 : pread(read->fh, room, read->size, read->offset);
    if (got < 0)
        error = errno;
    struct timespec until = {due / 1000000000LL, due % 1000000000LL};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL) == EINTR)
        ;
    reply(in, error, room, error ? 0 : got);
}

static void open_file(const struct fuse_in_header *in, const struct fuse_open_in *wanted) {
    struct fuse_open_out opened = {.open_flags = FOPEN_KEEP_CACHE};
    int error = 0, fd = -1;
    if ((wanted->flags & O_ACCMODE) != O_RDONLY)
        error = EROFS;
    else if (wanted->flags & O_DIRECT && options[NO_DIRECT].value)
        error = EINVAL;
    else if ((fd = open(nodes[in->nodeid], O_RDONLY | O_CLOEXEC)) < 0)
        error = errno;
    opened.fh = fd;
    reply(in, error, &opened, error ? 0 : sizeof opened);
}

static void start(const struct fuse_in_header *in, const struct fuse_init_in *kernel) {
    struct fuse_init_out out = {
        .major = FUSE_KERNEL_VERSION, .minor = FUSE_KERNEL_MINOR_VERSION,
        .max_readahead = kernel->max_readahead, .max_write = 4096, .time_gran = 1,
        .flags = kernel->flags & (FUSE_ASYNC_READ | FUSE_ASYNC_DIO | FUSE_MAX_PAGES),
        .max_background = options[BACKGROUND].value,
        .congestion_threshold = options[BACKGROUND].value,
        .max_pages = options[MAX_READ].value / 4096,
    };
    reply(in, 0, &out, sizeof out);
}

static void answer(const struct fuse_in_header *in, const void *body, char *room) {
    struct fuse_attr_out attr = {.attr_valid = 60};
    struct fuse_statfs_out space = {{0}};
    struct fuse_open_out opened = {0};
    struct statfs below;
    int error;
    switch (in->opcode) {
    case FUSE_INIT:
        return start(in, body);
    case FUSE_LOOKUP:
        return lookup(in, body);
    case FUSE_GETATTR:
        error = attributes(nodes[in->nodeid], &attr.attr);
        return reply(in, error, &attr, error ? 0 : sizeof attr);
    case FUSE_OPEN:
        return open_file(in, body);
    case FUSE_READ:
        return read_file(in, body, room);
    case FUSE_RELEASE:
        close(((const struct fuse_release_in *)body)->fh);
        return reply(in, 0, NULL, 0);
    case FUSE_OPENDIR:
        return reply(in, 0, &opened, sizeof opened);
    case FUSE_READDIR:
        return list(in, body);
    case FUSE_STATFS:
        error = statfs(nodes[FUSE_ROOT_ID], &below) < 0 ? errno : 0;
        space.st.blocks = below.f_blocks, space.st.bsize = space.st.frsize = below.f_bsize;
        return reply(in, error, &space, error ? 0 : sizeof space);
    case FUSE_RELEASEDIR:
    case FUSE_FLUSH:
    case FUSE_DESTROY:
        return reply(in, 0, NULL, 0);
    case FUSE_FORGET:
    case FUSE_BATCH_FORGET:
    case FUSE_INTERRUPT: /* no answer is expected */
        return;
    default:
        reply(in, ENOSYS, NULL, 0);
    }
}

static void *serve(void *unused) {
    size_t room = options[MAX_READ].value + HEADER_BYTES;
    char *request = malloc(HEADER_BYTES + room), *data = request + HEADER_BYTES;
    while (request) {
        ssize_t got = read(device, request, HEADER_BYTES);
        if (got < 0 && errno != EINTR && errno != EAGAIN && errno != ENOENT)
            break; /* ENODEV: it was unmounted */
        if (got > 0)
            answer((struct fuse_in_header *)request, request + sizeof(struct fuse_in_header), data);
    }
    free(request);
    return unused;
}

static void leave(int signal) {
    (void)signal;
    umount2(mountpoint, MNT_DETACH);
    _exit(0);
}

int main(int count, char **words) {
    char how[200];
    if (count < 3)
        return fprintf(stderr, "usage: slowfs SOURCE MOUNTPOINT [name=value ...]\n"), 2;
    for (int i = 3; i < count; i++) {
        char *equals = strchr(words[i], '=');
        size_t known = sizeof options / sizeof *options, at = 0;
        while (equals && at < known && strncmp(words[i], options[at].name, equals - words[i]))
            at++;
        if (!equals || at == known)
            return fprintf(stderr, "slowfs: there is no option %s\n", words[i]), 2;
        options[at].value = atol(equals + 1);
    }
    nodes[FUSE_ROOT_ID] = realpath(words[1], NULL);
    mountpoint = words[2];
    device = open("/dev/fuse", O_RDWR | O_CLOEXEC);
    if (device < 0 || !nodes[FUSE_ROOT_ID])
        return perror("slowfs: /dev/fuse"), 1;
    snprintf(how, sizeof how, "fd=%d,rootmode=40000,user_id=0,group_id=0,allow_other,max_read=%ld",
             device, options[MAX_READ].value);
    if (mount("slowfs", mountpoint, "fuse.slowfs", MS_RDONLY | MS_NOSUID | MS_NODEV, how) < 0)
        return perror("slowfs: mount"), 1;
    signal(SIGTERM, leave);
    prctl(PR_SET_PDEATHSIG, SIGTERM); /* no mount stays behind a test that was killed */
    puts("ready");
    fflush(stdout);
    pthread_t thread;
    for (long i = 1; i < options[DEPTH].value; i++)
        if (pthread_create(&thread, NULL, serve, NULL))
            break;
    serve(NULL);
    return 0;
}
