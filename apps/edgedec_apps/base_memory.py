"""What a process holds without a model, and how its heap is kept small."""

from contextlib import suppress
from importlib import import_module

from edgedec.memory.system import glibc, peak_resident_bytes, resident_bytes, return_free_memory

LEFT_BYTES = 24_000_000
"""Most bytes that models and requests leave behind in a server, beyond what each plan counts: libraries, modules, and
pages of the heap that hold little. Measured: 6 to 17 MB under caps of 152 and 170 MB, 10 to 24 MB under 400 MB and
more, after up to 16 loads of models of 49,000 to 262,000 tokens on two runtimes, with and without grammars."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # of glibc's malloc.h
_LARGE_BLOCK_BYTES = 1 << 22  # numpy asks for huge pages from this size on
_NEEDED = (
    "jinja2.sandbox",
    "edgedec.drafters.suffix.suffix",
    "edgedec.drafters.suffix.common",
    "edgedec.decoding.generate",
)


def base_bytes() -> int:
    """Import all that a generation needs, and return the bytes that the process holds then.

    Measure it before a model's file is read: the memory that reading a header leaves behind is used again when the
    model is loaded. Where the system doesn't report what is held now, the most that was held so far is returned. From
    then on the heap holds little that is free (keep_heap_small).
    """
    keep_heap_small()
    for name in _NEEDED:
        with suppress(ImportError):
            import_module(name)
    return_free_memory()
    return resident_bytes() or peak_resident_bytes() or 0


def keep_heap_small() -> None:
    """Let the heap hold little that is free, for a process in which models come and go; only glibc can.

    - Blocks of 4 MiB and more go back to the system when they are freed. glibc raises that bound, to at most 32 MiB,
      whenever a larger block is freed, and takes later blocks from its heaps. numpy asks for huge pages for such
      blocks, and a huge page is held whole for one byte in use. After loading and unloading four models four times, a
      process held 207 MB without a model, and 89 MB with the bound kept where it is.
    - All threads share one heap. With a heap for each thread, a server held 136 MB without a model after sixteen loads,
      with one heap 99 MB. Call this before the threads begin.
    """
    set_option = glibc("mallopt")
    if set_option is not None:
        set_option(_M_MMAP_THRESHOLD, _LARGE_BLOCK_BYTES)
        set_option(_M_ARENA_MAX, 1)
        set_option(_M_TRIM_THRESHOLD, 2 * _LARGE_BLOCK_BYTES)  # as glibc pairs the two
