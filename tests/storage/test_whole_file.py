"""Files that are written whole or not at all."""

import os
import stat
from pathlib import Path

import pytest

from edgedec.storage.whole_file import remove_temporaries, write_atomically


@pytest.mark.parametrize("sync", [False, True])
def test_a_file_is_replaced_by_its_new_contents(tmp_path: Path, *, sync: bool) -> None:
    """The pieces stand there one after another, and nothing else stays in the folder."""
    path = tmp_path / "a.json"
    path.write_bytes(b"the old contents, which are longer")
    write_atomically(path, b"the ", b"new", sync=sync)
    assert path.read_bytes() == b"the new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(os.name != "posix", reason="modes of POSIX")
def test_a_private_file_is_for_its_owner(tmp_path: Path) -> None:
    """Also where the file that it replaces was for everybody."""
    path = tmp_path / "a"
    write_atomically(path, b"1")
    path.chmod(0o644)
    write_atomically(path, b"2", private=True)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_what_can_not_be_renamed_leaves_nothing(tmp_path: Path) -> None:
    """A folder of the file's name stays as it is, and the temporary file is deleted."""
    path = tmp_path / "folder"
    (path / "inside").mkdir(parents=True)
    with pytest.raises(OSError, match="folder"):
        write_atomically(path, b"1")
    assert list(tmp_path.rglob("*")) == [path, path / "inside"]


def test_what_killed_processes_left_is_removed(tmp_path: Path) -> None:
    """Temporary files go, and no others; a folder that does not exist has none."""
    write_atomically(tmp_path / "a.json", b"1")
    (tmp_path / "a.json.0123456789abcdef.tmp").write_bytes(b"part")
    (tmp_path / "mine.tmp").write_bytes(b"2")
    remove_temporaries(tmp_path)
    remove_temporaries(tmp_path / "none")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "mine.tmp"]
