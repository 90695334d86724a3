"""A desktop chat: two models side by side, each in a thread of its own, so that the window never waits."""

# mypy: allow-subclassing-any, allow-untyped-decorators, disable-error-code="import-not-found"

import argparse
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from PySide6 import QtGui, QtWidgets
from PySide6.QtCore import QObject, Qt, QThread, Signal, Slot

import edgedec

MODELS = ("smollm2-135m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b")
MAX_TOKENS = 512  # of an answer
PICTURES = "Pictures (*.png *.jpg *.jpeg *.webp *.gif *.bmp)"
MARKDOWN = QtGui.QTextDocument.MarkdownFeature.MarkdownDialectGitHub
MARKDOWN |= QtGui.QTextDocument.MarkdownFeature.MarkdownNoHTML
Messages = list[dict[str, Any]]


class Worker(QObject):
    """Loads a model and generates answers, in the thread that this object is in; signals report to the window."""

    progressed = Signal(str, int)  # phase, percent (-1: unknown)
    said = Signal(str)  # a piece of the answer
    answered = Signal(str)  # the whole answer
    ended = Signal(bool, str)  # whether a model is loaded now, and a message

    def __init__(self, offline: bool) -> None:
        super().__init__()
        self._offline = offline
        self._engine: edgedec.Engine | None = None
        self._reported = ("", 0)

    @Slot(str, str, object)
    def load(self, name: str, memory: str, cancel: edgedec.CancelToken) -> None:
        """Free the present model, then load another."""
        self.close()
        try:
            self._engine = edgedec.load(
                name, memory=memory or None, offline=self._offline, on_progress=self._report, cancel=cancel
            )
        except edgedec.EdgedecError as error:
            self.ended.emit(False, str(error))
            return
        given_up = ", ".join(self._engine.plan.given_up) or "nothing"
        self.ended.emit(True, f"{name}: {self._engine.n_ctx} tokens of context; changed to fit: {given_up}")

    @Slot(list, object)
    def answer(self, messages: Messages, cancel: edgedec.CancelToken) -> None:
        """Answer the last message, token by token."""
        engine = self._engine
        assert engine is not None, "the window sends only where a model is loaded"
        n_most = min(MAX_TOKENS, engine.n_ctx // 2)
        try:
            newest, _ = engine.fit_messages(messages, n_most)  # drops the oldest turns where they don't fit
            stream = engine.chat_stream(newest, max_tokens=n_most, cancel=cancel, on_progress=self._report)
            with closing(stream):
                for token in stream:
                    self.said.emit(token.text)
        except edgedec.EdgedecError as error:
            self.ended.emit(True, str(error))
            return
        done, stats = stream.generation, stream.generation.stats
        self.answered.emit(done.text)
        self.ended.emit(True, f"{len(done.token_ids)} tokens, {stats.tokens_per_s:.1f} tokens/s, {done.finish_reason}")

    @Slot()
    def leave(self) -> None:
        """Free the model and end the thread."""
        self.close()
        self.thread().quit()

    def close(self) -> None:
        """Free the model."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def _report(self, progress: edgedec.Progress) -> None:
        now = (progress.phase, progress.done * 100 // progress.total if progress.total else -1)
        if now != self._reported:  # a signal for every percent is enough
            self._reported = now
            self.progressed.emit(*now)


class Pane(QtWidgets.QWidget):
    """One model with its conversation and an input line."""

    load_asked = Signal(str, str, object)
    answer_asked = Signal(list, object)
    leave_asked = Signal()

    def __init__(self, name: str, memory: QtWidgets.QLineEdit, offline: bool) -> None:
        super().__init__()
        self.messages: Messages = []
        self.images: list[str] = []  # files of pictures that go with the next message
        self._memory = memory
        self._cancel = edgedec.CancelToken()
        self._lay_out(name)
        self.worker, self.worker_thread = Worker(offline), QThread()
        self.worker.moveToThread(self.worker_thread)  # where its slots run from now on
        self.load_asked.connect(self.worker.load)
        self.answer_asked.connect(self.worker.answer)
        self.leave_asked.connect(self.worker.leave)
        self.worker.progressed.connect(self._show_progress)
        self.worker.said.connect(self._say)
        self.worker.answered.connect(self._keep)
        self.worker.ended.connect(self._end)
        self.worker_thread.start()
        self._end(False, "no model is loaded")

    def _lay_out(self, name: str) -> None:
        self.model = QtWidgets.QComboBox(editable=True)
        self.model.addItems(MODELS)
        self.model.setCurrentText(name)
        self.model.setAccessibleName("Model: a name, or a file")
        self.transcript = QtWidgets.QTextEdit(readOnly=True)
        self.transcript.setAccessibleName("Conversation")
        self.progress = QtWidgets.QProgressBar()
        self.prompt = QtWidgets.QLineEdit(placeholderText="Message")
        self.prompt.returnPressed.connect(self.send)
        self.load_button, self.send_button, self.stop_button = map(QtWidgets.QPushButton, ("Load", "Send", "Stop"))
        self.picture_button = QtWidgets.QPushButton("Picture")
        self.picture_button.clicked.connect(self.choose_picture)
        self.load_button.clicked.connect(self.load)
        self.send_button.clicked.connect(self.send)
        self.stop_button.clicked.connect(self.stop)
        self.status = QtWidgets.QLabel(wordWrap=True, textFormat=Qt.TextFormat.PlainText)
        layout = QtWidgets.QGridLayout(self)
        layout.addWidget(self.model, 0, 0, 1, 2)
        layout.addWidget(self.load_button, 0, 2)
        layout.addWidget(self.transcript, 1, 0, 1, 3)
        layout.addWidget(self.progress, 2, 0, 1, 3)
        layout.addWidget(self.prompt, 3, 0)
        layout.addWidget(self.send_button, 3, 1)
        layout.addWidget(self.stop_button, 3, 2)
        layout.addWidget(self.status, 4, 0, 1, 2)
        layout.addWidget(self.picture_button, 4, 2)

    def choose_picture(self) -> None:
        """Let the user choose a picture that goes with the next message."""
        path, _ = QtWidgets.QFileDialog.getOpenFileName(self, "A picture for the next message", "", PICTURES)
        if path:
            self.attach(path)

    def attach(self, path: str) -> None:
        """Attach a picture's file to the next message."""
        self.images.append(path)
        self.status.setText(f"{len(self.images)} pictures for the next message; the last one is {Path(path).name}")

    def load(self) -> None:
        """Order the worker to load the model that was entered."""
        self.messages, self.images = [], []
        self.transcript.clear()
        self._begin(f"loading {self.model.currentText()}")
        self.load_asked.emit(self.model.currentText(), self._memory.text().strip(), self._cancel)

    def send(self) -> None:
        """Order the worker to answer the message that was entered."""
        text = self.prompt.text().strip()
        if text and self.send_button.isEnabled():
            self.prompt.clear()
            images, self.images = self.images, []
            self.messages.append({"role": "user", "content": text} | ({"images": images} if images else {}))
            shown = "".join(f"[{Path(path).name}] " for path in images)
            self._begin("answering")
            self._write(f"> {shown}{text}")
            self._answer, self._answer_at = "", self._write("\n")
            self.answer_asked.emit(self.messages, self._cancel)

    def stop(self) -> None:
        """Cancel loading or answering without waiting; a signal of the worker reports the end."""
        self._cancel.cancel()

    def leave(self) -> None:
        """Cancel the work, free the model and end the thread, without waiting."""
        self._cancel.cancel()
        self.leave_asked.emit()

    def _begin(self, what: str) -> None:
        self._cancel = edgedec.CancelToken()
        self._show(what, busy=True, ready=False)

    def _end(self, has_model: bool, what: str) -> None:
        if self.messages and self.messages[-1]["role"] == "user":  # the message has no answer
            self.messages.pop()
        self._show(what, busy=False, ready=has_model)

    def _show(self, status: str, *, busy: bool, ready: bool) -> None:
        self.status.setText(status)
        self.progress.setRange(0, 0)
        self.progress.setVisible(busy)
        self.model.setEnabled(not busy)
        self.load_button.setEnabled(not busy)
        self.send_button.setEnabled(ready)
        self.stop_button.setEnabled(busy)

    def _show_progress(self, phase: str, percent: int) -> None:
        self.progress.setRange(0, 0 if percent < 0 else 100)
        self.progress.setValue(percent)
        self.progress.setFormat(f"{phase} %p %")

    def _say(self, text: str) -> None:
        self.progress.hide()  # the text is its own progress
        self._answer += text
        is_line = "\n" in text  # Markdown is read line by line
        self._write(self._answer if is_line else text, self._answer_at if is_line else None)

    def _keep(self, answer: str) -> None:
        self.messages.append({"role": "assistant", "content": answer})
        self._write(answer, self._answer_at)
        self._write("\n")
        self._write("\n")

    def _write(self, text: str, markdown_at: int | None = None) -> int:
        """Write at the end, or Markdown from a place to the end; return the place behind it."""
        bar = self.transcript.verticalScrollBar()
        at_end = bar.value() == bar.maximum()
        cursor = QtGui.QTextCursor(self.transcript.document())  # a new cursor, so that the reader's selection stays
        cursor.movePosition(QtGui.QTextCursor.MoveOperation.End)
        if markdown_at is not None:
            cursor.setPosition(markdown_at, QtGui.QTextCursor.MoveMode.KeepAnchor)
            cursor.removeSelectedText()
            cursor.setBlockFormat(QtGui.QTextBlockFormat())
            answer = QtGui.QTextDocument()
            answer.setMarkdown(text, MARKDOWN)
            cursor.insertFragment(QtGui.QTextDocumentFragment(answer))
        elif text == "\n":
            cursor.insertBlock(QtGui.QTextBlockFormat(), QtGui.QTextCharFormat())  # in plain letters again
        else:
            cursor.insertText(text)
        if at_end:
            bar.setValue(bar.maximum())
        return int(cursor.position())


class Window(QtWidgets.QWidget):
    """Two panes under one memory cap."""

    def __init__(self, names: list[str], memory: str, offline: bool) -> None:
        super().__init__(windowTitle="edgedec")
        cap = QtWidgets.QLineEdit(memory, placeholderText="no cap")
        label = QtWidgets.QLabel("&Memory for both models, as 900MB or 1.5GiB:")
        label.setBuddy(cap)
        self.panes = [Pane(name, cap, offline) for name in names]
        layout = QtWidgets.QGridLayout(self)
        layout.addWidget(label, 0, 0)
        layout.addWidget(cap, 0, 1)
        for column, pane in enumerate(self.panes):
            layout.addWidget(pane, 1, column)
            layout.setColumnStretch(column, 1)
            pane.worker_thread.finished.connect(self._quit_when_all_have_left)
        self.resize(1000, 640)

    def closeEvent(self, event: QtGui.QCloseEvent) -> None:
        """Hide the window at once; the application quits when both threads have ended."""
        for pane in self.panes:
            pane.leave()

    def _quit_when_all_have_left(self) -> None:
        if all(pane.worker_thread.isFinished() for pane in self.panes):
            QtWidgets.QApplication.quit()


def main() -> int:
    """Open the window and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help="a name or a file for each of the two panes")
    parser.add_argument("--memory", default="", help="most that both models may take together, as 900MB")
    parser.add_argument("--offline", action="store_true", help="never fetch a model")
    options = parser.parse_args()
    app = QtWidgets.QApplication(sys.argv[:1])
    app.setQuitOnLastWindowClosed(False)  # the threads quit the application
    window = Window([*options.models, *MODELS[len(options.models) :]][:2], options.memory, options.offline)
    window.show()
    for pane in window.panes[: max(1, len(options.models))]:
        pane.load()
    code = int(app.exec())
    for pane in window.panes:  # their threads still run where something else ended the event loop
        pane.leave()
        pane.worker_thread.wait()
    return code


if __name__ == "__main__":
    sys.exit(main())
