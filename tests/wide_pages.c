/* Lets a process have pages of WIDE_PAGES bytes, for tests: loaded before the C library (LD_PRELOAD).
 *
 * Who asks is told so; mappings lie at multiples of it and are as long; and what is not aligned to it is refused, as a
 * kernel with such pages would. The C library's own allocator knows nothing of it, and so takes all memory from its
 * heap. Memory is still taken and freed in the kernel's pages.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <malloc.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

static size_t page = 4096;

#define REAL(name) \
    static __typeof__(name) *real; \
    if (!real) \
        real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)
#define REFUSE_UNALIGNED(address, result) \
    do { \
        if ((uintptr_t)(address) % page) { \
            errno = EINVAL; \
            return result; \
        } \
    } while (0)

static size_t whole(size_t length)
{
    return (length + page - 1) / page * page;
}

__attribute__((constructor)) static void begin(void)
{
    const char *wish = getenv("WIDE_PAGES");
    if (wish)
        page = strtoul(wish, NULL, 10);
    REAL(mallopt);
    real(M_MMAP_MAX, 0);
}

int mallopt(int option, int value)
{
    (void)option, (void)value;
    return 1;
}

int getpagesize(void)
{
    return (int)page;
}

long sysconf(int name)
{
    REAL(sysconf);
    return name == _SC_PAGESIZE ? (long)page : real(name);
}

void *mmap(void *address, size_t length, int protection, int flags, int descriptor, off_t offset)
{
    REFUSE_UNALIGNED(offset, MAP_FAILED);
    length = whole(length);
    if (flags & (MAP_FIXED | MAP_FIXED_NOREPLACE))
        REFUSE_UNALIGNED(address, MAP_FAILED);
    else if (length) {
        char *room = (char *)syscall(SYS_mmap, NULL, length + page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0L);
        if (room == MAP_FAILED)
            return MAP_FAILED;
        size_t before = (page - (uintptr_t)room % page) % page;
        syscall(SYS_munmap, room, length + page);
        address = room + before;
    }
    return (void *)syscall(SYS_mmap, address, length, protection, flags, descriptor, offset);
}

void *mmap64(void *address, size_t length, int protection, int flags, int descriptor, off64_t offset)
{
    return mmap(address, length, protection, flags, descriptor, offset);
}

int munmap(void *address, size_t length)
{
    REFUSE_UNALIGNED(address, -1);
    return (int)syscall(SYS_munmap, address, whole(length));
}

void *mremap(void *address, size_t length, size_t new_length, int flags, ...)
{
    va_list more;
    va_start(more, flags);
    void *target = flags & MREMAP_FIXED ? va_arg(more, void *) : NULL;
    va_end(more);
    REFUSE_UNALIGNED(address, MAP_FAILED);
    REFUSE_UNALIGNED(target, MAP_FAILED);
    return (void *)syscall(SYS_mremap, address, whole(length), whole(new_length), flags, target);
}

int madvise(void *address, size_t length, int advice)
{
    REFUSE_UNALIGNED(address, -1);
    return (int)syscall(SYS_madvise, address, whole(length), advice);
}

int mprotect(void *address, size_t length, int protection)
{
    REFUSE_UNALIGNED(address, -1);
    return (int)syscall(SYS_mprotect, address, whole(length), protection);
}

int mincore(void *address, size_t length, unsigned char *found)
{
    REFUSE_UNALIGNED(address, -1);
    for (size_t number = 0; number * page < length; number++) {
        unsigned char small[page / 4096];
        if (syscall(SYS_mincore, (char *)address + number * page, page, small))
            return -1;
        found[number] = memchr(small, 1, sizeof small) != NULL;
    }
    return 0;
}
