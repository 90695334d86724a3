"""The examples do what they say, with tiny models."""

import importlib.util
import io
import json
import os
import shlex
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer
from support.models.saying_model import saying_model
from support.processes.running_server import started

import edgedec
from edgedec_apps.cli.app import app as command_line

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
if not EXAMPLES.is_dir():
    pytest.skip("the examples are not beside the tests", allow_module_level=True)
UNITS = [EXAMPLES / "edgedec.service", *sorted(ROOT.glob("apps/*/edgedec.service"))]
TOOLS = "{% for m in messages %}{{ m.content }}{{ '!' if m.role == 'tool' else '?' }}{% endfor %}"


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load the examples' models without comparing runtimes."""
    monkeypatch.setattr(edgedec, "load", partial(edgedec.load, runtime="cpu"))


def example(name: str) -> ModuleType:
    """Return the module of an example."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_has_each_example() -> None:
    """The README names every file and folder beside it, and documents lead to it."""
    table = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    names = [path.name for path in EXAMPLES.iterdir() if path.name[0] not in "._" and path.name != "README.md"]
    assert [name for name in names if f"| [{name}]({name}" not in table] == []
    if (ROOT / "docs").is_dir():
        assert "../examples/README.md" in (ROOT / "docs" / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_chat_answers_each_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Token by token; the end of the input ends it, and a chat that is too long goes on without its oldest turns."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    model = saying_model(tmp_path / "m.gguf", {"?": ["Two", " and"]}, chat_template=template, n_ctx_train=128)
    lines = iter(["Who?", "What?", "Where?" * 6])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines, None) or end())
    example("chat").main(str(model))
    assert capsys.readouterr().out == "Two and\n" * 3
    assert len((EXAMPLES / "chat.py").read_text(encoding="utf-8").splitlines()) <= 30


def end() -> str:
    """Do what input() does at the end of the input."""
    raise EOFError


@pytest.mark.slow
def test_each_text_becomes_json(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """200 texts give 200 objects of the schema in their order, each of which its text gives alone, too."""
    module = example("json_from_texts")
    module.SCHEMA["properties"]["product"]["maxLength"] = 2
    texts = [f"Kettle {i}" for i in range(200)]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(texts)))
    module.main(str(tiny_path))
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(records) == 200
    assert all(list(record) == module.SCHEMA["required"] and 1 <= record["rating"] <= 5 for record in records)
    with edgedec.load(tiny_path, n_ctx=1024) as model:
        assert list(module.records(model, [texts[7], texts[150]])) == [records[7], records[150]]


@pytest.mark.slow
@pytest.mark.parametrize("n_lines", [2, 400])
def test_a_document_is_asked_about(tmp_path: Path, capsys: pytest.CaptureFixture[str], n_lines: int) -> None:
    """A short one is read whole; of a long one the passages that match, and it is said which."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}?"
    model = saying_model(tmp_path / "m.gguf", {"?": ["Five"]}, chat_template=template)
    text = tmp_path / "prices.txt"
    text.write_text("".join(f"Item {i} costs {i} crowns.\n\n" for i in range(n_lines)), encoding="utf-8")
    example("ask_document").main(str(model), str(text), "What does item 5 cost?")
    out, err = capsys.readouterr()
    assert out == "Five\n"
    assert ("passage" in err) == (n_lines == 400)


@pytest.mark.slow
def test_a_tool_is_called_and_its_result_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The call is shown; the answer follows the result."""
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
    path = saying_model(tmp_path / "m.gguf", {"?": [call], "!": ["It rains."]}, chat_template=TOOLS)
    example("tool").main(str(path), "How is Oslo")
    out, err = capsys.readouterr()
    assert out == "It rains.\n"
    assert err == 'weather({"city": "Oslo"}) -> 4 degrees, rain\n'


@pytest.mark.slow
def test_a_client_talks_to_the_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It asks the first model, and prints the answer as it comes."""
    pytest.importorskip("openai", reason="the library of OpenAI's clients is not installed")
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    path = saying_model(tmp_path / "m.gguf", {"?": ["Two", " and"]}, chat_template=template)
    with started(path) as running:
        example("server_client").main("Who?", f"{running.url}/v1")
    out, err = capsys.readouterr()
    assert out == "Two and"
    assert err == "\n[m: 2 tokens]\n"


@pytest.mark.slow
def test_the_window_loads_and_answers(tmp_path: Path) -> None:
    """It loads by itself, shows the answer as Markdown, and its thread ends with it."""
    os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
    core = pytest.importorskip("PySide6.QtCore", reason="PySide6 is not installed", exc_type=ImportError)
    widgets = pytest.importorskip(
        "PySide6.QtWidgets", reason="a library of the system is missing", exc_type=ImportError
    )
    if core.__version_info__ >= (6, 12) and sys.version_info < (3, 12):
        pytest.skip("PySide6 6.12 counts references wrongly on Python 3.11 and ends it")
    app = widgets.QApplication.instance() or widgets.QApplication([])
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    path = saying_model(tmp_path / "m.gguf", {"?": ["It is ", "**big**", "<b>.</b>"]}, chat_template=template)
    window = example("window").Window(str(path))
    clock = core.QElapsedTimer()
    clock.start()

    def wait() -> None:
        while not window.line.isEnabled():
            assert clock.elapsed() < 60_000, "it never came"
            app.processEvents(core.QEventLoop.ProcessEventsFlag.AllEvents, 20)

    wait()
    window.line.setText("Is it?")
    window.line.returnPressed.emit()
    assert not window.line.isEnabled()
    wait()
    assert window.page.toPlainText().split("\n")[-1] == "It is big<b>.</b>"
    window.close()
    assert window.worker_thread.isFinished()


@pytest.mark.slow
def test_the_cells_of_the_notebook_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In their order, with a tiny model in the place of the one that they fetch; no output is kept in the file."""
    notebook = json.loads((EXAMPLES / "notebook.ipynb").read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    path = saying_model(tmp_path / "m.gguf", {"": ["One, ", "two."]}, chat_template=template)
    names: dict[str, Any] = {}
    for cell in cells:
        exec("".join(cell["source"]).replace('"smollm2-135m"', repr(str(path))), names)
    assert capsys.readouterr().out.startswith("One, two.")


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.parent.name)
def test_the_command_of_a_unit_is_accepted(unit: Path) -> None:
    """Each variable of a unit's command has a value in the unit, and the command line takes the options."""
    lines = [line.partition("=") for line in unit.read_text(encoding="utf-8").splitlines() if "=" in line]
    values = dict(pair.split("=", 1) for key, _, text in lines if key == "Environment" for pair in shlex.split(text))
    (command,) = [text for key, _, text in lines if key == "ExecStart"]
    for name, value in values.items():
        command = command.replace(f"${{{name}}}", value).replace(f"${name}", value)
    assert "$" not in command
    program, name, *args = shlex.split(command)
    assert (Path(program).name, name) == ("edgedec", "serve")
    parser = typer.main.get_command(command_line)
    with parser.make_context("edgedec", [name]) as context:
        found = parser.get_command(context, name).make_context(name, list(args), parent=context).params  # type: ignore[attr-defined]
    assert found["memory"]
    assert found["offline"] is found["quiet"] is True


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.parent.name)
def test_systemd_takes_a_unit(unit: Path, tmp_path: Path) -> None:
    """systemd-analyze has nothing to say, with a program that is there in the place of edgedec."""
    text = unit.read_text(encoding="utf-8").replace("/opt/edgedec/bin/edgedec", sys.executable)
    copy = tmp_path / "edgedec.service"
    copy.write_text(text.replace("%h/.local/bin/edgedec", sys.executable).replace("User=edgedec", "User=root"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--recursive-errors=no", "--man=no", str(copy)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
