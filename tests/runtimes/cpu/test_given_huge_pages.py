"""Which huge pages the system gives to private memory."""

from pathlib import Path

import pytest

from edgedec_runtimes.cpu.tiles.huge_pages import HugePages, huge_pages


@pytest.mark.parametrize(
    ("enabled", "size", "found"),
    [
        ("always [madvise] never\n", "2097152\n", HugePages(2 << 20, "madvise")),
        ("[always] madvise never\n", "2097152\n", HugePages(2 << 20, "always")),
        ("always madvise [never]\n", "33554432\n", HugePages(32 << 20, "never")),
        ("always madvise never\n", "2097152\n", None),
        ("[sometimes]\n", "2097152\n", None),
        ("[always] madvise never\n", "0\n", None),
        ("[always] madvise never\n", "many\n", None),
        (None, "2097152\n", None),
        ("[always] madvise never\n", None, None),
    ],
)
def test_huge_pages_are_read_from_the_systems_files(
    tmp_path: Path, enabled: str | None, size: str | None, found: HugePages | None
) -> None:
    """Which private memory gets them, and how large they are; None where a file is absent or makes no sense."""
    for name, text in (("enabled", enabled), ("hpage_pmd_size", size)):
        if text is not None:
            (tmp_path / name).write_text(text)
    assert huge_pages(tmp_path) == found
