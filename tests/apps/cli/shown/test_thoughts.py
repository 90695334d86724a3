"""What models of several families think, as a terminal shows it and as the next turn's template gets it."""

import pytest

from edgedec_apps.cli.shown.thoughts import ShownThoughts, answer_message
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
    assert answer_message(reply, marks) == {"role": "assistant", "content": "Four.", "reasoning_content": "Two."}
    assert answer_message(reply, ()) == {"role": "assistant", "content": reply}


def test_a_text_without_a_thought_is_shown_as_it_is() -> None:
    """Held back at most until its end."""
    written = _Written()
    show = ShownThoughts(written, (*USUAL, *MARKS["gemma4"]))
    show.write(" Four.\n <|chan")
    show.end()
    assert written.text == " Four.\n <|chan"
