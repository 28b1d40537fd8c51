/* Lets one call of a chosen kind fail, for tests: loaded before the C library (LD_PRELOAD), armed by `injector_arm`.
 *
 * A call counts where its kind is the armed one and its caller is: "ctypes", "ours" (that, and Python itself), or "llama"
 * (libllama, libggml and their C++ library). The nth such call since then fails with the armed errno, and
 * does nothing; with errno 0 calls are only counted. From the environment it is armed by INJECT="KIND CALLER NTH ERRNO",
 * and then the file INJECT_REPORT holds how many calls there were and what failed. Standard streams never fail.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/uio.h>
#include <unistd.h>

static char armed_kind[16], armed_caller[16], failed_name[32];
static volatile long armed_nth, seen;
static int armed_errno, is_armed;
static const char *report;

static int is_of(const void *caller)
{
    Dl_info info;
    if (!dladdr(caller, &info) || !info.dli_fname)
        return 0;
    const char *name = strrchr(info.dli_fname, '/');
    name = name ? name + 1 : info.dli_fname;
    if (!strcmp(armed_caller, "llama"))
        return strstr(name, "libllama") || strstr(name, "libggml") || strstr(name, "libstdc++");
    if (strstr(name, "libffi") || strstr(name, "_ctypes"))
        return 1;
    return !strcmp(armed_caller, "ours") && strstr(name, "python");
}

static int fails(const char *kind, const char *name, const void *caller)
{
    if (!is_armed || strcmp(kind, armed_kind) || !is_of(caller))
        return 0;
    if (__sync_add_and_fetch(&seen, 1) != armed_nth || !armed_errno)
        return 0;
    snprintf(failed_name, sizeof failed_name, "%s", name);
    errno = armed_errno;
    return 1;
}

void injector_arm(const char *kind, const char *caller, long nth, int error)
{
    is_armed = 0;
    snprintf(armed_kind, sizeof armed_kind, "%s", kind);
    snprintf(armed_caller, sizeof armed_caller, "%s", caller);
    armed_nth = nth, armed_errno = error, seen = 0, failed_name[0] = 0;
    __sync_synchronize();
    is_armed = 1;
}

long injector_disarm(void)
{
    is_armed = 0;
    return seen;
}

const char *injector_failed(void)
{
    return failed_name;
}

__attribute__((constructor)) static void begin(void)
{
    const char *wish = getenv("INJECT");
    char kind[16], caller[16];
    long nth;
    int error;
    report = getenv("INJECT_REPORT");
    unsetenv("INJECT"); /* children are spared */
    if (wish && sscanf(wish, "%15s %15s %ld %d", kind, caller, &nth, &error) == 4)
        injector_arm(kind, caller, nth, error);
}

__attribute__((destructor)) static void end(void)
{
    is_armed = 0;
    FILE *file = report ? fopen(report, "w") : NULL;
    if (file)
        fprintf(file, "%ld %s\n", seen, failed_name), fclose(file);
}

#define REAL(name) \
    static __typeof__(name) *real; \
    if (!real) \
        real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)
#define CALLER __builtin_return_address(0)

#define WRAP(kind, result, name, parameters, arguments, bad) \
    result name parameters \
    { \
        REAL(name); \
        return fails(kind, #name, CALLER) ? bad : real arguments; \
    }
#define WRAP_FILE(kind, result, name, parameters, arguments, bad) \
    result name parameters \
    { \
        REAL(name); \
        return fd > 2 && fails(kind, #name, CALLER) ? bad : real arguments; \
    }
#define WRAP_OPEN(name, parameters, arguments) \
    int name parameters \
    { \
        REAL(name); \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest); \
        return fails("open", #name, CALLER) ? -1 : real arguments; \
    }

WRAP_OPEN(open, (const char *path, int flags, ...), (path, flags, mode))
WRAP_OPEN(open64, (const char *path, int flags, ...), (path, flags, mode))
WRAP_OPEN(openat, (int folder, const char *path, int flags, ...), (folder, path, flags, mode))
WRAP_OPEN(openat64, (int folder, const char *path, int flags, ...), (folder, path, flags, mode))
WRAP("open", FILE *, fopen, (const char *path, const char *mode), (path, mode), NULL)
WRAP("open", FILE *, fopen64, (const char *path, const char *mode), (path, mode), NULL)
WRAP("open", DIR *, opendir, (const char *path), (path), NULL)
WRAP("open", int, memfd_create, (const char *name, unsigned flags), (name, flags), -1)
WRAP("open", int, pipe2, (int ends[2], int flags), (ends, flags), -1)

WRAP_FILE("read", ssize_t, read, (int fd, void *to, size_t n), (fd, to, n), -1)
WRAP_FILE("read", ssize_t, pread, (int fd, void *to, size_t n, off_t at), (fd, to, n, at), -1)
WRAP_FILE("read", ssize_t, pread64, (int fd, void *to, size_t n, off64_t at), (fd, to, n, at), -1)
WRAP_FILE("read", ssize_t, preadv, (int fd, const struct iovec *to, int n, off_t at), (fd, to, n, at), -1)
WRAP_FILE("read", ssize_t, preadv64, (int fd, const struct iovec *to, int n, off64_t at), (fd, to, n, at), -1)
WRAP_FILE("read", ssize_t, preadv2, (int fd, const struct iovec *to, int n, off_t at, int how), (fd, to, n, at, how), -1)
WRAP_FILE("read", ssize_t, preadv64v2, (int fd, const struct iovec *to, int n, off64_t at, int how), (fd, to, n, at, how), -1)
WRAP("read", size_t, fread, (void *to, size_t size, size_t n, FILE *file), (to, size, n, file), 0)
WRAP("read", int, fseeko, (FILE *file, off_t at, int from), (file, at, from), -1)
WRAP_FILE("read", int, fstat64, (int fd, struct stat64 *to), (fd, to), -1)
WRAP("read", int, stat64, (const char *path, struct stat64 *to), (path, to), -1)

WRAP_FILE("write", ssize_t, write, (int fd, const void *from, size_t n), (fd, from, n), -1)
WRAP_FILE("write", ssize_t, pwrite64, (int fd, const void *from, size_t n, off64_t at), (fd, from, n, at), -1)
WRAP_FILE("write", ssize_t, pwritev, (int fd, const struct iovec *from, int n, off_t at), (fd, from, n, at), -1)
WRAP_FILE("write", ssize_t, pwritev64, (int fd, const struct iovec *from, int n, off64_t at), (fd, from, n, at), -1)
WRAP_FILE("write", ssize_t, pwritev2, (int fd, const struct iovec *from, int n, off_t at, int how), (fd, from, n, at, how), -1)
WRAP_FILE("write", ssize_t, pwritev64v2, (int fd, const struct iovec *from, int n, off64_t at, int how), (fd, from, n, at, how), -1)
WRAP_FILE("write", int, ftruncate64, (int fd, off64_t size), (fd, size), -1)
WRAP_FILE("write", int, fsync, (int fd), (fd), -1)
WRAP_FILE("write", int, fdatasync, (int fd), (fd), -1)
WRAP_FILE("write", int, flock, (int fd, int how), (fd, how), -1)
WRAP_FILE("write", int, fallocate64, (int fd, int how, off64_t at, off64_t n), (fd, how, at, n), -1)
WRAP("write", int, mkdir, (const char *path, mode_t mode), (path, mode), -1)
WRAP("write", int, rename, (const char *old, const char *new), (old, new), -1)

WRAP("map", void *, mmap, (void *at, size_t n, int may, int how, int fd, off_t from), (at, n, may, how, fd, from), MAP_FAILED)
WRAP("map", void *, mmap64, (void *at, size_t n, int may, int how, int fd, off64_t from), (at, n, may, how, fd, from), MAP_FAILED)
WRAP("map", int, madvise, (void *at, size_t n, int advice), (at, n, advice), -1)
WRAP("map", int, mincore, (void *at, size_t n, unsigned char *to), (at, n, to), -1)

void *mremap(void *old, size_t size, size_t new_size, int flags, ...)
{
    REAL(mremap);
    va_list rest;
    va_start(rest, flags);
    void *target = va_arg(rest, void *);
    va_end(rest);
    return fails("map", "mremap", CALLER) ? MAP_FAILED : real(old, size, new_size, flags, target);
}

int pthread_create(pthread_t *thread, const pthread_attr_t *how, void *(*run)(void *), void *of)
{
    REAL(pthread_create);
    return fails("thread", "pthread_create", CALLER) ? armed_errno : real(thread, how, run, of);
}

int posix_memalign(void **to, size_t alignment, size_t n)
{
    REAL(posix_memalign);
    return fails("heap", "posix_memalign", CALLER) ? armed_errno : real(to, alignment, n);
}

extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);

void *malloc(size_t n)
{
    return is_armed && fails("heap", "malloc", CALLER) ? NULL : __libc_malloc(n);
}

void *calloc(size_t n, size_t size)
{
    return is_armed && fails("heap", "calloc", CALLER) ? NULL : __libc_calloc(n, size);
}

void *realloc(void *old, size_t n)
{
    return is_armed && fails("heap", "realloc", CALLER) ? NULL : __libc_realloc(old, n);
}
