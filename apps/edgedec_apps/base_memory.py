"""What a process holds without a model."""

from contextlib import suppress
from importlib import import_module

from edgedec.memory.system import keep_heap_small, peak_resident_bytes, resident_bytes, return_free_memory

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
    then on the heap holds little that is free (edgedec.memory.system.keep_heap_small).
    """
    keep_heap_small()
    for name in _NEEDED:
        with suppress(ImportError):
            import_module(name)
    return_free_memory()
    return resident_bytes() or peak_resident_bytes() or 0
