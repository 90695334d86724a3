"""SpecReason: a small model writes the steps, a large one grades them, and rewrites those that it finds poor.

Unlike drafts of tokens, a step that is kept stays as the small model wrote it, so the text is not the large model's:
this is lossy. The large model reads a step in one forward, and gives its grade by one token in a fork.

Paper: SpecReason: Fast and Accurate Inference-Time Compute via Speculative Reasoning, arXiv:2504.07891
Option: Python only, `spec_reason`
For: two models of one vocabulary, where the small one is nearly as good
Measured: 3 of 30 word problems right with a 0.5B's lines, kept from grade 5, for 61 plain steps; the likeliest of 4
    texts has 26 of these for 60 (`python benchmarks/answers/better_answers.py search qwen2.5-coder-1.5b --kind
    arithmetic --method specreason5 --tasks 30 --small qwen2.5-coder-0.5b`)
Status: study
"""

from dataclasses import dataclass

import numpy as np

from edgedec.choosing.partial_texts import PartialText, PartialTexts
from edgedec.control_tokens import encode_with_controls
from edgedec.errors import OptionError, RequestError
from edgedec.tokenizer import Tokenizer
from edgedec_methods.sampled_steps import Steps, next_step, write_steps

GRADING = "Check the last line above. How good is it, from 0 (wrong) to 9 (right)? Reply with one digit."
BEST_GRADE = 9


@dataclass(frozen=True, slots=True)
class Grading:
    """What the large model is asked about a step, and the tokens of its digits.

    Attributes:
        token_ids: The question, read after the text.
        digit_ids: The tokens of 0 to 9.
    """

    token_ids: tuple[int, ...]
    digit_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reasoned:
    """What two models wrote.

    Attributes:
        grades: By step, its grade, 0 to 9; empty where one model wrote all of the text.
        steps_kept: For each step, whether it stayed as the small model wrote it; empty as `grades`.
    """

    text: PartialText
    grades: tuple[int, ...]
    steps_kept: tuple[bool, ...]


def grading_of(tokenizer: Tokenizer, words: str) -> Grading:
    """Return a question about a step as tokens; control tokens that are spelled out in it count as such.

    Raises:
        RequestError: The digits are not ten different tokens.
    """
    digits = tuple(tokenizer.encode(str(digit), add_special=False)[-1] for digit in range(BEST_GRADE + 1))
    token_ids = tuple(encode_with_controls(tokenizer, words, add_special=False))
    if len(set(digits)) <= BEST_GRADE or not token_ids:
        raise RequestError("grades need a question, and a tokenizer with a token for each digit")
    return Grading(token_ids, digits)


def grade_of(texts: PartialTexts, text: PartialText, grading: Grading) -> int:
    """Return the digit, 0 to 9, that is most probable after the question; of equals the lowest."""
    (logits,) = texts.peek([text], grading.token_ids)
    return int(np.argmax(logits[list(grading.digit_ids)]))


def spec_reason(
    small: PartialTexts, large: PartialTexts, steps: Steps, grading: Grading, *, threshold: int = 6
) -> Reasoned:
    """Return a text whose steps the small model wrote where their grade is at least `threshold`, else the large one.

    With threshold 0 nothing is graded, and the text is the small model's own; with 10 it is the large model's own, and
    the small model writes nothing.

    Args:
        small: Holds the small model's text; nothing was begun there.
        large: Holds the large model's text; nothing was begun there.
        steps: How steps are written, by either model.
        grading: What the large model is asked.
        threshold: The least grade that keeps a step, 0 to 10.

    Raises:
        OptionError: The threshold is out of range.
        RequestError: The two models read the prompt as different tokens.
    """
    if not 0 <= threshold <= BEST_GRADE + 1:
        raise OptionError("threshold", threshold, f"it must be from 0 to {BEST_GRADE + 1}")
    if small.prompt_ids != large.prompt_ids:
        raise RequestError("the two models read the prompt as different tokens; take two models of one vocabulary")
    if threshold in (0, BEST_GRADE + 1):
        alone = small if threshold == 0 else large
        (text,) = write_steps(alone, [alone.begin()], steps.params, [steps.seed], separator=None)
        return Reasoned(text, (), ())
    quick, sure = small.begin(), large.begin()
    grades, accepted = list[int](), list[bool]()
    while sure.ended is None:
        before, n = small.fork(quick), len(sure.token_ids)
        quick = next_step(small, quick, steps)
        read = _read(large, sure, quick)
        grades.append(grade_of(large, read, grading))
        accepted.append(grades[-1] >= threshold)
        if accepted[-1]:
            large.drop(*(text for text in (sure,) if text.branch != read.branch))
            small.drop(before)
            sure = read
        else:
            large.drop(*(text for text in (read,) if text.branch != sure.branch))
            sure = next_step(large, sure, steps)
            small.drop(quick)
            quick = small.extend(before, sure.token_ids[n:], 0.0)
    return Reasoned(sure, tuple(grades), tuple(accepted))


def _read(large: PartialTexts, sure: PartialText, quick: PartialText) -> PartialText:
    """Return the large model's text, in a fork, with the step that the small model added; with its end, too."""
    fork = large.fork(sure)
    read = large.extend(fork, quick.token_ids[len(sure.token_ids) :], 0.0)
    return PartialText(read.branch, read.token_ids, read.logprob, read.logits, quick.ended, read.n_scored)
