"""What models of several families think, as a terminal shows it and as the next turn's template gets it."""

from pathlib import Path

import pytest
from support.models.saying_model import saying_model
from support.processes.command_line import run_here

from edgedec.sequence import Generation, TokenOutput
from edgedec.stats import DecodeStats
from edgedec_apps.cli.shown.thoughts import OwnMarks, ShownThoughts, answer_message
from edgedec_apps.replies import USUAL
from edgedec_apps.reply_marks import MARKS

REPLIES = {
    "gemma4": "<|channel>thought\nTwo.<channel|>Four.",
    "harmony": "<|channel|>analysis<|message|>Two.<|end|><|start|>assistant<|channel|>final<|message|>Four.",
    "mistral": "[THINK]Two.[/THINK]Four.",
}


class _Written:
    def __init__(self) -> None:
        self.text, self.n_ended, self.n_broken_off = "", 0, 0

    def write(self, text: str) -> None:
        self.text += text

    def end(self) -> None:
        self.n_ended += 1

    def break_off(self) -> None:
        self.n_broken_off += 1


def generation(*texts: str) -> Generation:
    """Return a text whose tokens 0, 1, ... add these texts."""
    outputs = tuple(TokenOutput(i, text) for i, text in enumerate(texts))
    return Generation("".join(texts), (), "stop", DecodeStats(), outputs)


@pytest.mark.parametrize("name", REPLIES)
def test_thoughts_stand_between_the_same_tags(name: str) -> None:
    """In pieces of any length; the marks themselves are not shown, and the next turn gets the two parts."""
    marks, reply = (*USUAL, *MARKS[name]), REPLIES[name]
    for n in (1, 3, 10, len(reply)):
        written = _Written()
        show = ShownThoughts(written, marks)
        for start in range(0, len(reply), n):
            show.write(reply[start : start + n])
        show.break_off()
        show.end()
        assert written.text == "<think>\nTwo.\n</think>\n\nFour."
        assert (written.n_ended, written.n_broken_off) == (1, 1)
    expected = {"role": "assistant", "content": "Four.", "reasoning_content": "Two."}
    assert answer_message(generation(reply), OwnMarks(marks)) == (expected, [])
    assert answer_message(generation(reply), OwnMarks()) == ({"role": "assistant", "content": reply}, ())
    if name == "mistral":
        own = OwnMarks(marks, {1: "[/THINK]"})
        assert answer_message(generation("[THINK]Two.", "", "Four."), own) == (expected, [])


@pytest.mark.slow
def test_a_model_whose_marks_are_control_tokens(tmp_path: Path) -> None:
    """Its thoughts are shown, in a single answer and in a chat, whose next turn has the answer alone."""
    template = (
        "{# [THINK] #}{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}={% endif %}"
    )
    says = {"=": ["[THINK]", "Two", ".", "[/THINK]", "Four"]}
    path = saying_model(tmp_path / "m.gguf", says, chat_template=template, control=("[THINK]", "[/THINK]"))
    assert run_here("run", path, "?", "-q").text == "<think>\nTwo.\n</think>\n\nFour\n"
    shown = run_here("chat", path, "-q", stdin=b"a\nb\n").text
    assert shown.count("<think>\nTwo.\n</think>\n\nFour") == 2


def test_a_text_without_a_thought_is_shown_as_it_is() -> None:
    """Held back at most until its end."""
    written = _Written()
    show = ShownThoughts(written, (*USUAL, *MARKS["gemma4"]))
    show.write(" Four.\n <|chan")
    show.end()
    assert written.text == " Four.\n <|chan"
