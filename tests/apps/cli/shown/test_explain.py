"""What explains a text: on one screen, or all of it; and whether drafts helped."""

from pathlib import Path

import pytest
from support.models.tiny_models import tiny_llama
from support.processes.command_line import run_here

from edgedec.sequence import Generation
from edgedec.stats import DecodeStats
from edgedec_apps.cli.shown.explain import explained
from edgedec_apps.cli.shown.replies import summary

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
