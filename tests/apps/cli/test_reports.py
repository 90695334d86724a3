"""The commands that only tell: info, doctor, list and --version, for a person and as JSON; rm keeps to the cache."""

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from shutil import copyfile

import pytest
from support.processes.command_line import rename_model, run_here, run_process

from edgedec_apps.cli.shown.log import show_log
from edgedec_apps.cli.shown.terminal import say, write_facts, write_line
from edgedec_runtimes.cpu.tiles.huge_pages import HugePages


@pytest.fixture
def own_models(model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the tiny model as the person's own folder of models."""
    monkeypatch.setenv("EDGEDEC_MODELS", str(model.parent))
    return model.parent


HOSTILE = [*map(chr, range(0x20)), "\x7f", *map(chr, range(0x80, 0xA0)), *"\u202a\u202e\u2066\u2069\ud800\udfff"]
BREAKS = ["\n", "\r", "\v", "\f", "\x1c", "\x85", "\u2028", "\u2029", "\r\n"]


def log(text: str) -> None:
    """Log a text as the server logs a path."""
    logger = logging.getLogger("edgedec")
    before = logger.handlers, logger.level, logger.propagate
    show_log()
    logging.getLogger("edgedec.server").info("%s %s", "GET", text)
    logger.handlers, logger.level, logger.propagate = before


@pytest.mark.parametrize("show", [say, write_line, log, lambda text: write_facts([("name", text)])])
def test_what_strangers_wrote_is_shown_without_controls(
    show: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Controls of both sets, direction overrides and halves of surrogate pairs, into a pipe too; letters stay."""
    show(f"a{''.join(HOSTILE)}é\u05d0🙂")
    shown = "".join(capsys.readouterr())
    assert not set(shown) & set(HOSTILE) - {"\n", "\t"}
    assert shown.rstrip("\n").endswith("é\u05d0🙂")


@pytest.mark.parametrize("show", [log, lambda text: write_facts([("name", text)])])
def test_no_text_makes_two_lines_of_one(show: Callable[[str], None], capsys: pytest.CaptureFixture[str]) -> None:
    """Neither a report nor a log gets a line that somebody else has written."""
    for each in BREAKS:
        show(f"/{each}edgedec.server: POST /v1/completions 200")
        assert len("".join(capsys.readouterr()).splitlines()) == 1


@pytest.mark.slow
def test_info_shows_metadata_without_controls(model: Path, tmp_path: Path) -> None:
    """Where standard output is a pipe, too."""
    odd = copyfile(model, tmp_path / "x\x1b[2J\n\u202eyzw.gguf")
    found = run_here("info", odd)
    assert found.code == 0
    assert "x␛[2J␊\ufffdyzw" in found.text
    assert json.loads(run_here("info", odd, "--json").out)["name"] == "x\x1b[2J\n\u202eyzw"


@pytest.mark.slow
def test_a_model_is_called_as_the_person_calls_it(model: Path, tmp_path: Path) -> None:
    """Never as the file says of itself (general.name), in info as in an error."""
    path = rename_model(tmp_path / "mine.gguf", model, "Tiny Mix1 Ep")
    assert run_here("info", path).text.splitlines()[0].split() == ["name", "mine"]
    told = run_here("embed", path, "hi")
    assert "mine" in told.err
    assert "Mix1" not in told.err


@pytest.mark.slow
@pytest.mark.parametrize("args", [("info", "tiny"), ("show", "tiny"), ("doctor",), ("list",)])
def test_reports_come_as_text_and_as_json(own_models: Path, args: tuple[str, ...]) -> None:
    """A report is lines for a person, or one JSON object with --json; standard error stays empty."""
    text, as_json = run_here(*args), run_here(*args, "--json")
    assert (text.code, as_json.code) == (0, 0)
    assert (text.err, as_json.err) == ("", "")
    assert text.text.count("\n") > 3
    assert isinstance(json.loads(as_json.out), dict)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pages", "told"),
    [
        (HugePages(2 << 20, "madvise"), "2048 KiB each, for private memory where a program asks"),
        (HugePages(32 << 20, "always"), "32768 KiB each, for all private memory"),
        (HugePages(2 << 20, "never"), "2048 KiB each, not for private memory (transparent_hugepage/enabled is never)"),
        (None, "none"),
    ],
)
def test_doctor_tells_of_huge_pages(monkeypatch: pytest.MonkeyPatch, pages: HugePages | None, told: str) -> None:
    """Which ones the system gives, also where it has none."""
    monkeypatch.setattr("edgedec_runtimes.cpu.tiles.huge_pages.huge_pages", lambda: pages)
    monkeypatch.setattr("edgedec_apps.cli.commands.doctor.ask_runtimes", lambda _: {})
    assert json.loads(run_here("doctor", "--json").out)["memory"]["huge pages"] == told


def test_other_words_for_huge_pages_are_refused(own_models: Path) -> None:
    """In the words of the command line, before anything is loaded."""
    found = run_here("plan", "tiny", "--runtime", "cpu", "--runtime-option", "huge_pages=yes")
    assert found.code != 0
    assert "huge_pages is 'yes'; it must be auto, on or off" in found.err


@pytest.mark.slow
@pytest.mark.usefixtures("drafting")
def test_info_has_the_memory_of_the_plan(own_models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For each context, and with a short text, info says to the byte what `edgedec plan` says."""
    monkeypatch.delenv("EDGEDEC_RUNTIME")
    monkeypatch.setattr("edgedec_apps.base_memory.resident_bytes", lambda: 60_000_000)  # each command in a new process
    told = json.loads(run_here("info", "tiny", "--json").out)
    assert list(told["memory_bytes"]) == ["512", "2048"]
    for n_ctx, n_bytes in told["memory_bytes"].items():
        planned = json.loads(run_here("plan", "tiny", "--context", n_ctx, "--json").out)
        assert (n_bytes, told["memory_start_bytes"]) == (planned["total_bytes"], planned["start_bytes"])
    assert planned["total_bytes"] == json.loads(run_here("plan", "tiny", "--json").out)["total_bytes"]


@pytest.mark.slow
def test_info_tells_what_the_header_says(own_models: Path) -> None:
    """Shape, context and defaults are the file's; both runtimes take it."""
    found = json.loads(run_here("info", "tiny", "--json").out)
    assert (found["name"], found["architecture"]) == ("tiny", "llama")
    assert (found["n_layer"], found["n_embd"], found["n_vocab"]) == (2, 64, 261)
    assert (found["n_ctx_train"], found["n_ctx_default"]) == (2048, 2048)
    defaults = found["sampling_defaults"]
    assert (defaults["temperature"], defaults["top_p"], found["sampling_defaults_from"]) == (0.7, 0.95, "edgedec")
    assert found["runtimes"].items() >= {"llamacpp": None, "reference": None}.items()


@pytest.mark.slow
def test_info_of_a_gguf_says_what_the_runtimes_of_exports_take(own_models: Path) -> None:
    """That a GGUF is none of theirs is no fault of it."""
    lines = run_here("info", "tiny").text.splitlines()
    assert [line.split(maxsplit=2)[2] for line in lines if line.startswith(("on onnx", "on npu"))] == [
        "no: no ONNX model; the onnx runtime runs folders that `edgedec export` wrote",
        "no: no exported model, expected a folder that `edgedec export MODEL --target npu` wrote",
    ]


@pytest.mark.slow
def test_info_of_a_model_to_pull_is_the_catalogues() -> None:
    """A catalogue model that is not on this machine is described without touching the network."""
    found = json.loads(run_here("info", "smollm2-135m", "--json").out)
    assert (found["path"], found["architecture"]) == (None, "llama")


@pytest.mark.slow
def test_the_list_has_the_persons_own_models(own_models: Path) -> None:
    """NAME.gguf in EDGEDEC_MODELS is listed as NAME; the rest of the catalogue is there to pull."""
    found = json.loads(run_here("list", "--json").out)
    (entry,) = [entry for entry in found["models"] if entry["name"] == "tiny"]
    assert (entry["path"], entry["complete"]) == (str(own_models / "tiny.gguf"), True)
    assert entry["origin"] == "EDGEDEC_MODELS"
    assert "smollm2-135m" in {entry["name"] for entry in found["to_pull"]}
    assert re.search(r"(?m)^tiny +\S+ [kM]B +from \S+ [kM]B .* in EDGEDEC_MODELS$", run_here("list").text)


def test_rm_never_deletes_a_file_of_the_person(own_models: Path) -> None:
    """What lies in EDGEDEC_MODELS is not the cache's to delete."""
    run_here("rm", "tiny").failed(11, "tiny")
    assert (own_models / "tiny.gguf").exists()


def test_the_version_is_one_line() -> None:
    """--version prints a version and nothing else."""
    result = run_here("--version")
    assert (result.code, result.err) == (0, "")
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", result.text)


@pytest.fixture
def broken_plugins(tmp_path: Path) -> Path:
    """A folder of plug-ins: a drafter that does not import, and a runtime that fails at every question."""
    package = tmp_path / "broken-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    entries = "[edgedec.drafters]\nbad = no_such_module:X\n[edgedec.runtimes]\nbad = bad_runtime:Bad\n"
    (package / "entry_points.txt").write_text(entries)
    fail = "lambda self, *args: 1 // 0"
    (tmp_path / "bad_runtime.py").write_text(f"class Bad:\n    name = 'bad'\n    report = accepts = {fail}\n")
    return tmp_path


@pytest.mark.slow
def test_broken_plug_ins_are_lines_in_reports(own_models: Path, broken_plugins: Path) -> None:
    """What fails to import, or to answer, is listed with its package and reason, and nothing else suffers."""
    env = {"PYTHONPATH": str(broken_plugins)}
    doctor, info = (run_process(*args, env=env) for args in (("doctor", "--all"), ("info", "tiny")))
    assert (doctor.code, doctor.err, info.code, info.err) == (0, "", 0, "")
    facts = [line.split(maxsplit=2) for line in doctor.text.splitlines() if " bad " in line]
    told = "ZeroDivisionError: integer division or modulo by zero (from broken 1.0)"
    assert " ".join(facts[0]) == f"bad does not work: {told}"
    assert (facts[1][:2], facts[2][:2]) == (["runtime", "bad"], ["drafter", "bad"])
    assert "no_such_module" in facts[2][2]
    assert "broken 1.0" in facts[2][2]
    assert re.search(rf"(?m)^on bad +no: {re.escape(told)}$", info.text)
    assert re.search(r"(?m)^on cpu +yes \(chosen by auto\)$", info.text)
    short = run_process("doctor", env=env)
    (broken,) = re.findall(r"(?m)^not working  (.+)$", short.text)
    assert set(broken.split(", ")) == {"runtime bad", "drafter bad"}  # an optional runtime is not broken
    assert len(short.text.splitlines()) <= 10
