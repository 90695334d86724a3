"""Files as the system's pages hold them: read around the cache, with holes, mapped."""

import os
from pathlib import Path

from edgedec_runtimes.shared.pages import forget, is_mapped, is_mostly_hole, open_around_cache, private_memory


def test_a_file_is_opened_around_the_cache_where_that_works(tmp_path: Path) -> None:
    """Its first page can be read to memory that begins with a page, before and after the cache forgets it."""
    path = tmp_path / "a b ü.bin"
    path.write_bytes(bytes(range(256)) * 32)
    fd = open_around_cache(path)
    try:
        forget(fd)
        forget(fd, 0, 4096)
        with private_memory(8192) as page:
            with os.fdopen(os.dup(fd), "rb", buffering=0) as file:
                assert file.readinto(page) == 8192
            assert page[:4096] == bytes(range(256)) * 16
    finally:
        os.close(fd)


def test_a_hole_takes_no_room(tmp_path: Path) -> None:
    """A file is mostly a hole where the system says that it takes less than half of its size on the disk."""
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 256)
    assert not is_mostly_hole(path.stat())
    with path.open("r+b") as file:
        file.truncate(1 << 24)
    found = path.stat()
    assert is_mostly_hole(found) == (hasattr(found, "st_blocks") and found.st_blocks * 512 < 1 << 23)


def test_other_errors_do_not_say_that_a_file_is_mapped() -> None:
    """Only a refusal can say so, and only where mapped files can't be deleted."""
    assert not is_mapped(FileNotFoundError(2, "gone"))
    assert is_mapped(PermissionError(13, "in use")) == (os.name == "nt")
