"""Multilingual samples: greedy and drawn answers in the question's language, and one judgement by a checklist of all.

The greedy answer is hedged by drawn ones at several temperatures, as a high one suits some languages and harms others.
Then the model writes a checklist of what a good answer must have. It reads the question, all answers under letters and
the checklist once; the next token's probabilities of the letters are its votes.

Paper: When Life Gives You Samples (hedged sampling, CHOPS), Khairi et al. 2025, arXiv:2506.20544
Option: Python only, `multilingual`
For: open questions, in languages that the model knows unequally
Measured: the 1.5B has 13 of 20 word problems right, greedily 17 (`python benchmarks/answers/judged_answers.py MODEL`)
Status: study
"""

from collections.abc import Sequence
from string import ascii_uppercase

import numpy as np

from edgedec.api.branching import branches
from edgedec.api.engine import Engine
from edgedec.choosing.choice import ChosenText
from edgedec.choosing.partial_texts import row_log_probs
from edgedec.errors import OptionError
from edgedec.progress import CancelToken

CHECKLIST = "{question}\n\nDon't answer. List in a few short lines what a good answer to the question must have."
JUDGED = (
    "{question}\n\nThese are answers to the question above:\n\n{answers}\n\n{checklist}"
    "Which is the best? Reply with its letter."
)
TEMPERATURES = (0.3, 0.7, 1.0, 0.7)


def multilingual(
    engine: Engine,
    question: str,
    temperatures: Sequence[float] = TEMPERATURES,
    *,
    seed: int = 0,
    max_tokens: int | None = None,
    cancel: CancelToken | None = None,
) -> ChosenText:
    """Return the best of a greedy answer and one drawn at each temperature; its scores are the judge's votes.

    Args:
        engine: Answers and judges; its runtime must be able to fork.
        question: What the user asks.
        temperatures: Of the drawn answers, 1 to 25 of them; answer k draws with the seed plus k.
        seed: The first of the seeds.
        max_tokens: Most tokens of an answer, and of the checklist.
        cancel: Ends the work, with CancelledError once it judges.

    Raises:
        OptionError: There is no temperature, or more than 25.
        EdgedecError: As Engine.chat and edgedec.api.branching.branches.
    """
    if not 1 <= len(temperatures) < len(ascii_uppercase):
        raise OptionError("temperatures", list(temperatures), f"there must be 1 to {len(ascii_uppercase) - 1}")
    texts = [engine.chat(question, temperature=0, max_tokens=max_tokens, cancel=cancel)]
    for k, temperature in enumerate(temperatures):
        texts.append(
            engine.chat(question, temperature=temperature, seed=seed + k, max_tokens=max_tokens, cancel=cancel)
        )
    asked = CHECKLIST.format(question=question)
    checklist = engine.chat(asked, temperature=0, max_tokens=max_tokens, cancel=cancel).text.strip()
    scores = judged_together(engine, question, [text.text for text in texts], checklist, cancel=cancel)
    place = max(range(len(texts)), key=scores.__getitem__)
    why = f"its share of the judge's votes, {scores[place]:.3f}, is the highest of {len(texts)}"
    return ChosenText(place, tuple(texts), (None,) * len(texts), tuple(scores), why)


def judged_together(
    engine: Engine, question: str, answers: Sequence[str], checklist: str = "", *, cancel: CancelToken | None = None
) -> list[float]:
    """Return by answer the probability of its letter, among the letters, behind all answers and perhaps a checklist."""
    lettered = list(zip(ascii_uppercase, answers, strict=False))
    listed = "\n\n".join(f"{letter}) {answer.strip()}" for letter, answer in lettered)
    said = f"A good answer must have:\n{checklist}\n\n" if checklist else ""
    token_ids = engine.chat_ids(JUDGED.format(question=question, answers=listed, checklist=said))
    with branches(engine, token_ids, most=1, cancel=cancel) as opened:
        law = row_log_probs(opened.logits)[[engine.tokenizer.encode(x, add_special=False)[0] for x, _ in lettered]]
    shares = np.exp(law - law.max())
    votes: list[float] = (shares / shares.sum()).tolist()
    return votes
