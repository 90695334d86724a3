"""The tiles without a disk that takes them: made in memory, with a warning that says why, and nothing left behind."""

import errno
import logging
import os
import shutil
import stat
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.models.tile_maker import Maker, contents, until_seen

from edgedec_runtimes.cpu.tiles import cache as tile_cache


def in_memory_after(maker: Maker, caplog: pytest.LogCaptureFixture, *words: str) -> None:
    """Assert that the tiles are made in memory, with one warning that says why, and leave no file."""
    caplog.clear()
    with maker.open() as tiles:
        assert not tiles.mapped
        assert tiles.path is None
        assert contents(tiles) == maker.expected()
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    for word in ("m.gguf: ", *words, "in memory, at each start"):
        assert word in record.getMessage()
    assert maker.files() == []


def test_without_a_cache(maker: Maker, caplog: pytest.LogCaptureFixture) -> None:
    """No folder means memory, without a warning and without a file."""
    with maker.open(cache_dir=None) as tiles:
        assert not tiles.mapped
        assert contents(tiles) == maker.expected()
    assert {report.detail for report in maker.reports} == {"m.gguf, in memory"}
    assert caplog.records == []
    assert not maker.root.exists()


def test_too_little_space_is_seen_before(
    maker: Maker, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk without room for the tiles gets not a byte of them."""
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10, 9, 1000))
    in_memory_after(maker, caplog, "20.5 kB for tiles are needed in ", "1.0 kB are free")


class Refusal(NamedTuple):
    """A system call that fails, and what is said then."""

    module: Any
    call: str
    number: int
    word: str


@pytest.mark.parametrize(
    "refusal",
    [
        Refusal(os, "fsync", errno.ENOSPC, "make room"),
        Refusal(os, "replace", errno.EIO, "Input/output error"),
        Refusal(Path, "mkdir", errno.EROFS, "Read-only file system"),
        Refusal(os, "listdir", errno.EACCES, "Permission denied"),
        Refusal(tile_cache, "try_lock", errno.ENOLCK, "No locks available"),
    ],
    ids=lambda refusal: refusal.call,
)
def test_a_disk_that_refuses(
    maker: Maker, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, refusal: Refusal
) -> None:
    """A disk that turns out full, read-only or without locks at any point leads to memory and leaves nothing."""

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(refusal.number, os.strerror(refusal.number))

    monkeypatch.setattr(refusal.module, refusal.call, refuse)
    in_memory_after(maker, caplog, refusal.word)


@pytest.mark.parametrize("where", ["root", "tiles"])
def test_a_file_in_the_place_of_the_folder(maker: Maker, caplog: pytest.LogCaptureFixture, where: str) -> None:
    """A cache folder that can't be made leads to memory."""
    obstacle = maker.root if where == "root" else maker.root / "tiles"
    obstacle.parent.mkdir(exist_ok=True)
    obstacle.write_text("mine", encoding="utf-8")
    with maker.open() as tiles:
        assert not tiles.mapped
        assert contents(tiles) == maker.expected()
    assert len(caplog.records) == 1
    assert obstacle.read_text(encoding="utf-8") == "mine"


def test_a_read_only_cache_is_used(maker: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles in a folder that can't be written to are mapped, for a copy of the model, too."""
    maker.open().close()

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    for module, call in ((os, "utime"), (os, "replace"), (tile_cache, "try_lock"), (Path, "write_text")):
        monkeypatch.setattr(module, call, refuse)
    for phases in ([], ["verify"], ["verify"]):
        with maker.open() as tiles:
            assert tiles.mapped
        assert (maker.filled, maker.phases()) == ([], phases)
        until_seen(maker.path, lambda: maker.path.chmod(stat.S_IRUSR))  # a new time of the status
