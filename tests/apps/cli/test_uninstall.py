"""edgedec uninstall: it lists what edgedec keeps, deletes that and nothing else, and only when it is told to."""

import io
import json
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import typer
from support.processes.command_line import run_here

from edgedec.memory_plan import format_bytes
from edgedec_apps.cli.commands import uninstall
from edgedec_apps.leftovers import _IN_CACHE, _IN_CONFIG
from edgedec_runtimes.shared.file_lock import try_lock

MINE = b"not edgedec's"
KEY = "0123456789abcdef"
STARTS = {
    "tiles": b"edgedec tiles\r\n\0",
    "head": b"/a",
    "prompt": b"edgedec block 1\n",
    "learned": b"edgedec learned files 1\n",
    "answers": b"edgedec draft store 1\n",
    "probe": b"{}",
    "optimum": b"home = /usr",
    "history": b'"hi"',
}


@pytest.fixture
def kept(cache: Path, model: Path, tmp_path: Path) -> dict[str, Path]:
    """Put into the cache and the configuration what edgedec keeps there, and files of somebody else."""
    config = tmp_path / "config"
    files = {
        "model": cache / "models/tiny.gguf",
        "hub": cache / "models/hf/o/r/main/m-Q4_0.gguf",
        "partial": cache / "models/half.gguf.partial",
        "tiles": cache / f"tiles/{KEY}.{KEY}.tiles",
        "head": cache / f"heads/{KEY}.path",
        "prompt": cache / "prompts/tiny-01234567/a1.kv",
        "learned": cache / f"learned/{KEY}{KEY}.learned",
        "answers": cache / f"answers/{KEY}{KEY}.answers",
        "probe": cache / f"probes/curve-{KEY}{KEY}.json",
        "npu": cache / f"npu/{KEY}{KEY}/graph.bin",
        "graph": cache / f"graphs/m-{KEY[:12]}-{KEY[:12]}/model.onnx",
        "optimum": cache / f"optimum/{KEY}/pyvenv.cfg",
        "history": cache / "chat-history",
        "preset": config / "presets/short.toml",
        "catalogue": config / "catalogue.toml",
    }
    for name, path in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(STARTS.get(name, b"x").ljust(1000))
    shutil.copy(model, files["model"])
    files["model"].with_name("tiny.gguf.json").write_text("{}")
    return files


def n_files(folder: Path) -> int:
    """Return how many files there are below a folder."""
    return sum(path.is_file() for path in folder.rglob("*"))


def test_it_lists_with_sizes_and_deletes_nothing(kept: dict[str, Path], cache: Path) -> None:
    """Without an option it names every model, folder and file with its size, says how to go on, and deletes nothing."""
    before = n_files(cache)
    result = run_here("uninstall")
    assert result.code == 0
    kinds = {**_IN_CACHE, **_IN_CONFIG}
    for name in ("half", "hf:o/r:m-Q4_0.gguf", "tiny"):
        assert f" kB  model {name}  {cache}" in result.text
    for path in (cache / "tiles", cache / "chat-history", kept["preset"].parent):
        assert f"   1.0 kB  {kinds[path.name]}  {path}\n" in result.text
    assert "in all\n" in result.text
    assert "edgedec uninstall --delete deletes what is listed" in result.text
    assert result.text.endswith("-m pip uninstall edgedec-llm\n")
    assert n_files(cache) == before


def test_delete_leaves_nothing(kept: dict[str, Path], cache: Path) -> None:
    """--delete --yes deletes all of it, and the folders that are empty then; a second time there is nothing."""
    model_bytes = kept["model"].stat().st_size
    listed = json.loads(run_here("uninstall", "--json").text)["kept"]
    assert sum(entry["size_bytes"] for entry in listed) == model_bytes + 14 * 1000
    result = run_here("uninstall", "--delete", "--yes")
    assert (result.code, result.err) == (0, f"{format_bytes(model_bytes + 14 * 1000 + len('{}'))} freed\n")
    assert not cache.exists()
    assert not kept["preset"].parent.parent.exists()
    again = run_here("uninstall", "--delete", "--yes")
    assert again.text.startswith("edgedec keeps nothing on this machine\n")
    assert again.err == f"{format_bytes(0)} freed\n"


def test_models_can_be_kept(kept: dict[str, Path], cache: Path) -> None:
    """With --keep-models the models with their records, and the draft heads, are what is left."""
    assert run_here("uninstall", "--delete", "--keep-models", "--yes").code == 0
    left = {path for path in cache.rglob("*") if path.is_file()}
    record = kept["model"].with_name("tiny.gguf.json")
    assert left == {kept["model"], record, kept["hub"], kept["partial"], kept["head"]}


def test_what_is_not_edgedecs_stays(kept: dict[str, Path], cache: Path, tmp_path: Path) -> None:
    """Other files in the cache's folder, empty folders beside it, and what a link in it leads to are not deleted."""
    (cache / "notes.txt").write_bytes(MINE)
    (cache / "empty").mkdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine.bin").write_bytes(MINE)
    (cache / "npu/link").symlink_to(elsewhere)
    (cache / "models/readme.txt").write_bytes(MINE)
    for name in ("tiles", "head", "prompt", "learned", "probe", "graph"):
        kept[name].with_name(f"my {kept[name].name}").write_bytes(MINE)
    kept["tiles"].with_name(f"{'0' * 16}.{KEY}.tiles").write_bytes(MINE)
    (cache / "prompts/mine.txt").write_bytes(MINE)
    (cache / "prompts/link-01234567").symlink_to(kept["prompt"].parent)
    (cache / f"learned/{KEY * 2}.0123456789abcdef.tmp").write_bytes(MINE)
    mine = {path for path in cache.rglob("*") if path.is_symlink() or (path.is_file() and path.read_bytes() == MINE)}
    result = run_here("uninstall", "--delete", "--yes")
    assert result.code == 0
    assert {path for path in cache.rglob("*") if path.is_symlink() or path.is_file()} == mine
    assert (cache / "empty").is_dir()
    told = {line.removeprefix("not edgedec's, and stays: ") for line in result.text.splitlines() if "stays: " in line}
    assert told == {str(path) for path in mine if path.parent not in (cache, cache / "models")}
    assert (elsewhere / "mine.bin").read_bytes() == MINE


def test_your_own_folder_of_models_stays(
    kept: dict[str, Path], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models in EDGEDEC_MODELS are not listed as kept by edgedec, and stay; the report names the folder."""
    own = tmp_path / "own"
    own.mkdir()
    shutil.copy(model, own / "mine.gguf")
    monkeypatch.setenv("EDGEDEC_MODELS", str(own))
    result = run_here("uninstall", "--delete", "--yes")
    assert "mine" not in result.text.replace(str(own), "")
    assert f"your own folder of models stays: {own}\n" in result.text
    assert (own / "mine.gguf").exists()


def test_it_asks_first(kept: dict[str, Path], cache: Path) -> None:
    """From a pipe, --delete needs --yes, else nothing is deleted; --yes without --delete is refused, too."""
    before = n_files(cache)
    result = run_here("uninstall", "--delete")
    assert (result.code, "nobody can be asked" in result.err) == (40, True)
    run_here("uninstall", "--yes").failed(40, "--yes belongs to --delete")
    run_here("uninstall", "--keep-models").failed(40, "--keep-models belongs to --delete")
    assert n_files(cache) == before


@pytest.mark.parametrize(
    ("answer", "deleted"), [("y\n", True), ("YES\n", True), ("\n", False), ("n\n", False), ("", False)]
)
def test_only_yes_deletes(
    kept: dict[str, Path], cache: Path, answer: str, deleted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a terminal a question comes first, and any answer but yes deletes nothing."""

    class Typed(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Typed(answer))
    with nullcontext() if deleted else pytest.raises(typer.Exit):
        uninstall.command(delete=True, keep_models=False, yes=False)
    assert cache.exists() is not deleted


def test_a_model_that_is_being_fetched_stays(kept: dict[str, Path]) -> None:
    """While another process fetches a model, --delete is refused with what to do."""
    lock = try_lock(kept["model"])
    assert lock is not None
    with lock:
        result = run_here("uninstall", "--delete", "--yes")
    assert (result.code, "tiny is being pulled by another process" in result.err) == (20, True)
    assert kept["model"].exists()


@pytest.mark.parametrize(
    ("prefix", "expected"),
    [
        ("/home/a/.local/share/pipx/venvs/edgedec-llm", "pipx uninstall edgedec-llm"),
        ("/home/a/.local/share/uv/tools/edgedec-llm", "uv tool uninstall edgedec-llm"),
        ("/home/a/.venv", f"{sys.executable} -m pip uninstall edgedec-llm"),
    ],
)
def test_the_program_is_removed_by_what_installed_it(
    prefix: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last line names the tool that made the environment."""
    monkeypatch.setattr(sys, "prefix", prefix)
    monkeypatch.setattr(uninstall, "installer", lambda: "pip")
    assert uninstall.removal_command() == expected
    monkeypatch.setattr(uninstall, "installer", lambda: "uv")
    if ".venv" in prefix:
        assert uninstall.removal_command() == f"uv pip uninstall --python {sys.executable} edgedec-llm"
