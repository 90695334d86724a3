"""Keeping compiled graphs: complete folders or none, and a failure costs a compilation, not the load."""

from pathlib import Path

import pytest

from edgedec_runtimes.npu.compiled import GRAPH, open_kept


class Compiler:
    """Stands in for ONNX Runtime: writes where it is told to, and opens what is sound.

    Attributes:
        n_compiled: How often the export's graph was opened.
    """

    def __init__(self) -> None:
        self.n_compiled = 0

    def __call__(self, compiled: Path | None, entries: dict[str, str]) -> str:
        if compiled is not None:
            assert not entries
            return compiled.read_text(encoding="utf-8")
        self.n_compiled += 1
        if entries:
            Path(entries["ep.context_file_path"]).write_text("sound", encoding="utf-8")
        return "sound"


def test_it_is_compiled_once(tmp_path: Path) -> None:
    """The second time opens what the first left, in a folder with nothing else beside it."""
    compiler, folder = Compiler(), tmp_path / "deep" / "8x64"
    assert [open_kept(folder, compiler) for _ in range(3)] == ["sound"] * 3
    assert compiler.n_compiled == 1
    assert [path.name for path in folder.parent.iterdir()] == ["8x64"]


def test_without_a_folder_nothing_is_kept() -> None:
    """None, as where there is no cache, compiles every time."""
    compiler = Compiler()
    assert [open_kept(None, compiler) for _ in range(2)] == ["sound"] * 2
    assert compiler.n_compiled == 2


def test_what_cannot_be_opened_is_replaced(tmp_path: Path) -> None:
    """A kept graph that raises is compiled again, and the new one kept."""
    compiler, folder = Compiler(), tmp_path / "8x64"
    open_kept(folder, compiler)
    (folder / GRAPH).write_bytes(b"\xff")
    assert open_kept(folder, compiler) == "sound"
    assert (folder / GRAPH).read_text(encoding="utf-8") == "sound"
    assert compiler.n_compiled == 2


def test_a_folder_that_cannot_be_made_costs_nothing_but_time(tmp_path: Path) -> None:
    """Below a file there can be no folder: the graph is compiled all the same."""
    (tmp_path / "file").touch()
    assert open_kept(tmp_path / "file" / "8x64", Compiler()) == "sound"


def test_a_failed_compilation_leaves_nothing(tmp_path: Path) -> None:
    """What the compiler raises comes through, and no folder stays behind."""

    def fail(compiled: Path | None, entries: dict[str, str]) -> str:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        open_kept(tmp_path / "8x64", fail)
    assert not list(tmp_path.iterdir())
