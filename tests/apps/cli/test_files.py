"""The files that a command writes: whole or not at all, and nothing of anybody else's is touched."""

import json
import os
from pathlib import Path

import pytest
from support.processes.command_line import names, run_here, run_shell

GREEDY = ("-t", "0", "-n", "8", "--method=ignore-end", "-q")
FULL = Path("/dev/full")
needs_full_device = pytest.mark.skipif(not FULL.is_char_device(), reason="no /dev/full here")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "out"
    path.mkdir()
    return path


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


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="limits of POSIX")
def test_without_space_the_old_files_stay(model: Path, folder: Path) -> None:
    """Where nothing can be written, the text comes out, the JSON file is a StorageError, and old files stay."""
    file, prompt = folder / "a.json", "x" * 600
    file.write_text("old")
    args = ("run", model, prompt, *GREEDY, "--json-out", file)
    result = run_shell('ulimit -f 0; exec "$@"', *args)
    assert (result.code, result.text) == (60, run_here("run", model, prompt, *GREEDY, "--prompt-cache", "off").text)
    assert f"{file} could not be written" in result.err
    assert file.read_text() == "old"
    assert names(folder) == ["a.json"]


@pytest.mark.slow
def test_prompts_are_kept_listed_and_deleted(model: Path) -> None:
    """The second run begins with what the first one read, unless --prompt-cache is off."""

    def n_reused_and_text(*args: str) -> tuple[int, str]:
        result = run_here("run", model, "x" * 600, *GREEDY, "--runtime", "cpu", "--json", *args)
        assert result.code == 0, result.err
        document = json.loads(result.out)
        return document["stats"]["n_reused_tokens"], document["text"]

    (n_first, text), second = n_reused_and_text(), n_reused_and_text()
    assert (n_first, second) == (0, (576, text))
    assert n_reused_and_text("--prompt-cache", "off") == (0, text)
    (kept,) = json.loads(run_here("cache", "list", "--json").out)["prompts"]
    assert f"prompts that {kept['name'].rpartition('-')[0]} has read\n" in run_here("cache", "list").text
    run_here("cache", "prune", "--all")
    assert json.loads(run_here("cache", "list", "--json").out)["prompts"] == []
    run_here("run", model, "Hello", "--prompt-cache", "a file").failed(40, "'a file' is no size")


@pytest.mark.slow
def test_a_cache_that_takes_no_tiles_is_said_once(model: Path, cache: Path) -> None:
    """In one line with what to do, for the model and the same one as draft model; not with --quiet, nor without tiles.

    With --verbose it is in the log, and nowhere else.
    """
    cache.mkdir(exist_ok=True)
    (cache / "tiles").write_text("mine")
    run = ("run", model, "Hello", "-n", "1", "--runtime", "cpu", "--draft-option", f"model={model}")
    line = (
        f"tiny.gguf: the tiles are made in memory, at each start: the cache can't be used: [Errno 17] File exists: "
        f"'{cache / 'tiles'}'; make the folder writable, or name another folder (EDGEDEC_CACHE)"
    )
    for options, lines in (((), [f"edgedec: {line}"]), (("--quiet",), []), (("--runtime-option", "tile_cache=no"), [])):
        result = run_here(*run, *options)
        assert (result.code, [one for one in result.err.splitlines() if "cache" in one]) == (0, lines)
    verbose = run_here(*run, "--verbose").err.splitlines()
    assert f"edgedec.tiles: {line}" in verbose
    assert f"edgedec: {line}" not in verbose
