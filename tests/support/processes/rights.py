"""Give up root's rights for a while, for tests of permissions that may run as root."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

_ANYBODY = 65534


@contextmanager
def as_anybody() -> Iterator[None]:
    """Give up root's permission to read every file, inside the block."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(_ANYBODY)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)
