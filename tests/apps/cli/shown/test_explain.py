"""What explains a text, whether drafts helped, and what a model thought, as a terminal shows it."""

from pathlib import Path

import pytest
from support.models.saying_model import saying_model
from support.models.tiny_models import tiny_llama
from support.processes.command_line import run_here

from edgedec.sequence import Generation, TokenOutput
from edgedec.stats import DecodeStats
from edgedec_apps.cli.shown.explain import explained
from edgedec_apps.cli.shown.replies import summary
from edgedec_apps.cli.shown.thoughts import OwnMarks, ShownThoughts, answer_message
from edgedec_apps.replies import USUAL
from edgedec_apps.reply_marks import MARKS

_LONG = "a sentence of many words that goes on and on, " * 5


def full() -> DecodeStats:
    """Return statistics with all that can be explained, none of it short."""
    stats = DecodeStats(runtime="cpu", runtime_reason=_LONG, seed=2**63, lossy=f"LOSSY: {_LONG}")
    for name in ("suffix", "common", "recycling", "learned", "model", "head", "skip"):
        stats.count_proposal(name, 1000, 12.3)
        stats.count_outcome(name, 900, 400)
    for _ in range(900):
        stats.count_draft(8, 5)
    stats.n_generated_tokens, stats.n_steps, stats.first_token_s, stats.total_s = 5401, 901, 1.0, 11.0
    stats.plain_s, stats.saved_s, stats.constraint_logprob = 13.0, 3.0, -123.456
    stats.curve = {n: 0.01 * n for n in range(1, 65)}
    stats.explanation = [_LONG, "head: " + _LONG, "the head x does not say by a hash which model it was trained for"]
    return stats


def test_the_short_form_fits_a_screen() -> None:
    """With all that can be explained it takes fewer than 24 lines of 80 columns; the long form has every figure."""
    further = ["sampling: temperature 0.7, top_p 0.95 (the model's file)", f"memory held at the peak: 1 GB; {_LONG}"]
    short, whole = explained(full(), "short", further), explained(full(), "all", further)
    assert len(short) <= 22
    assert max(map(len, short)) <= 78  # it is indented by two
    assert "1.3 times as fast as without drafts: about 3.00 s saved after the first token" in short
    assert not [line for line in short if "hash" in line]
    assert [line for line in whole if "hash" in line]
    assert any("64: 640.0 ms (64.00 steps)" in line for line in whole)
    assert explained(full(), "none", further) == []


@pytest.mark.parametrize(
    ("saved_s", "in_line", "in_explanation"),
    [
        (3.0, "1.3 times as fast as without drafts", "1.3 times as fast as without drafts: about 3.00 s saved"),
        (90.0, "6.0 times as fast as without drafts", "6.0 times as fast as without drafts: about 49.9"),
        (0.4, None, "as fast as without drafts: about 0.40 s saved"),
        (-0.4, None, "as fast as without drafts: about 0.40 s lost"),
        (-2.0, None, "0.8 times as fast as without drafts: about 2.00 s lost"),
        (None, None, None),
    ],
)
def test_the_last_line_says_what_drafts_gained(
    saved_s: float | None, in_line: str | None, in_explanation: str | None
) -> None:
    """In tenths, never over tokens over steps (5401 over 901), and not a word on drafts where they gained nothing."""
    stats = full()
    stats.plain_s, stats.saved_s = 10.0 + (saved_s or 0.0), saved_s
    stats.add_reason("drafting off in a context of this length")
    stats.add_note("the text ends because the KV cache is full")
    line = summary(Generation("text", (1, 2), "stop", stats))
    assert ("draft" in line) == (in_line is not None)
    gained = "" if in_line is None else f"{in_line} · "
    assert line.endswith(f"5401 tokens (stop) · {gained}the text ends because the KV cache is full")
    for detail in ("short", "all"):
        text = explained(stats, detail)
        assert "drafting off in a context of this length" in text
        if detail == "short":
            assert [row for row in text if "without drafts" in row] == [
                row for row in text if in_explanation is not None and row.startswith(in_explanation)
            ]
            assert any(row.startswith(in_explanation or "") for row in text)
    stats.n_drafts = 0
    assert "draft" not in summary(Generation("text", (1, 2), "stop", stats))


LISTED = "".join(f"{n}. Oranges\n" for n in range(1, 41))
REPEATED = (
    "the family of " * 20,
    LISTED,
    LISTED + "41",
    "a" * 159 + "b" + LISTED,
    "one line of words,\nand one more.\n" * 8,
)
VARIED = (
    LISTED + "These are forty fruits.",
    ", ".join(map(str, range(300))),
    "so " * 20,
    "".join(f"total_{n} = add({n}, {n + 1})\n" for n in range(40)),
    "| a | b |\n" + "|---|---|\n" + "".join(f"| {n} | {n * n} |\n" for n in range(40)),
    "one line of words,\nand one more.\n" * 4,
    "",
)


def test_a_text_that_repeats_itself_to_its_end_is_told() -> None:
    """The same phrase or line at least eight times, list lines with other numbers too; else nothing."""
    for text in (*REPEATED, *VARIED):
        line = summary(Generation(text, (1, 2), "length", DecodeStats()))
        assert ("the text repeats itself at its end; --penalty repetition" in line) == (text in REPEATED), text


def test_explain_and_all_of_it(model: Path) -> None:
    """Both name the sampling with where it comes from; the long form has the seed."""
    args = ("run", model, "Hello", "-n", "4", "-t", "0.5", "--seed", "7")
    short, whole = (run_here(*args, *how).err.splitlines() for how in (("--explain",), ("--explain", "-v")))
    sampled = "  sampling: temperature 0.5 (options); top_p 0.95 (edgedec's defaults)"
    assert sampled in short
    assert sampled in whole
    assert "  seed: 7" in whole
    assert "  seed: 7" not in short


@pytest.mark.slow
def test_the_defaults_of_the_models_file_are_named(tmp_path: Path) -> None:
    """What its authors recommend is taken, and named with where it comes from; an option counts more."""
    path = tiny_llama(
        tmp_path / "m.gguf", more={"general.sampling.temp": 0.25, "general.sampling.top_k": 3}, n_ctx_train=512
    )
    for args, sampled in (
        ((), "temperature 0.25, top_k 3 (the model's file); top_p 0.95 (edgedec's defaults)"),
        (("--top-k", "0"), "temperature 0.25 (the model's file); top_p 0.95 (edgedec's defaults); top_k 0 (options)"),
    ):
        found = run_here("run", path, "Hello", "--raw", "-n", "2", "--explain", *args)
        assert f"sampling: {sampled}" in " ".join(found.err.split())
    assert "temperature 0.25, top_k 3, top_p 0.95 (from the model file)" in run_here("info", path).text


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
