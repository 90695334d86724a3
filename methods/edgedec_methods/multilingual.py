"""Multilingual samples: a question is answered in several languages, and one judgement compares all answers.

The greedy answer is always among them. The judge reads the question and all answers, under letters, and the next
token's probabilities of the letters are its votes; it reads them once for each rotation of their order, so that no
place has an advantage. A judgement generates no token.

Paper: When Life Gives You Samples: The Benefits of Scaling up Inference Compute for Multilingual LLMs,
    Khairi et al. 2025, arXiv:2506.20544
Option: Python only, `multilingual`
For: questions with one answer, in languages that the model knows unequally
Measured: nothing yet
Status: study
"""

from collections.abc import Sequence
from string import ascii_uppercase
from typing import Any

import numpy as np

from edgedec.api.branching import branches
from edgedec.api.engine import Engine
from edgedec.choosing.choice import ChosenText
from edgedec.choosing.partial_texts import row_log_probs
from edgedec.errors import OptionError
from edgedec.progress import CancelToken

ASKED = "{question}\n\nAnswer in {language}."
JUDGED = (
    "{question}\n\nThese are answers to the question above:\n\n{answers}\n\nWhich is the best? Reply with its letter."
)


def multilingual(
    engine: Engine,
    question: str,
    languages: Sequence[str],
    *,
    seed: int = 0,
    max_tokens: int | None = None,
    temperature: float | None = None,
    cancel: CancelToken | None = None,
) -> ChosenText:
    """Return the best of a greedy answer and one sampled in each language; its scores are the judge's mean votes.

    Args:
        engine: Answers and judges; its runtime must be able to fork.
        question: What the user asks.
        languages: Names of languages as the question's reader would write them, such as "German"; at most 25.
        seed: The answer in language k draws with the seed plus k.
        max_tokens: Most tokens of an answer.
        temperature: Of the sampled answers; None for the model's own.
        cancel: Ends the work, with CancelledError once it judges.

    Raises:
        OptionError: There is no language, or more than 25.
        EdgedecError: As Engine.chat and edgedec.api.branching.branches.
    """
    if not 1 <= len(languages) < len(ascii_uppercase):
        raise OptionError("languages", list(languages), f"there must be 1 to {len(ascii_uppercase) - 1}")
    texts = [engine.chat(question, temperature=0, max_tokens=max_tokens, cancel=cancel)]
    more: dict[str, Any] = {} if temperature is None else {"temperature": temperature}
    for k, language in enumerate(languages):
        asked = ASKED.format(question=question, language=language)
        texts.append(engine.chat(asked, seed=seed + k, max_tokens=max_tokens, cancel=cancel, **more))
    scores = judged_together(engine, question, [text.text for text in texts], cancel)
    place = max(range(len(texts)), key=scores.__getitem__)
    why = f"its share of the judge's votes, {scores[place]:.3f}, is the highest of {len(texts)}"
    return ChosenText(place, tuple(texts), (None,) * len(texts), tuple(scores), why)


def judged_together(
    engine: Engine, question: str, answers: Sequence[str], cancel: CancelToken | None = None
) -> list[float]:
    """Return by answer the mean probability of its letter, among the letters, over all rotations of the answers."""
    n = len(answers)
    letters = [engine.tokenizer.encode(letter, add_special=False)[0] for letter in ascii_uppercase[:n]]
    votes = np.zeros(n)
    for shift in range(n):
        order = [(place + shift) % n for place in range(n)]
        listed = "\n\n".join(f"{ascii_uppercase[i]}) {answers[place].strip()}" for i, place in enumerate(order))
        token_ids = engine.chat_ids(JUDGED.format(question=question, answers=listed))
        with branches(engine, token_ids, most=1, cancel=cancel) as opened:
            law = row_log_probs(opened.logits)[letters]
        shares = np.exp(law - law.max())
        votes[order] += shares / shares.sum() / n
    return votes.tolist()
