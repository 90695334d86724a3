"""Looking at the tile files and deleting them, from Python and from the command line."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.models.tile_maker import LAYOUT, Maker
from support.models.tiny_models import tiny_llama

from edgedec.errors import StorageError
from edgedec.memory_plan import format_bytes
from edgedec_runtimes.cpu.tiles.listing import list_tiles, prune_tiles, remove_tiles_of
from edgedec_runtimes.shared.file_lock import try_lock

pytestmark = pytest.mark.slow


def states(maker: Maker) -> list[str]:
    return [entry.state for entry in list_tiles(maker.root)]


def command(maker: Maker, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    """Run the command line with the maker's cache."""
    env = os.environ | {"EDGEDEC_CACHE": str(maker.root), "TZ": "UTC"}
    line = [sys.executable, "-m", "edgedec_apps.cli", *arguments]
    return subprocess.run(line, capture_output=True, check=False, timeout=120, env=env)


def list_as_mine(maker: Maker) -> None:
    """Move the model to where edgedec lists it, as `mine`."""
    folder = maker.root / "models"
    folder.mkdir(parents=True)
    maker.path = maker.path.replace(folder / "mine.gguf")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-4] ^= 1
    path.write_bytes(data)


def test_an_entry_says_what_the_file_is(maker: Maker) -> None:
    """A listing has file, model, layout, size on the disk, last use and state."""
    assert list_tiles(maker.root) == []
    maker.open().close()
    path = maker.tile_file()
    os.utime(path.with_suffix(".json"), (1000, 1000))
    (entry,) = list_tiles(maker.root)
    assert (entry.path, entry.models, entry.layout) == (path, (maker.path,), LAYOUT)
    assert (entry.n_bytes, entry.last_used_s, entry.state) == (path.stat().st_size, 1000, "current")
    maker.open().close()
    (entry,) = list_tiles(maker.root)
    assert entry.last_used_s > 1e9


def test_prune_deletes_what_is_stale(maker: Maker, tmp_path: Path) -> None:
    """Tiles of a model that is gone or has changed, damaged and unfinished files go; the current ones stay."""
    others = [Maker(tiny_llama(tmp_path / f"{i}.gguf", seed=i, n_layer=1), maker.root) for i in range(3)]
    for each in (maker, *others):
        each.open().close()
    paths = {entry.models[0]: entry.path for entry in list_tiles(maker.root)}
    others[0].path.unlink()
    os.utime(others[1].path, (1, 1))
    paths[others[2].path].write_bytes(b"edgedec")
    folder = maker.root / "tiles"
    key = "0123456789abcdef"
    strangers = [f"{'0' * 16}.lock", "a.json", "a.partial", "a.tiles", "b.json.1-1.tmp", "c.tmp"]
    for name in (f"{key}.partial", f"{key}.lock", f"{key}.{key}.json", f"{key}.{key}.json.1-1.tmp"):
        (folder / name).write_bytes(b"" if name.endswith("lock") else b"{")
    for name in strangers:
        (folder / name).write_bytes(b"somebody else's")
    assert sorted(states(maker)) == ["changed", "current", "damaged", "missing", "unfinished"]
    n_bytes = sum(entry.n_bytes for entry in list_tiles(maker.root) if entry.state != "current")
    removed = prune_tiles(maker.root)
    assert sorted(entry.state for entry in removed) == ["changed", "damaged", "missing", "unfinished"]
    assert sum(entry.n_bytes for entry in removed) == n_bytes
    left = [paths[maker.path].with_suffix(".json"), paths[maker.path], *(folder / name for name in strangers)]
    assert maker.files() == sorted(left)
    maker.open().close()
    assert maker.reports == []


def test_prune_of_everything_and_of_layouts(maker: Maker) -> None:
    """What is of no layout in use goes on request, and so does everything."""
    maker.open().close()
    maker.open(layout="old").close()
    assert [entry.layout for entry in prune_tiles(maker.root, layouts=[LAYOUT])] == ["old"]
    assert states(maker) == ["current"]
    assert prune_tiles(maker.root) == []
    assert len(prune_tiles(maker.root, everything=True)) == 1
    assert maker.files() == []


def test_prune_leaves_what_is_being_written(maker: Maker) -> None:
    """A partial file whose lock is held is somebody's work, even for prune --all."""
    folder = maker.root / "tiles"
    folder.mkdir(parents=True)
    partial = folder / "0123456789abcdef.partial"
    partial.write_bytes(b"1")
    lock = try_lock(partial.with_suffix(""))
    assert lock is not None
    with lock:
        assert prune_tiles(maker.root, everything=True) == []
        assert partial.exists()
        assert lock.path.exists()
    assert [entry.n_bytes for entry in prune_tiles(maker.root)] == [1]
    assert maker.files() == []


def test_removing_a_model_removes_its_tiles(maker: Maker) -> None:
    """All layouts of the model go, by any spelling of its path, also when it is gone already; others stay."""
    other = Maker(tiny_llama(maker.path.with_name("other.gguf"), seed=5, n_layer=1), maker.root)
    other.open().close()
    maker.open().close()
    maker.open(layout="old").close()
    n_bytes = sum(entry.n_bytes for entry in list_tiles(maker.root) if entry.models == (maker.path,))
    link = maker.path.parent / "link"
    link.symlink_to(maker.path.parent, target_is_directory=True)
    maker.path.unlink()
    assert remove_tiles_of(maker.root, link / maker.path.name) == n_bytes
    assert [entry.models for entry in list_tiles(maker.root)] == [(other.path,)]
    assert remove_tiles_of(maker.root, maker.path) == 0


def test_a_copy_keeps_the_tiles(maker: Maker, tmp_path: Path) -> None:
    """Tiles that a copy of the removed model uses stay, until that one is removed."""
    maker.open().close()
    copy = Maker(tmp_path / "copy.gguf", maker.root)
    shutil.copyfile(maker.path, copy.path)
    copy.open().close()
    assert remove_tiles_of(maker.root, maker.path) == 0
    assert [entry.models for entry in list_tiles(maker.root)] == [(copy.path,)]
    copy.path.unlink()
    assert remove_tiles_of(maker.root, copy.path) > 0
    assert maker.files() == []


def test_what_cannot_be_deleted_is_told(maker: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that the disk does not let go is a StorageError with its name."""
    maker.open().close()

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(StorageError, match=r"cannot delete .*\.tiles: Input/output error"):
        prune_tiles(maker.root, everything=True)


def test_cache_list(maker: Maker) -> None:
    """`cache list` shows size, day, model and what is wrong, and with --json all of it."""
    assert command(maker, "cache", "list").stdout == b"no tile files\n"
    nothing: dict[str, Any] = {"tiles": [], "environments": [], "prompts": [], "graphs": []}
    assert json.loads(command(maker, "cache", "list", "--json").stdout) == nothing
    maker.open().close()
    path = maker.tile_file()
    os.utime(path.with_suffix(".json"), (86400 * 365, 86400 * 365))
    assert command(maker, "cache", "list").stdout == b"  20.5 kB  1971-01-01  m.gguf\n"
    document = {"path": str(path), "models": [str(maker.path)], "layout": LAYOUT, "size_bytes": path.stat().st_size}
    document |= {"last_used_s": 86400.0 * 365, "state": "current"}
    assert json.loads(command(maker, "cache", "list", "--json").stdout) == nothing | {"tiles": [document]}
    maker.path.unlink()
    assert command(maker, "cache", "list").stdout == b"  20.5 kB  1971-01-01  m.gguf (the model is gone)\n"


def test_cache_prune(maker: Maker) -> None:
    """`cache prune` deletes what is stale, with --all everything, and says what that freed."""
    maker.open().close()
    assert command(maker, "cache", "prune").stderr == b"0 B freed\n"
    (maker.root / "tiles/mine").write_bytes(b"somebody else's")
    stays = f"not edgedec's, and stays: {maker.root / 'tiles/mine'}\n"
    assert command(maker, "cache", "prune", "--all").stderr.decode() == f"  20.5 kB  m.gguf\n{stays}20.5 kB freed\n"
    assert [path.name for path in maker.files()] == ["mine"]


def test_cache_verify(maker: Maker) -> None:
    """`cache verify` finds a changed bit, deletes that file and leaves the sound ones."""
    maker.open().close()
    for flags in ((), ("-q",)):
        assert command(maker, "cache", "verify", *flags).stderr.endswith(b"1 of 1 tile files are sound\n")
    flip(maker.tile_file())
    stderr = command(maker, "cache", "verify").stderr.decode()
    assert "the tiles of m.gguf are damaged: of 'output.weight' they have the CRC-32 " in stderr
    assert stderr.endswith("20.5 kB freed\n0 of 1 tile files are sound\n")
    assert maker.files() == []


def test_rm_removes_the_tiles(maker: Maker) -> None:
    """`edgedec rm` deletes the model with its tiles, and says how much of what it freed they were."""
    list_as_mine(maker)
    maker.open().close()
    freed = format_bytes(maker.path.stat().st_size + maker.tile_file().stat().st_size)
    result = command(maker, "rm", "mine")
    assert result.returncode == 0
    assert result.stderr.decode() == f"mine: {freed} freed, 20.5 kB of them tiles\n"
    assert maker.files() == []


def test_rm_removes_the_tiles_of_models_that_are_gone(maker: Maker, tmp_path: Path) -> None:
    """`edgedec rm` also frees what the tiles of models take that somebody deleted by hand."""
    other = Maker(tiny_llama(tmp_path / "other.gguf", seed=5, n_layer=1), maker.root)
    other.open().close()
    other.path.unlink()
    list_as_mine(maker)
    assert command(maker, "rm", "mine").stderr.decode().endswith(" freed, 282.9 kB of them tiles\n")
    assert maker.files() == []


def test_a_run_says_what_it_keeps_and_what_it_makes_anew(maker: Maker) -> None:
    """The run that makes the tiles says once what they take and where; damaged ones are made anew, and that is said."""
    line = ("run", str(maker.path), "Hello", "-n", "1", "--draft", "off", "--runtime", "cpu")
    tiny_llama(maker.path)  # one that runs
    first = command(maker, *line)
    assert first.returncode == 0
    kept = re.findall(
        r"(?m)^edgedec: m.gguf: (\S+ kB) kept in (.*), so that its next start is fast \(edgedec ", first.stderr.decode()
    )
    assert kept == [(format_bytes(maker.tile_file().stat().st_size), str(maker.root / "tiles"))]
    assert b"tiles" not in command(maker, *line).stderr
    maker.tile_file().write_bytes(b"edgedec")
    again = command(maker, *line).stderr.decode()
    assert (
        "edgedec: the tiles of m.gguf are damaged: their file does not begin as one; they are made anew when" in again
    )
    assert " kept in " in again


def test_list_says_what_tiles_take(maker: Maker) -> None:
    """`edgedec list` has the tiles of each model, and in a line of its own those of models that it does not list."""
    maker.open().close()
    assert b"tiles of other models: 20.5 kB (edgedec cache list shows them)\n" in command(maker, "list").stdout
    list_as_mine(maker)
    maker.open().close()
    (line,) = [line for line in command(maker, "list").stdout.decode().splitlines() if line.startswith("mine ")]
    assert line.startswith("mine  46.8 kB  ")
    assert line.endswith("  20.5 kB of its size are tiles, which make starts fast")
    (entry,) = json.loads(command(maker, "list", "--json").stdout)["models"]
    assert (entry["name"], entry["tiles_bytes"]) == ("mine", maker.tile_file().stat().st_size)


def test_models_are_called_by_their_names(maker: Maker) -> None:
    """What the commands say of tiles has the name that `edgedec list` shows, and never the tile file's own."""
    list_as_mine(maker)
    maker.open().close()
    path = maker.tile_file()
    shown = [command(maker, "cache", "list").stdout, command(maker, "cache", "verify").stderr]
    flip(path)
    shown.append(command(maker, "cache", "verify").stderr)
    maker.open().close()
    path.write_bytes(b"edgedec")
    shown += [command(maker, "cache", "list").stdout, command(maker, "cache", "verify").stderr]
    maker.open().close()
    path.with_suffix(".json").unlink()
    shown += [command(maker, "cache", "list").stdout, command(maker, "cache", "prune").stderr]
    assert [b"mine" in text for text in shown] == [True, False, True, True, True, False, False]
    assert all(path.stem.split(".")[0].encode() not in text for text in shown)
    assert b"an unknown model (the model is gone)\n" in shown[-2]
