"""A window with one conversation (pip install PySide6-Essentials): python window.py [MODEL]

The model has a thread of its own, so the window never waits. apps/desktop is a whole application.
"""

# mypy: allow-subclassing-any, disable-error-code="import-not-found"

import sys
from typing import Any

from PySide6.QtCore import QObject, QThread, Signal
from PySide6.QtGui import QCloseEvent, QTextDocument
from PySide6.QtWidgets import QApplication, QLineEdit, QTextEdit, QVBoxLayout, QWidget

import edgedec

MARKDOWN = QTextDocument.MarkdownFeature.MarkdownDialectGitHub | QTextDocument.MarkdownFeature.MarkdownNoHTML


class Worker(QObject):
    """Holds the model and answers, in a thread of its own."""

    said, ready = (Signal(str), Signal(str))  # the answer so far; what to type next, or what went wrong
    model: edgedec.Engine | None = None

    def work(self, name: str, messages: list[dict[str, Any]]) -> None:
        """Load the model, and answer the last of the messages where there are any."""
        try:
            self.model = self.model or edgedec.load(name)
            answer = ""
            for token in self.model.chat_stream(messages, max_tokens=512) if messages else ():
                answer += token.text
                self.said.emit(answer)
            self.ready.emit("Message")
        except edgedec.EdgedecError as error:
            self.ready.emit(str(error))


class Window(QWidget):
    """The conversation, and a line to write in."""

    asked = Signal(str, list)

    def __init__(self, name: str) -> None:
        super().__init__(windowTitle=name)
        self.messages: list[dict[str, Any]] = []
        self.page, self.line = (QTextEdit(readOnly=True), QLineEdit(placeholderText="loading ..."))
        self.line.setEnabled(False)
        layout = QVBoxLayout(self)
        layout.addWidget(self.page)
        layout.addWidget(self.line)
        self.worker, self.worker_thread = Worker(), QThread()
        self.worker.moveToThread(self.worker_thread)
        self.line.returnPressed.connect(self.send)
        self.asked.connect(self.worker.work)
        self.worker.said.connect(self.show_answer)
        self.worker.ready.connect(self.go_on)
        self.worker_thread.start()
        self.asked.emit(name, [])

    def send(self) -> None:
        """Ask what was typed."""
        self.messages.append({"role": "user", "content": self.line.text()})
        self.line.clear()
        self.line.setEnabled(False)
        self.asked.emit(self.windowTitle(), list(self.messages))
        self.messages.append({"role": "assistant", "content": ""})

    def show_answer(self, answer: str) -> None:
        """Show the conversation with the answer so far."""
        self.messages[-1]["content"] = answer
        turns = [f"**{each['role']}**\n\n{each['content']}" for each in self.messages]
        self.page.document().setMarkdown("\n\n".join(turns), MARKDOWN)

    def go_on(self, what: str) -> None:
        """Let the user write, where there is a model."""
        self.line.setPlaceholderText(what)
        self.line.setEnabled(self.worker.model is not None)

    def closeEvent(self, event: QCloseEvent) -> None:
        """End the answer and the thread."""
        self.worker_thread.quit()
        if self.worker.model is not None:
            self.worker.model.close()
        self.worker_thread.wait()


def main(name: str = "smollm2-135m") -> None:
    """Open the window."""
    app = QApplication(sys.argv[:1])
    window = Window(name)
    window.show()
    app.exec()


if __name__ == "__main__":
    main(*sys.argv[1:])
