"""Choosing one of several finished texts, by name of the method.

| name | chooses | source |
|---|---|---|
| "vote" | a text with the answer that most texts state | self-consistency, arXiv:2203.11171 |
| "likely" | the text with the highest mean log-probability | arXiv:2502.07191 compares it |
| "judge" | the text that the model itself most probably calls right | P(True), arXiv:2207.05221 |
| "first" | the text that ends first; the others are stopped then | First Finish Search, arXiv:2505.18149 |
| "bag" | the vote, weighted by the judgement; then the likeliest text | after Bag of Tricks, arXiv:2502.07191 |
| "score" | the text with the highest score of the caller's scorer | best of n |
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from edgedec.choosing.bag_of_tricks import combined
from edgedec.choosing.likelihood import most_likely
from edgedec.choosing.vote import ANSWER, answer_of, is_decided, voted
from edgedec.counted import counted
from edgedec.errors import OptionError
from edgedec.sequence import Generation

Choose = Literal["vote", "likely", "judge", "first", "bag", "score"]
NEEDS_JUDGE: frozenset[str] = frozenset({"judge", "bag"})


@dataclass(frozen=True, slots=True)
class Chosen:
    """A text that was chosen among several.

    Attributes:
        place: Its place in `texts`.
        texts: All texts, by their seeds; those that were stopped early have the finish_reason "cancelled".
        answers: By text, the answer that it states; None where it states none.
        scores: By text, the judged chance or the caller's score, 0 to 1; empty where the method has none.
        why: Why it was chosen, as part of a sentence.
    """

    place: int
    texts: tuple[Generation, ...]
    answers: tuple[str | None, ...]
    scores: tuple[float, ...] = ()
    why: str = ""

    @property
    def text(self) -> str:
        """What the chosen text says."""
        return self.texts[self.place].text

    @property
    def generation(self) -> Generation:
        """The chosen text."""
        return self.texts[self.place]


def require_choose(name: object) -> None:
    """Raise OptionError unless `name` is a method of choosing."""
    if name not in get_args(Choose):
        raise OptionError("choose", name, f"it must be one of {', '.join(get_args(Choose))}")


def chosen_among(
    texts: Sequence[Generation], choose: Choose, *, answer: str = ANSWER, scores: Sequence[float] = ()
) -> Chosen:
    """Return the choice among texts.

    Texts that were stopped early are not chosen, unless all were.

    Args:
        texts: At least one; for "likely" and "bag" with log-probabilities.
        choose: The method.
        answer: The pattern of an answer, a regular expression; its first group, or the whole match, counts.
        scores: By text, a number from 0 to 1, for "judge", "bag" and "score".

    Raises:
        OptionError: The method is unknown, the pattern is invalid, or scores are missing.
    """
    require_choose(choose)
    if choose in ("judge", "bag", "score") and len(scores) != len(texts):
        raise OptionError("scores", list(scores), f"{choose} needs one for each of the {len(texts)} texts")
    answers = tuple(answer_of(text.text, answer) for text in texts)
    whole = [i for i, text in enumerate(texts) if text.finish_reason != "cancelled"] or list(range(len(texts)))
    if choose == "first":
        ended = [i for i in whole if texts[i].finish_reason == "stop"] or whole
        place = min(ended, key=lambda i: len(texts[i].token_ids))
    elif choose == "vote":
        place = whole[voted([answers[i] for i in whole])]
    elif choose == "likely":
        place = whole[most_likely([mean_logprob(texts[i]) for i in whole])]
    elif choose == "bag":
        means = [mean_logprob(texts[i]) for i in whole]
        place = whole[combined([answers[i] for i in whole], means, [scores[i] for i in whole])]
    else:
        place = max(whole, key=scores.__getitem__)
    found = Chosen(place, tuple(texts), answers, tuple(scores))
    return replace(found, why=_reason(found, choose, len(whole)))


def _reason(chosen: Chosen, choose: Choose, n: int) -> str:
    """Return why a text was chosen among n whole ones."""
    text, answer = chosen.generation, chosen.answers[chosen.place]
    if choose == "first":
        return f"it ended first, after {counted(len(text.token_ids), 'token')}"
    if choose == "likely":
        return f"its mean log-probability of a token, {mean_logprob(text):.3f}, is the highest of {n}"
    if choose in ("judge", "score"):
        what = "judged chance to be right" if choose == "judge" else "score"
        return f"its {what}, {chosen.scores[chosen.place]:.3f}, is the highest of {n}"
    if answer is None:
        return "no text states an answer" + ("" if choose == "vote" else ", and its judged chance is the highest")
    n_votes, n_voters = chosen.answers.count(answer), sum(each is not None for each in chosen.answers)
    votes = f"its answer, {answer:.60}, has {n_votes} of {counted(n_voters, 'vote')}"
    return votes if choose == "vote" else f"{votes}, weighted by their judged chances, and it is the likeliest of these"


def require_logprobs(logprob_sum: float | None) -> float:
    """Return the sum of a text's log-probabilities (OptionError where it was written without)."""
    if logprob_sum is None:
        raise OptionError("logprobs", None, "this way of choosing needs the texts' log-probabilities: 0 is enough")
    return logprob_sum


def mean_logprob(text: Generation) -> float:
    """Return the mean log-probability of a text's tokens, 0 for an empty text.

    Raises:
        OptionError: The text was written without log-probabilities.
    """
    return require_logprobs(text.logprob_sum) / max(1, len(text.token_ids))


def may_stop(choose: Choose, ended: Sequence[Generation], n: int, answer: str = ANSWER) -> bool:
    """Return whether the texts that have ended settle the choice among n, so that the others can stop.

    "first" needs one that ended by itself; a vote needs an answer that the others can't outvote.
    """
    if choose == "first":
        return any(text.finish_reason == "stop" for text in ended)
    if choose == "vote":
        return is_decided([answer_of(text.text, answer) for text in ended], n - len(ended))
    return False
