"""The desktop example, in a window without a screen: it loads, streams, stops and goes, as its README says."""

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.models.saying_model import saying_model

os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
SOURCE = Path(__file__).parents[2] / "apps" / "desktop" / "main.py"
if not SOURCE.is_file():
    pytest.skip("the sources are not beside the tests", allow_module_level=True)
QtCore = pytest.importorskip("PySide6.QtCore", reason="PySide6 is not installed", exc_type=ImportError)
QtWidgets = pytest.importorskip(
    "PySide6.QtWidgets",
    reason="PySide6 is not installed, or a library of the system that it needs",
    exc_type=ImportError,
)

pytestmark = pytest.mark.slow
if QtCore.__version_info__ >= (6, 12) and sys.version_info < (3, 12):
    pytest.skip("PySide6 6.12 counts references wrongly on Python 3.11 and ends it", allow_module_level=True)


def load_module() -> Any:
    """Return the application's module: a folder of its own, not on the path."""
    spec = importlib.util.spec_from_file_location("desktop_example", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def app() -> Any:
    """The one application object that a process may have."""
    app = QtWidgets.QApplication.instance() or QtWidgets.QApplication([])
    app.setQuitOnLastWindowClosed(False)
    return app


@pytest.fixture
def window(app: Any, tiny_path: Path) -> Iterator[Any]:
    """A window with the tiny model named in both panes; its threads have ended afterwards."""
    module = load_module()
    module.MAX_TOKENS = 32
    window = module.Window([str(tiny_path)] * 2, "", True)
    window.show()
    yield window
    window.close()
    for pane in window.panes:
        assert pane.worker_thread.wait(30_000), "the thread goes on"


def run_until(is_so: Callable[[], bool]) -> None:
    """Run the event loop until something is so."""
    clock = QtCore.QElapsedTimer()
    clock.start()
    while not is_so():
        assert clock.elapsed() < 60_000, "it never came"
        QtWidgets.QApplication.processEvents(QtCore.QEventLoop.ProcessEventsFlag.AllEvents, 20)


def finish(pane: Any) -> str:
    """Run the event loop until the pane is neither loading nor answering, and return what it tells."""
    run_until(lambda: not pane.stop_button.isEnabled())
    return str(pane.status.text())


def load(pane: Any) -> str:
    """Press Load, and return what the pane tells in the end."""
    pane.load_button.click()
    assert pane.stop_button.isEnabled()
    return finish(pane)


def say(pane: Any, text: str) -> None:
    """Write a message and press Return."""
    pane.prompt.setText(text)
    pane.prompt.returnPressed.emit()


def test_it_loads_streams_and_remembers(window: Any) -> None:
    """A message is answered piece by piece, and the conversation kept for the next one."""
    pane = window.panes[0]
    pieces: list[str] = []
    pane.worker.said.connect(pieces.append)
    assert not pane.send_button.isEnabled()
    assert "2048 tokens of context; changed to fit: nothing" in load(pane)
    say(pane, "Hello")
    assert not pane.send_button.isEnabled()
    assert "tokens/s" in finish(pane)
    question, answer = pane.messages
    assert question == {"role": "user", "content": "Hello"}
    assert answer == {"role": "assistant", "content": "".join(pieces)}
    assert pane.transcript.toPlainText().startswith("> Hello\n")
    say(pane, "And again")
    finish(pane)
    assert "\n\n> And again\n" in pane.transcript.toPlainText()
    assert [message["role"] for message in pane.messages] == ["user", "assistant"] * 2


def test_answers_are_markdown_without_html(window: Any, tmp_path: Path) -> None:
    """Also in the second turn, and line by line; what the user says stays text, and no mark of HTML is one."""
    pane, template = window.panes[0], "{% for m in messages %}{{ m.content }}{% endfor %}"
    lines = ["# Boats\n", "\n1. **small**\n", "2. large <b>x</b>\n", "\nSo."]
    pane.model.setCurrentText(str(saying_model(tmp_path / "m.gguf", {"?": lines}, chat_template=template)))
    load(pane)
    for _ in range(2):
        say(pane, "**Which**?")
        finish(pane)
    turn = "> **Which**?\nBoats\nsmall\nlarge <b>x</b>\nSo.\n\n"
    assert pane.transcript.toPlainText() == turn * 2
    page = pane.transcript.toHtml()
    assert page.count("xx-large") == page.count("<ol") == 2
    assert "font-weight:700" in page.split("small")[0].rsplit("<", 1)[-1]
    assert pane.messages[-1]["content"] == "".join(lines)


def test_the_bar_ends_with_what_it_shows(window: Any) -> None:
    """It is there while a model loads or reads a prompt, and gone when that is done: an answer shows itself."""
    pane = window.panes[0]
    pane.load_button.click()
    assert pane.progress.isVisible()
    finish(pane)
    assert not pane.progress.isVisible()
    visible: list[bool] = []
    say(pane, "Hello")
    assert pane.progress.isVisible()
    pane.transcript.textChanged.connect(lambda: visible.append(pane.progress.isVisible()))
    finish(pane)
    assert visible
    assert not any(visible)


@pytest.mark.parametrize("n_named", [0, 2])
def test_it_loads_by_itself(app: Any, tiny_path: Path, monkeypatch: pytest.MonkeyPatch, n_named: int) -> None:
    """The models that the command names, else the first one of the list."""
    module = load_module()
    monkeypatch.setattr(module, "MODELS", (str(tiny_path),) * 2)
    monkeypatch.setattr(sys, "argv", ["main.py", "--offline", *[str(tiny_path)] * n_named])
    monkeypatch.setattr(module.QtWidgets, "QApplication", lambda arguments: app)
    told: list[list[str]] = []

    def look() -> None:
        (window,) = [each for each in app.topLevelWidgets() if isinstance(each, module.Window)]
        if any(pane.stop_button.isEnabled() for pane in window.panes):
            return
        told.append([pane.status.text() for pane in window.panes])
        timer.stop()
        window.close()

    timer = QtCore.QTimer(interval=20)
    timer.timeout.connect(look)
    timer.start()
    monkeypatch.setattr(module.Window, "_quit_when_all_have_left", lambda window: app.quit())
    assert module.main() == 0
    assert [("tokens of context" in text) for text in told[0]] == [True, n_named == 2]


def test_stop_ends_an_answer(window: Any) -> None:
    """A stopped answer ends as one, and the next message is answered."""
    pane = window.panes[0]
    load(pane)
    say(pane, "Hello")
    pane.stop_button.click()
    assert finish(pane).endswith("cancelled")
    say(pane, "Hello")
    assert not finish(pane).endswith("cancelled")


def test_both_models_answer_at_the_same_time(window: Any) -> None:
    """Two panes hold a model each, and both answer."""
    for pane in window.panes:
        load(pane)
    for pane in window.panes:
        say(pane, "Hello")
    for pane in window.panes:
        assert "tokens/s" in finish(pane)
        assert len(pane.messages) == 2


def test_the_event_loop_runs_while_a_model_loads_and_answers(window: Any) -> None:
    """A timer of the window's fires meanwhile."""
    pane = window.panes[0]
    turns: list[str] = []
    timer = QtCore.QTimer(interval=0)
    timer.timeout.connect(lambda: turns.append(pane.status.text()))
    timer.start()
    load(pane)
    say(pane, "Hello")
    finish(pane)
    timer.stop()
    assert any(text.startswith("loading") for text in turns)
    assert "answering" in turns


def test_a_cap_that_is_too_small_is_told(window: Any) -> None:
    """A model over the memory allowed is refused with the reason, and nothing can be sent; without the cap it loads."""
    pane = window.panes[0]
    cap = window.findChild(QtWidgets.QLineEdit, options=QtCore.Qt.FindChildOption.FindDirectChildrenOnly)
    cap.setText("10kB")
    assert "allowed" in load(pane)
    assert not pane.send_button.isEnabled()
    cap.clear()
    assert "tokens of context" in load(pane)


def test_a_model_that_is_not_there_is_told(window: Any) -> None:
    """A name that nothing answers to ends in a sentence; another model can be named then."""
    pane = window.panes[0]
    pane.model.setCurrentText("absent.gguf")
    assert "absent.gguf" in load(pane)
    assert pane.load_button.isEnabled()
    assert not pane.send_button.isEnabled()


@pytest.mark.parametrize("doing", ["nothing", "loading", "answering"])
def test_closing_the_window_ends_the_application(app: Any, window: Any, doing: str) -> None:
    """The event loop ends by itself, whatever goes on; the threads have ended then, and their models are freed."""
    pane = window.panes[0]
    if doing == "answering":
        load(pane)
        say(pane, "Hello")
    elif doing == "loading":
        pane.load_button.click()
    QtCore.QTimer.singleShot(0, window.close)
    guard = QtCore.QTimer(singleShot=True, interval=60_000)
    guard.timeout.connect(lambda: app.exit(1))
    guard.start()
    assert app.exec() == 0
    guard.stop()
    assert all(pane.worker_thread.isFinished() for pane in window.panes)


def test_a_picture_goes_with_the_next_message(window: Any, tmp_path: Path) -> None:
    """Its file stands in the message; a model that reads no pictures says so, and the next message is answered."""
    pane = window.panes[0]
    load(pane)
    asked: list[Any] = []
    pane.answer_asked.connect(lambda messages, _: asked.append([dict(message) for message in messages]))
    pane.attach(str(tmp_path / "a.png"))
    assert "a.png" in pane.status.text()
    say(pane, "What is this?")
    assert "mmproj" in finish(pane)
    assert asked == [[{"role": "user", "content": "What is this?", "images": [str(tmp_path / "a.png")]}]]
    assert "> [a.png] What is this?" in pane.transcript.toPlainText()
    say(pane, "Hello")
    assert "tokens/s" in finish(pane)
