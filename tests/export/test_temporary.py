"""The next export to the same place deletes what a killed export left there, and touches nothing else."""

import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.models.tiny_models import tiny_llama
from support.processes.command_line import names, run_here

from edgedec_export.folder import new_folder
from edgedec_export.gguf_writer import new_file

_AT_WORK = """
import sys, time
from pathlib import Path
from edgedec_export.{module} import {make}
with {make}(Path(sys.argv[1]){options}) as place:
    (place / "data" if place.is_dir() else place).write_bytes(b"x" * 1000)
    print(place, flush=True)
    time.sleep(600)
"""
FOLDER = _AT_WORK.format(module="folder", make="new_folder", options=", force=False")
FILE = _AT_WORK.format(module="gguf_writer", make="new_file", options="")


@contextmanager
def at_work(code: str, out: Path) -> Iterator[Path]:
    """Let another process make `out`, and kill it at the end; yield the path it writes to."""
    with subprocess.Popen([sys.executable, "-c", code, str(out)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield Path(process.stdout.readline().strip())
        finally:
            process.kill()


def make_folder(out: Path) -> None:
    """Make a folder."""
    with new_folder(out, force=False) as folder:
        (folder / "data").write_bytes(b"y")


def make_file(out: Path) -> None:
    """Make a file."""
    with new_file(out) as part:
        part.write_bytes(b"y")


@pytest.mark.slow
@pytest.mark.parametrize(("code", "make"), [(FOLDER, make_folder), (FILE, make_file)], ids=["folder", "file"])
def test_what_a_killed_one_left_goes_with_the_next(
    code: str, make: object, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged; running exports, other names and other programs' files are not touched."""
    assert callable(make)
    out, other = tmp_path / "a [1]", tmp_path / "b"
    strangers = [".a [1]-0123456.part", ".a 1-01234567.part", ".a [1]-01234567.party", ".a [1]-steps-01234567.part"]
    for name in strangers:
        (tmp_path / name).write_text("mine")
    with at_work(code, other) as others:
        pass
    with at_work(code, out) as left:
        make(tmp_path / "c")
        with at_work(code, out) as second:
            pass
        make(out)
        assert left.exists()
        assert not second.exists()
    assert names(tmp_path) == sorted(
        [*strangers, "a [1]", "c", *(f"{path.name}{end}" for path in (others, left) for end in ("", ".lock"))]
    )
    (tmp_path / "a [1]").rename(tmp_path / "d")
    make(out)
    assert names(tmp_path) == sorted([*strangers, "a [1]", "c", "d", others.name, f"{others.name}.lock"])
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert told == [f"deleted {path}, which a killed export left behind" for path in (second, left)]


def test_an_earlier_export_aside_stays_until_there_is_one_in_its_place(tmp_path: Path) -> None:
    """A kill between two renames leaves the earlier export under another name; it stays until it is replaced."""
    aside = tmp_path / ".out-01234567.old"
    aside.mkdir()
    (tmp_path / ".out-01234567.part").mkdir()
    make_folder(tmp_path / "out")
    assert names(tmp_path) == [".out-01234567.old", "out"]
    with pytest.raises(ZeroDivisionError), new_folder(tmp_path / "other", force=False):
        raise ZeroDivisionError
    assert names(tmp_path) == [".out-01234567.old", "out"]


@pytest.mark.slow
def test_the_command_says_it(tmp_path: Path) -> None:
    """The command prints it in one line, and makes the export."""
    model, out = tiny_llama(tmp_path / "m.gguf", n_layer=1), tmp_path / "small.gguf"
    with at_work(FILE, out) as left:
        pass
    result = run_here("export", model, "--to", "gguf", "--layers", "1", "--out", out)
    told = f"edgedec: deleted {left}, which a killed export left behind"
    assert (result.code, [line for line in result.err.splitlines() if "deleted" in line]) == (0, [told])
    assert names(tmp_path) == ["m.gguf", "small.gguf"]
