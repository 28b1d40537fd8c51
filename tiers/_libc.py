"""Calls of the C library that Python does not offer: mappings above all, and of files, the page cache and the heap.

One of the two files with ctypes. Addresses and lengths are integers of bytes, page-aligned where the kernel wants them
so. Every call raises OSError with the kernel's errno. Linux only; elsewhere this can be imported, every call raises
OSError, and `why_unavailable()` says why.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import mmap
import os
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

from edge_run.base.errors import reason_of

PAGE = mmap.PAGESIZE

PROT_NONE, PROT_READ, PROT_READ_WRITE = 0, 1, 3
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS, _MAP_NORESERVE = 0x01, 0x02, 0x10, 0x20, 0x4000
_MREMAP_MAYMOVE, _MREMAP_FIXED, _MREMAP_DONTUNMAP = 1, 2, 4
_MADV_DONTNEED, _MADV_DONTFORK, _MADV_HUGEPAGE, _MADV_NOHUGEPAGE, _MADV_DONTDUMP = 4, 10, 14, 15, 16
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE, _MADV_COLLAPSE = 22, 23, 25  # since Linux 5.14, and 6.1

_M_MMAP_THRESHOLD = -3
_KEEP_SIZE, _PUNCH_HOLE = 0x01, 0x02
_MFD_CLOEXEC = 0x01
_CACHESTAT = 451  # the number of that system call, on every architecture; since Linux 6.5


def _open() -> Any:
    """Return the C library on Linux, else None: elsewhere the flags below mean something else."""
    try:
        found = ctypes.CDLL(None, use_errno=True)
    except (OSError, TypeError):  # Windows has no library without a name
        return None
    return found if hasattr(found, "mremap") else None


_C = _open()


def _function(name: str, *types: Any, result: Any = ctypes.c_int) -> Any:
    """Return the C library's function `name`; where there is none, a function that raises OSError."""
    function = getattr(_C, name, None)
    if function is None:
        return functools.partial(_missing, name)
    function.restype, function.argtypes = result, types
    return function


def _missing(name: str, *_: object) -> NoReturn:
    raise OSError(errno.ENOSYS, f"{name}: {os.strerror(errno.ENOSYS)}")


_ADDRESS, _LENGTH, _INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_mmap = _function("mmap", _ADDRESS, _LENGTH, _INT, _INT, _INT, ctypes.c_long, result=_ADDRESS)
_munmap = _function("munmap", _ADDRESS, _LENGTH)
_mremap = _function("mremap", _ADDRESS, _LENGTH, _LENGTH, _INT, _ADDRESS, result=_ADDRESS)
_mincore = _function("mincore", _ADDRESS, _LENGTH, _ADDRESS)
_syscall = _function("syscall", ctypes.c_long, _INT, _ADDRESS, _ADDRESS, _INT, result=ctypes.c_long)
_madvise = _function("madvise", _ADDRESS, _LENGTH, _INT)
_memfd_create = _function("memfd_create", ctypes.c_char_p, ctypes.c_uint)
_has_64 = hasattr(_C, "fallocate64")  # musl has only the other one
_fallocate = _function("fallocate64" if _has_64 else "fallocate", _INT, _INT, ctypes.c_int64, ctypes.c_int64)


class _HeapUse(ctypes.Structure):
    """What mallinfo2 returns; of it, what is free in heaps matters here."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks free_bytes keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


_mallinfo = _function("mallinfo2", result=_HeapUse)
_malloc = _function("malloc", _LENGTH, result=_ADDRESS)
_free = _function("free", _ADDRESS, result=None)

_FAILED = (-1, ctypes.c_void_p(-1).value, None)  # of calls that return a code, and an address


def _checked(result: int, what: str) -> int:
    if result in _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def map_anonymous(length: int, protection: int = PROT_READ_WRITE, at: int | None = None) -> int:
    """Map `length` bytes of zeros and return their address; with `at`, replace whatever was mapped there."""
    flags = _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE | (_MAP_FIXED if at is not None else 0)
    return _checked(_mmap(at, length, protection, flags, -1, 0), f"mmap of {length} bytes")


def map_shared(descriptor: int, length: int, at: int) -> None:
    """Map the first `length` bytes of a file exactly at `at`, over whatever was mapped: who writes there writes it."""
    flags = _MAP_SHARED | _MAP_FIXED
    _checked(_mmap(at, length, PROT_READ_WRITE, flags, descriptor, 0), f"mmap of {length} bytes of a file")


def map_file(descriptor: int, length: int, offset: int = 0, at: int | None = None) -> int:
    """Map `length` bytes of a file for reading, and return their address; nothing is read.

    at: replace whatever was mapped there.
    """
    flags = _MAP_SHARED | (_MAP_FIXED if at is not None else 0)
    return _checked(_mmap(at, length, PROT_READ, flags, descriptor, offset), f"mmap of {length} bytes of a file")


def populate(address: int, length: int) -> bool:
    """Bring all pages of a mapped range to memory; a page that cannot be read is an error here, and no signal.

    Return whether the kernel can: one before Linux 5.14 cannot.
    """
    try:
        _checked(_madvise(address, length, _MADV_POPULATE_READ), f"madvise of {length} bytes")
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return True


def unmap(address: int, length: int) -> None:
    """Give the range back to the kernel."""
    _checked(_munmap(address, length), f"munmap of {length} bytes")


def move_pages(source: int, target: int, length: int) -> None:
    """Move the pages of `source` to `target` without copying. `source` stays mapped, empty."""
    flags = _MREMAP_MAYMOVE | _MREMAP_FIXED | _MREMAP_DONTUNMAP
    _checked(_mremap(source, length, length, flags, target), f"mremap of {length} bytes")


def drop_pages(address: int, length: int) -> None:
    """Free the pages of an anonymous range, which reads as zeros afterwards."""
    _checked(_madvise(address, length, _MADV_DONTNEED), f"madvise of {length} bytes")


def resident_bytes(address: int, length: int) -> int:
    """Return how much of a range is in memory."""
    pages = (ctypes.c_ubyte * -(-length // PAGE))()
    _checked(_mincore(address, length, pages), f"mincore of {length} bytes")
    return PAGE * (len(pages) - bytes(pages).count(0))


def cached_bytes(descriptor: int, offset: int, length: int) -> int:
    """Return how much of a range of a file is in the page cache, in whole pages."""
    asked, found = (ctypes.c_uint64 * 2)(offset, length), (ctypes.c_uint64 * 5)()
    _checked(_syscall(_CACHESTAT, descriptor, asked, found, 0), f"cachestat of {length} bytes")
    return PAGE * int(found[0])


def memory_file(name: str) -> int:
    """Make an empty file in memory, and return its descriptor. Raises OSError.

    A Python that was built for an older C library, as Conda's, has no such function of its own.
    """
    return _checked(_memfd_create(name.encode(), _MFD_CLOEXEC), "memfd_create")


def punch_hole(descriptor: int, offset: int, length: int) -> None:
    """Free the whole disk blocks in a range of a file, which read as zeros afterwards; the file keeps its length."""
    _checked(_fallocate(descriptor, _KEEP_SIZE | _PUNCH_HOLE, offset, length), f"fallocate of {length} bytes")


def forget_pages(descriptor: int, offset: int = 0, length: int = 0) -> None:
    """Drop a range of a file from the page cache, by default all of it. This is advice: refusals do not matter."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(descriptor, offset, length, os.POSIX_FADV_DONTNEED)


def advise_working_memory(address: int, length: int, *, is_sparse: bool = False) -> None:
    """Keep a range that we fill and use ourselves out of forks and core dumps, and ask for huge pages.

    is_sparse: the range is filled page by page, so that huge pages would waste memory: none are asked for.

    This is advice to the kernel: refusals do not matter.
    """
    for advice in (_MADV_NOHUGEPAGE if is_sparse else _MADV_HUGEPAGE, _MADV_DONTFORK, _MADV_DONTDUMP):
        _madvise(address, length, advice)


def use_small_pages(address: int, length: int) -> None:
    """Have the kernel map page by page a range of which only parts are in use. This is advice."""
    _madvise(address, length, _MADV_NOHUGEPAGE)


def join_pages(address: int, length: int) -> None:
    """Have the kernel keep a range in huge pages from now on, also where it would not by itself.

    Other mappings of the same part of a file then take a page fault each, and no page table. This is advice: a kernel
    before Linux 6.1 goes on with small pages.
    """
    for advice in (_MADV_POPULATE_WRITE, _MADV_COLLAPSE):  # what is not there is not joined
        _madvise(address, length, advice)


def trim_heap() -> None:
    """Give freed heap memory back to the kernel (glibc only), so that a measurement counts only what is in use."""
    trim = getattr(_C, "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


def map_large_allocations(least_bytes: int) -> None:
    """Have every allocation of at least `least_bytes` be a mapping of its own from now on (glibc only).

    Left to itself, glibc takes a large allocation from its heap once one as large was freed.
    """
    set_option = getattr(_C, "mallopt", None)
    if set_option is not None:
        set_option(_M_MMAP_THRESHOLD, least_bytes)


@contextlib.contextmanager
def full_heap(least_bytes: int) -> Iterator[None]:
    """Keep the heap without room for `least_bytes` in one piece during the block (glibc only, this thread's).

    What was freed in a heap serves an allocation of any size that it has room for, whatever is asked of
    `map_large_allocations`. That room is taken here, in pieces that nothing is written to.
    """
    free_bytes = _mallinfo().free_bytes if hasattr(_C, "mallinfo2") else 0  # since glibc 2.33
    taken = [_malloc(least_bytes) for _ in range(free_bytes // least_bytes)]  # it has room for no more such pieces
    try:
        yield
    finally:
        for address in taken:
            _free(address)


def copy(source: int, target: int, length: int) -> None:
    """Copy `length` bytes of memory; the ranges do not overlap. Other threads run meanwhile."""
    ctypes.memmove(target, source, length)


def view(address: int, length: int) -> memoryview:
    """Return a writable view of raw memory. The caller keeps the range mapped while the view lives."""
    return memoryview((ctypes.c_char * length).from_address(address)).cast("B")


def why_unavailable() -> str:
    """Return why this system cannot have models in memory of ours, or "" when it can.

    Tried are what that takes: a page frame is moved, and a file in memory, as a stub is, is opened by its path.
    """
    if sys.platform != "linux":
        return f"this is {sys.platform}, and moving page frames needs Linux 5.7 or later"
    if _C is None:
        return "the C library of this system does not move page frames (mremap); Linux 5.7 or later does"
    return _why_no_moves() or _why_no_stubs()


def _why_no_moves() -> str:
    try:
        pages = map_anonymous(2 * PAGE)
    except OSError as error:
        return f"anonymous memory is refused ({error})"
    try:
        view(pages, 1)[0] = 7
        move_pages(pages, pages + PAGE, PAGE)
        return "" if view(pages + PAGE, 1)[0] == 7 else "mremap does not move pages"
    except OSError as error:
        return f"this kernel does not move page frames ({error}); Linux 5.7 or later does"
    finally:
        unmap(pages, 2 * PAGE)


def _why_no_stubs() -> str:
    try:
        descriptor = memory_file("edge-run-trial")
    except OSError as error:
        return f"files in memory are refused ({reason_of(error)})"
    try:
        os.close(os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY))
    except OSError as error:
        return f"files in memory cannot be opened ({error.filename}: {reason_of(error)}); mount /proc"
    finally:
        os.close(descriptor)
    return ""
