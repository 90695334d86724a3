"""Files of blocks: whole or absent whatever is killed, damaged, full or deleted; and files as the pages hold them."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from edgedec.storage.whole_file import write_atomically
from edgedec_runtimes.shared.block_files import BlockFiles, delete_folder, folder_name, list_folders, make_room
from edgedec_runtimes.shared.pages import forget, is_mapped, is_mostly_hole, open_around_cache, private_memory

N_BYTES = 1000
HEADER_BYTES = 64


def crc(data: NDArray[np.uint8]) -> int:
    return zlib.crc32(data.data)


def opened(root: Path, most_bytes: int = 1 << 30, model: str = "m", n_queued: int = 100) -> BlockFiles:
    """Return the files of a model."""
    return BlockFiles(root / model, most_bytes, crc, n_queued=n_queued)


def block(number: int, n_bytes: int = N_BYTES) -> NDArray[np.uint8]:
    """Return the data of a block."""
    return np.random.default_rng(number).integers(0, 256, n_bytes, np.uint8)


def write(files: BlockFiles, *numbers: int) -> None:
    """Write blocks, the later ones used later."""
    for number in numbers:
        files.write(f"{number}.kv", block(number), 1e9 + number)
    files.close()


def held(files: BlockFiles, *numbers: int) -> list[int]:
    """Return which of the blocks are there, whole."""
    found = {number: files.read(f"{number}.kv", 1, 1 << 20) for number in numbers}
    assert all(data is None or np.array_equal(data, block(number)) for number, data in found.items())
    return [number for number, data in found.items() if data is not None]


def test_what_is_written_is_read_elsewhere(tmp_path: Path) -> None:
    """By another process's object, for the owner's eyes only; what is absent is None."""
    write(opened(tmp_path / "root"), 1, 2)
    assert held(opened(tmp_path / "root"), 1, 2, 3) == [1, 2]
    modes = [path.stat().st_mode & 0o777 for path in (tmp_path / "root", tmp_path / "root/m", tmp_path / "root/m/1.kv")]
    assert os.name == "nt" or modes == [0o700, 0o700, 0o600]


@pytest.mark.parametrize("place", [0, 20, 50, 60, HEADER_BYTES, HEADER_BYTES + N_BYTES - 1])
def test_a_damaged_file_is_deleted(tmp_path: Path, caplog: pytest.LogCaptureFixture, place: int) -> None:
    """Any changed byte is seen, and said once."""
    files, path = opened(tmp_path), tmp_path / "m" / "1.kv"
    write(files, 1)
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    assert held(files, 1) == held(files, 1) == []
    assert not path.exists()
    assert len(caplog.messages) == 1
    assert "is damaged, and deleted" in caplog.messages[0]


def test_files_of_other_sizes_and_names_are_damaged(tmp_path: Path) -> None:
    """A cut file, a longer one, an empty one, one under another's name, and one of a size that can't be."""
    files, folder = opened(tmp_path), tmp_path / "m"
    write(files, 1, 2, 3, 4, 5)
    os.truncate(folder / "1.kv", HEADER_BYTES + 500)
    (folder / "2.kv").write_bytes((folder / "2.kv").read_bytes() + b"x")
    os.truncate(folder / "3.kv", 0)
    (folder / "5.kv").replace(folder / "4.kv")
    assert held(files, 1, 2, 3, 4, 5) == []
    write(files, 6)
    assert files.read("6.kv", N_BYTES + 1, 1 << 20) is None
    assert list(folder.iterdir()) == []


def test_the_last_used_stay(tmp_path: Path) -> None:
    """Of all models together; use() makes a file young, and of one text's files the first goes last."""
    files, other = opened(tmp_path), opened(tmp_path, model="n")
    write(files, 1, 2, 3)
    write(other, 4)
    files.use(["1.kv", "2.kv"], 2e9)
    file_bytes = HEADER_BYTES + N_BYTES
    assert make_room(tmp_path, 4 * file_bytes, 0) == 0
    assert make_room(tmp_path, 3 * file_bytes, 0) > 0  # down to nine tenths
    assert (held(files, 1, 2, 3), held(other, 4)) == ([1, 2], [])
    make_room(tmp_path, file_bytes * 3 // 2, 0)
    assert held(files, 1, 2) == [1]


def test_the_cap_holds_while_files_are_written(tmp_path: Path) -> None:
    """The newest ones stay."""
    file_bytes = HEADER_BYTES + N_BYTES
    files = opened(tmp_path, 20 * file_bytes)
    write(files, *range(60))
    (folder,) = list_folders(tmp_path)
    assert 17 <= folder.n_files <= 20
    assert folder.n_bytes == folder.n_files * file_bytes
    assert held(files, *range(60)) == list(range(60 - folder.n_files, 60))


def test_a_file_larger_than_the_cap_is_not_written(tmp_path: Path) -> None:
    """Nor is anything said: it is what was asked for."""
    files = opened(tmp_path, 500)
    write(files, 1)
    assert (held(files, 1), files.note) == ([], "")


def test_a_full_disk_and_a_locked_folder_end_the_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one note; what is there can be read. A file in the folder's place is no other case."""
    files = opened(tmp_path)
    write(files, 1)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("edgedec_runtimes.shared.block_files.write_atomically", refuse)
    write(files, 2, 3)
    assert files.note == f"prompts can't be kept in {tmp_path / 'm'}: No space left on device; free or name a disk"
    assert not files.n_free
    assert held(files, 1, 2, 3) == [1]
    monkeypatch.undo()
    (tmp_path / "file").write_bytes(b"")
    blocked = BlockFiles(tmp_path / "file" / "m", 1 << 20, crc, n_queued=2)
    write(blocked, 1)
    assert "can't be kept" in blocked.note


def test_too_many_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who writes does not wait: what finds no place is dropped."""
    go, real = threading.Event(), write_atomically

    def slow(*args: object, **options: object) -> None:
        go.wait(20)
        real(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("edgedec_runtimes.shared.block_files.write_atomically", slow)
    files = opened(tmp_path, n_queued=2)
    files.write("0.kv", block(0), 1e9)
    while not files.n_free:
        time.sleep(0.001)
    for number in range(1, 9):
        files.write(f"{number}.kv", block(number), 1e9)
    assert not files.n_free
    go.set()
    files.close()
    assert held(files, *range(9)) in ([0, 1, 2], [0, 1])  # whether 0 had left the queue


@pytest.mark.slow
def test_two_processes_evict_at_once(tmp_path: Path) -> None:
    """Neither fails, and together they end near the cap."""
    code = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[3])\n"
        "from runtimes.shared.test_block_files import *\n"
        "files = opened(Path(sys.argv[1]), 20 * 1064, model=sys.argv[2])\n"
        "write(files, *range(300)); assert not files.note"
    )
    tests = Path(__file__).parents[2]
    children = [subprocess.Popen([sys.executable, "-c", code, tmp_path, name, tests]) for name in ("m", "n")]
    assert [child.wait(60) for child in children] == [0, 0]
    assert sum(folder.n_bytes for folder in list_folders(tmp_path)) <= 1.2 * 20 * 1064


@pytest.mark.slow
def test_killed_at_any_moment(tmp_path: Path) -> None:
    """What is there is whole; what is left of a write is deleted once it is old, and not before."""
    code = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[2])\n"
        "from runtimes.shared.test_block_files import *\n"
        "files = opened(Path(sys.argv[1]))\n"
        "for i in range(10**6): files.write(f'{i % 50}.kv', block(i % 50, 300_000)[:N_BYTES].repeat(300), 1e9)"
    )
    tests, random_s = Path(__file__).parents[2], random.Random(1)
    for _ in range(3):
        child = subprocess.Popen([sys.executable, "-c", code, tmp_path, tests])
        while not any((tmp_path / "m").glob("*.kv")):
            time.sleep(0.005)
        time.sleep(0.05 * random_s.random())
        child.send_signal(signal.SIGKILL)
        child.wait()
        for path in (tmp_path / "m").glob("*.kv"):
            assert opened(tmp_path).read(path.name, 300 * N_BYTES, 300 * N_BYTES) is not None
            path.unlink()
    left = tmp_path / "m" / "1.kv.0123456789abcdef.tmp"
    left.write_bytes(b"edgedec bl")
    others = [left.with_name("1.tmp"), left.with_name("mine.kv.0123456789abcdef.tmp"), left.with_name("notes.txt")]
    for path in others:
        path.write_bytes(b"somebody else's")
        os.utime(path, (1e9, 1e9))
    make_room(tmp_path, 1 << 40, 0)
    assert left.exists()
    os.utime(left, (1e9, 1e9))
    make_room(tmp_path, 1 << 40, 0)
    assert not left.exists()
    make_room(tmp_path, 1, 0)
    assert all(path.exists() for path in others)


def test_folders_are_listed_and_deleted(tmp_path: Path) -> None:
    """By the name of the model, the last used first."""
    write(opened(tmp_path, model=folder_name("A b/c", "f" * 64)), 1, 2)
    write(opened(tmp_path, model=folder_name("..", "e" * 64)), 3)
    assert [(folder.name, folder.n_files) for folder in list_folders(tmp_path)] == [
        ("model-eeeeeeee", 1),
        ("A-b-c-ffffffff", 2),
    ]
    (tmp_path / "A-b-c-ffffffff" / "notes.kv").write_bytes(b"somebody else's")
    (tmp_path / "link").symlink_to(tmp_path / "model-eeeeeeee")
    for name in ("A-b-c-ffffffff", "link"):
        delete_folder(tmp_path, name)
    assert [path.name for path in (tmp_path / "A-b-c-ffffffff").iterdir()] == ["notes.kv"]
    assert [folder.name for folder in list_folders(tmp_path)] == ["model-eeeeeeee"]
    assert list_folders(tmp_path / "absent") == []


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
