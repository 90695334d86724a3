"""What a person sees of a model and of results, at Python's prompt and in a notebook."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import edgedec
from edgedec.api.best_text import best
from edgedec.progress import stage


class Display:
    """Stands for IPython's display() and what it returns: keeps what was shown in each place."""

    def __init__(self) -> None:
        self.places: list[list[dict[str, str]]] = []

    def __call__(self, bundle: dict[str, str], *, raw: bool, display_id: bool) -> Any:
        assert raw
        assert display_id
        shown = [bundle]
        self.places.append(shown)
        return SimpleNamespace(update=lambda bundle, raw: shown.append(bundle))


@pytest.fixture
def display(monkeypatch: pytest.MonkeyPatch) -> Display:
    """A notebook's display, where the code runs in a kernel."""
    display = Display()
    shell = SimpleNamespace(kernel=object())
    module = SimpleNamespace(get_ipython=lambda: shell, display=SimpleNamespace(display=display))
    monkeypatch.setitem(sys.modules, "IPython", module)
    return display


@pytest.mark.slow
def test_results_are_one_line(tiny_path: Path) -> None:
    """Each is short, without line ends, and begins with what it is; what has its default is left out."""
    with edgedec.load(tiny_path, runtime="cpu", n_ctx=256, memory="1GB", n_texts=8) as engine:
        text = engine.chat("Hi", max_tokens=8, ignore_end=True, logprobs=2)
        session = engine.session(64)
        forward = session.forward(np.array([1, 2], np.int32), n_past=0)
        several = (*engine.samples("Hi", 2, max_tokens=4), best(engine, "Hi", max_tokens=4), engine.requests.sampling())
        results = [engine, engine.plan, engine.card, text, text.stats, text.outputs[0], forward]
        for result in (*results, *several, edgedec.Lossy(), edgedec.DraftOptions(tree="grow")):
            shown = repr(result)
            assert "\n" not in shown
            assert len(shown) < 600
            assert type(result).__name__ in shown
        assert repr(engine).startswith("<Engine tiny: cpu, 256 tokens of context, ")
        assert "logits=float32[1, 260]" in repr(forward)
        assert repr(text.outputs[0]).startswith(f"TokenOutput(token_id={text.outputs[0].token_id}, text=")
        session.close()
    assert repr(engine) == "<Engine tiny: cpu, 256 tokens of context, closed>"
    assert repr(edgedec.DraftOptions(tree="grow")) == "DraftOptions(tree='grow')"


def test_an_answer_is_text_in_a_notebook() -> None:
    """Marks of HTML that a model writes are shown, and nothing runs; line ends stay."""
    text = edgedec.Generation("<script>\n1 & 2", (1,), "stop", edgedec.DecodeStats())
    assert text._repr_html_() == '<div style="white-space: pre-wrap">&lt;script&gt;\n1 &amp; 2</div>'


@pytest.mark.slow
def test_a_notebook_shows_one_bar_which_ends(tiny_path: Path, display: Display) -> None:
    """It shows the stages of a load in one place, and in the end that the model is there."""
    with edgedec.load(tiny_path, runtime="cpu", n_ctx=256):
        (shown,) = display.places
        texts = [bundle["text/plain"] for bundle in shown]
        assert "load tiny.gguf" in texts
        assert texts[-1] == "loaded tiny.gguf"
        assert len(texts) == len([text for at, text in enumerate(texts) if text != texts[at - 1]])


def test_a_bar_is_full_where_something_is_counted(display: Display) -> None:
    """A hundredth is shown once, and what is fetched is no markup."""
    from edgedec.progress import shown_progress

    with shown_progress(None, "<m>") as report:
        assert report is not None
        for done in range(1001):
            report(edgedec.Progress("download", done, 1000, "bytes", "<m>"))
        with stage(report, "load"):
            pass
    (shown,) = display.places
    assert len(shown) == 1 + 101 + 2
    assert shown[38] == {
        "text/plain": "download <m>: 37%",
        "text/html": '<progress max="1" value="0.37"></progress> download &lt;m&gt;: 37%',
    }
    assert shown[-1] == {"text/plain": "loaded <m>", "text/html": "loaded &lt;m&gt;"}


@pytest.mark.slow
@pytest.mark.parametrize("shell", [None, SimpleNamespace()])
def test_there_is_no_bar_elsewhere(
    tiny_path: Path, display: Display, monkeypatch: pytest.MonkeyPatch, shell: Any
) -> None:
    """Neither at IPython's prompt, nor where it is merely imported, nor where a caller takes the reports."""
    reports: list[edgedec.Progress] = []
    edgedec.load(tiny_path, runtime="cpu", n_ctx=256, on_progress=reports.append).close()
    assert reports
    monkeypatch.setattr(sys.modules["IPython"], "get_ipython", lambda: shell)
    edgedec.load(tiny_path, runtime="cpu", n_ctx=256).close()
    assert not display.places
