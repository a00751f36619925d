/* A bad file system and a bad clock for processes that preload this library (LD_PRELOAD).
 *
 * SO_TUI_FAULT_CONTROL names a file of sizeof(struct control) bytes, which every process maps. Whoever writes to that file changes what
 * happens in all of them at once: see shim.py.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

struct control {
    int64_t clock_offset_s;     /* added to the wall clock */
    int64_t locks;              /* 0: as they are; 1: flock fails; 2: flock succeeds and locks nothing */
    int64_t attributes_late_ms; /* sizes and times of files are up to this old; 0: current */
    char full[256];             /* writes to paths that contain this fail: the disk is full; empty: none */
    char unlocked[256];         /* locks of paths that contain this are not as they are */
    char late[256];             /* attributes of paths that contain this are late */
    char replaced[256];         /* every other first read of paths that contain this fails: the file was replaced */
};

static const struct control no_faults;
static const volatile struct control *control = &no_faults;

__attribute__((constructor)) static void map_control(void) {
    const char *path = getenv("SO_TUI_FAULT_CONTROL");
    int descriptor = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (descriptor < 0) return;
    void *mapped = mmap(NULL, sizeof(struct control), PROT_READ, MAP_SHARED, descriptor, 0);
    if (mapped != MAP_FAILED) control = mapped;
    close(descriptor);
}

#define REAL(name) ({ static __typeof__(&name) real; if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name); real; })

/* Return whether the path of a descriptor contains a text that is not empty. */
static int is_at(int descriptor, const volatile char *part) {
    char link[64], path[4096];
    if (!part[0]) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length <= 0) return 0;
    path[length] = 0;
    return strstr(path, (const char *)part) != NULL;
}

/* A full disk. */

/* Return whether a write only changes blocks that the file has: a full disk takes those. */
static int overwrites(int descriptor, size_t count, off_t offset) {
    struct stat found;
    if (offset < 0) offset = lseek(descriptor, 0, SEEK_CUR);
    if (fcntl(descriptor, F_GETFL) & O_APPEND || fstat(descriptor, &found)) return 0;
    return offset >= 0 && offset + (off_t)count <= found.st_size;
}

/* Return how much of a write still fits: a disk that fills up takes a part of the first one. */
static size_t fitting(size_t count) {
    static __thread unsigned calls;
    return calls++ % 2 ? 0 : count / 2;
}

#define FULL_OR(descriptor, count, offset, call, partial) \
    if (is_at(descriptor, control->full) && !overwrites(descriptor, count, offset)) { \
        size_t part = fitting(count); \
        if (part) return partial; \
        errno = ENOSPC; \
        return -1; \
    } \
    return call

ssize_t write(int descriptor, const void *bytes, size_t count) {
    FULL_OR(descriptor, count, -1, REAL(write)(descriptor, bytes, count), REAL(write)(descriptor, bytes, part));
}

ssize_t pwrite(int descriptor, const void *bytes, size_t count, off_t offset) {
    FULL_OR(descriptor, count, offset, REAL(pwrite)(descriptor, bytes, count, offset), REAL(pwrite)(descriptor, bytes, part, offset));
}

ssize_t pwrite64(int descriptor, const void *bytes, size_t count, off64_t offset) {
    FULL_OR(descriptor, count, offset, REAL(pwrite64)(descriptor, bytes, count, offset), REAL(pwrite64)(descriptor, bytes, part, offset));
}

/* Files that another host replaces: on a network file system the open one is gone then. */

ssize_t read(int descriptor, void *bytes, size_t count) {
    static __thread unsigned calls;
    if (is_at(descriptor, control->replaced) && lseek(descriptor, 0, SEEK_CUR) == 0 && calls++ % 2 == 0) {
        errno = ESTALE;
        return -1;
    }
    return REAL(read)(descriptor, bytes, count);
}

/* Locks. */

int flock(int descriptor, int operation) {
    if (!control->locks || !is_at(descriptor, control->unlocked)) return REAL(flock)(descriptor, operation);
    if (control->locks == 2) return 0;
    errno = ENOLCK;
    return -1;
}

/* The wall clock. */

int clock_gettime(clockid_t clock, struct timespec *now) {
    int result = REAL(clock_gettime)(clock, now);
    if (!result && clock == CLOCK_REALTIME) now->tv_sec += control->clock_offset_s;
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    int result = REAL(gettimeofday)(now, zone);
    if (!result) now->tv_sec += control->clock_offset_s;
    return result;
}

time_t time(time_t *result) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (result) *result = now.tv_sec;
    return now.tv_sec;
}

/* Late attributes: what a process learnt of a path stays true for it for a while, as with the attribute cache of a network file system. */

enum { REMEMBERED = 256 };
static struct memory {
    char path[512];
    int64_t until_ms;
    int error;
    struct stat found;
} memories[REMEMBERED];
static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER;

static int64_t now_ms(void) {
    struct timespec now;
    REAL(clock_gettime)(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static int late_stat(int folder, const char *path, struct stat *found, int flags) {
    if (!control->attributes_late_ms || folder != AT_FDCWD || !path || strlen(path) >= sizeof memories[0].path
        || !strstr(path, (const char *)control->late))
        return REAL(fstatat)(folder, path, found, flags);
    unsigned hash = flags;
    for (const char *c = path; *c; c++) hash = hash * 31 + (unsigned char)*c;
    struct memory *memory = &memories[hash % REMEMBERED];
    pthread_mutex_lock(&guard);
    if (strcmp(memory->path, path) || memory->until_ms < now_ms()) {
        strcpy(memory->path, path);
        memory->error = REAL(fstatat)(folder, path, &memory->found, flags) ? errno : 0;
        memory->until_ms = now_ms() + control->attributes_late_ms;
    }
    int error = memory->error;
    *found = memory->found;
    pthread_mutex_unlock(&guard);
    errno = error ? error : errno;
    return error ? -1 : 0;
}

int fstatat(int folder, const char *restrict path, struct stat *restrict found, int flags) { return late_stat(folder, path, found, flags); }
int fstatat64(int folder, const char *restrict path, struct stat64 *restrict found, int flags) {
    return late_stat(folder, path, (struct stat *)found, flags);
}
int stat(const char *restrict path, struct stat *restrict found) { return late_stat(AT_FDCWD, path, found, 0); }
int stat64(const char *restrict path, struct stat64 *restrict found) { return late_stat(AT_FDCWD, path, (struct stat *)found, 0); }
int lstat(const char *restrict path, struct stat *restrict found) { return late_stat(AT_FDCWD, path, found, AT_SYMLINK_NOFOLLOW); }
int lstat64(const char *restrict path, struct stat64 *restrict found) {
    return late_stat(AT_FDCWD, path, (struct stat *)found, AT_SYMLINK_NOFOLLOW);
}
