"""P(True): the model says by one letter whether an answer is right.

After a text, in a fork, the model reads a question and its next token is compared: the probability of the letter for
"right" against that of the letter for "wrong". A judgement costs the question's rows, and no token is generated.

Paper: Language Models (Mostly) Know What They Know, arXiv:2207.05221
Option: `-k 8 --method judge`; `scorer=judge` of a search
For: several texts without a checker
Measured: the judged best of 8 is right for 60 % of 50 word problems, for 131 plain steps; the likeliest of 4 for 86
    %, for 60 (`python benchmarks/answers/better_answers.py sample qwen2.5-coder-1.5b --kind arithmetic --tasks 50`)
Status: study
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from edgedec.chat import Message
from edgedec.choosing.choice import Candidates, Chooser, ScoreTexts
from edgedec.choosing.partial_texts import AskedPrompt, PartialText, PartialTexts, row_log_probs
from edgedec.control_tokens import encode_with_controls
from edgedec.errors import RequestError
from edgedec.sequence import Generation
from edgedec.sessions.forks import require_forks
from edgedec.tokenizer import Tokenizer

QUESTION = "Check the answer above. Is everything in it right so far? Reply with one letter: A for yes, B for no."
_MARK = "the answer of this chat"


@dataclass(frozen=True, slots=True)
class Question:
    """What the model is asked about a text, and the tokens of its two answers.

    Attributes:
        token_ids: The question, read after the text.
        yes_ids: Tokens that say yes: the letter with a space before it, and without.
        no_ids: Tokens that say no.
    """

    token_ids: tuple[int, ...]
    yes_ids: tuple[int, ...]
    no_ids: tuple[int, ...]


def question_of(
    tokenizer: Tokenizer, words: str = QUESTION, yes: str = "A", no: str = "B", *, parse_special: bool = False
) -> Question:
    """Return a question as tokens.

    Args:
        words: The question, as it follows the text.
        yes: The answer that says yes; its first token counts, with a space before it and without.
        no: The answer that says no.
        parse_special: Whether to read spelled-out control tokens in `words` as such, as those between two turns of a
            chat; never for words of others.

    Raises:
        RequestError: The two answers begin with the same token, or the question is empty.
    """
    encode = partial(encode_with_controls, tokenizer) if parse_special else tokenizer.encode
    token_ids = encode(words, add_special=False)
    forms = [
        tuple(dict.fromkeys(tokenizer.encode(form, add_special=False)[0] for form in (word, f" {word}")))
        for word in (yes, no)
    ]
    if not token_ids or set(forms[0]) & set(forms[1]):
        raise RequestError(
            f"a judgement needs a question, found {words!r:.40}, and two answers whose first tokens differ, "
            f"found {yes!r:.40} and {no!r:.40}"
        )
    return Question(tuple(token_ids), *forms)


def turn_after_answer(render: Callable[[Sequence[Message]], str], words: str = QUESTION) -> str:
    """Return what follows an unfinished answer when the user then says `words` and the model begins to reply.

    Args:
        render: `(messages)` -> the prompt that the model's chat template makes of them, as text.
        words: What the user says.
    """
    turns = [("user", "?"), ("assistant", _MARK), ("user", words)]
    rendered = render([{"role": role, "content": content} for role, content in turns])
    return rendered.partition(_MARK)[2] or f"\n\n{words}\n"


def chance_yes(logits: NDArray[np.float32], question: Question) -> float:
    """Return P(yes) / (P(yes) + P(no)), 0 to 1, by the logits that follow the question."""
    row = row_log_probs(logits)
    yes, no = (float(np.exp(row[list(ids)]).sum()) for ids in (question.yes_ids, question.no_ids))
    return yes / (yes + no) if yes + no > 0 else 0.5


def judged(texts: PartialTexts, live: Sequence[PartialText], question: Question) -> list[float]:
    """Return for each text the chance that it is right, as the model says in a fork of it, all in one forward.

    Texts of the same tokens are asked about once.
    """
    different = {text.token_ids: text for text in live}
    rows = texts.peek(list(different.values()), question.token_ids)
    chances = {token_ids: chance_yes(logits, question) for token_ids, logits in zip(different, rows, strict=True)}
    return [chances[text.token_ids] for text in live]


@dataclass(frozen=True, slots=True)
class JudgeScorer:
    """Implements TextScorer by a one-token judgement in a fork of each text.

    Attributes:
        question: What the model is asked.
    """

    question: Question

    def __call__(self, texts: PartialTexts, live: Sequence[PartialText], /) -> list[float]:
        """Return the judged chance that each text is right so far, all in one forward."""
        return judged(texts, live, self.question)


def open_judge(asked: AskedPrompt) -> ScoreTexts:
    """Return what judges whole texts of a prompt: each is read again, behind the prompt that is read once.

    Raises:
        CapabilityError: The runtime can't fork.
        RequestError: The tokenizer can't tell the two letters apart.
    """
    require_forks(asked.model)
    question = question_about(asked)

    def judge(texts: Sequence[Generation]) -> list[float]:
        scores: list[float] = []
        with asked.open_branches(2) as branches:
            for text in texts:
                (branch,) = branches.fork(branches.root)
                logits = branches.forward({branch: [*text.token_ids, *question.token_ids]})[branch]
                scores.append(chance_yes(logits[-1], question))
                branches.drop(branch)
        return scores

    return judge


def question_about(asked: AskedPrompt) -> Question:
    """Return the question as the model reads it after a text of a prompt."""
    words = f"\n\n{QUESTION}\n" if asked.render is None else turn_after_answer(asked.render)
    return question_of(asked.model.tokenizer, words, parse_special=True)


def _choose(candidates: Candidates) -> tuple[int, str]:
    place = max(candidates.whole, key=candidates.scores.__getitem__)
    chance = candidates.scores[place]
    return place, f"its judged chance to be right, {chance:.3f}, is the highest of {len(candidates.whole)}"


JUDGE = Chooser(_choose, open_scorer=open_judge)
