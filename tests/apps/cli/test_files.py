"""The files that a command writes: whole or not at all, and nothing of anybody else's is touched."""

import json
import os
from pathlib import Path

import pytest
from support.processes.command_line import run_here, run_shell

GREEDY = ("-t", "0", "-n", "8", "--ignore-end", "-q")
FULL = Path("/dev/full")
needs_full_device = pytest.mark.skipif(not FULL.is_char_device(), reason="no /dev/full here")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty folder."""
    path = tmp_path / "out"
    path.mkdir()
    return path


def names(folder: Path) -> list[str]:
    """Return the names of what a folder holds."""
    return sorted(path.name for path in folder.iterdir())


def test_json_out_is_written_besides_the_text(model: Path, folder: Path) -> None:
    """--json-out replaces a file, through a link too, and leaves nothing beside it; --json prints the same object."""
    file, link = folder / "a.json", folder / "link.json"
    file.write_text("old")
    link.symlink_to(file)
    result = run_here("run", model, "Hello", *GREEDY, "--json-out", link)
    assert link.is_symlink()
    assert json.loads(file.read_text())["text"] + "\n" == result.text
    assert names(folder) == ["a.json", "link.json"]
    printed = run_here("run", model, "Hello", *GREEDY, "--json-out", file, "--json")
    assert printed.text == file.read_text()


def test_json_out_that_cannot_be_written_is_refused_before_the_work(model: Path, folder: Path) -> None:
    """A directory, and a file in a folder that is not there, are StorageErrors before anything is generated."""
    run_here("run", model, "Hello", "--json-out", folder).failed(60, "is a directory")
    run_here("run", model, "Hello", "--json-out", folder / "no" / "a.json").failed(60, "there is no directory")
    assert names(folder) == []


@needs_full_device
def test_a_device_is_written_to_and_stays_a_device(model: Path) -> None:
    """--json-out to a full device is a StorageError after the text, and the device is not replaced."""
    result = run_here("run", model, "Hello", *GREEDY, "--json-out", FULL)
    assert result.code == 60
    assert result.out
    assert result.err == f"edgedec: {FULL} could not be written: No space left on device\n"
    assert FULL.is_char_device()


@needs_full_device
def test_a_device_is_no_prompt_cache(model: Path) -> None:
    """--prompt-cache is a file to come back to: a device is refused before the work, and not replaced."""
    run_here("run", model, "Hello", "--prompt-cache", FULL).failed(60, "/dev/full is no regular file")
    assert FULL.is_char_device()


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="limits of POSIX")
def test_without_space_the_old_files_stay(model: Path, folder: Path) -> None:
    """Where nothing can be written, the text comes out, the JSON file is a StorageError, and old files stay."""
    file, cache = folder / "a.json", folder / "cache"
    file.write_text("old")
    cache.touch()
    args = ("run", model, "Hello", *GREEDY, "--json-out", file, "--prompt-cache", cache)
    result = run_shell('ulimit -f 0; exec "$@"', *args)
    assert (result.code, result.text) == (60, run_here("run", model, "Hello", *GREEDY).text)
    of_cache, of_json = result.err.splitlines()
    assert f"the prompt cache {cache} could not be written" in of_cache
    assert f"{file} could not be written" in of_json
    assert (file.read_text(), cache.read_bytes()) == ("old", b"")
    assert names(folder) == ["a.json", "cache"]


def test_a_prompt_cache_that_can_not_be_made_is_said(model: Path, folder: Path) -> None:
    """The text is out by then: the exit code is 0, also where nothing can be deleted, as on a read-only file system."""
    cache = folder / ("x" * 250)  # with the ending that it has at first the name is too long, for deleting it too
    result = run_here("run", model, "Hello", *GREEDY, "--prompt-cache", cache)
    assert (result.code, result.text) == (0, run_here("run", model, "Hello", *GREEDY).text)
    assert result.err == f"edgedec: the prompt cache {cache} could not be written: File name too long\n"


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["reference", "llamacpp"])
def test_a_prompt_cache_is_made_and_reused(model: Path, folder: Path, runtime: str) -> None:
    """The second run starts from the first one's KV, gives the same text, and leaves one file."""

    def n_reused_and_text() -> tuple[int, str]:
        args = (*GREEDY, "--runtime", runtime, "--prompt-cache", folder / "cache", "--json")
        result = run_here("run", model, "x" * 600, *args)
        document = json.loads(result.out)
        return document["stats"]["n_reused_tokens"], document["text"]

    first, second = n_reused_and_text(), n_reused_and_text()
    assert first[0] == 0
    assert second[0] >= 512
    assert second[1] == first[1]
    assert names(folder) == ["cache"]


def test_a_prompt_cache_that_does_not_fit_is_replaced(model: Path, plain_model: Path, folder: Path) -> None:
    """The cache of another model is told and replaced; a foreign file is refused before the work, and stays."""
    cache, notes = folder / "cache", folder / "notes.txt"
    assert run_here("run", plain_model, "Hello", *GREEDY, "--prompt-cache", cache).code == 0
    result = run_here("run", model, "Hello", *GREEDY, "--prompt-cache", cache)
    assert result.code == 0
    assert result.err.endswith("going on without it\n")
    assert run_here("run", model, "Hello", *GREEDY, "--prompt-cache", cache).err == ""
    notes.write_text("mine")
    run_here("run", model, "Hello", "--prompt-cache", notes).failed(60, "notes.txt exists and is no prompt cache")
    assert notes.read_text() == "mine"


def test_a_cache_that_takes_no_tiles_is_said_once(model: Path, cache: Path) -> None:
    """In one line with what to do, for the model and the same one as draft model; not with --quiet, nor without tiles.

    With --verbose it is in the log, and nowhere else.
    """
    cache.mkdir(exist_ok=True)
    (cache / "tiles").write_text("mine")
    run = ("run", model, "Hello", "-n", "1", "--runtime", "cpu", "--draft-model", model)
    line = (
        f"tiny.gguf: the tiles are made in memory, at each start: the cache can't be used: [Errno 17] File exists: "
        f"'{cache / 'tiles'}'; make the folder writable, or name another folder (EDGEDEC_CACHE)"
    )
    for options, lines in (
        ((), [f"edgedec: {line}"]),
        (("--quiet",), []),
        (("--runtime-option", "tile_cache=no"), []),
    ):
        result = run_here(*run, *options)
        assert (result.code, [one for one in result.err.splitlines() if "cache" in one]) == (0, lines)
    verbose = run_here(*run, "--verbose").err.splitlines()
    assert f"edgedec.tiles: {line}" in verbose
    assert f"edgedec: {line}" not in verbose
