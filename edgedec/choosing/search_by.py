"""Searching for one text: the contract of a search, and a search by its name.

A search is a plug-in of the group `edgedec.searches`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from edgedec.callers import check_fields
from edgedec.choosing.choice import installed
from edgedec.choosing.command_scorer import SCORER_S
from edgedec.choosing.partial_texts import AskedPrompt, PartialText, PartialTexts
from edgedec.choosing.scorer import Scorer, TextScorer, require_scorer
from edgedec.choosing.vote import ANSWER, answer_pattern
from edgedec.errors import OptionError
from edgedec.plugins import SEARCHES
from edgedec.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class SearchRun:
    """What a search runs with.

    Attributes:
        n: Its size.
        params: How tokens are drawn, by a search that draws.
        seed: The first of the seeds.
        scorer: The caller's scorer; None where none was given.
        answer: The pattern of an answer, for a vote.
        separator: What ends a step of a text, for a search that writes step by step.
        asked: The prompt.
    """

    n: int
    params: SamplingParams
    seed: int
    scorer: TextScorer | None
    answer: str
    separator: str
    asked: AskedPrompt


@dataclass(frozen=True, slots=True)
class SearchResult:
    """What a search ends with.

    Attributes:
        texts: The texts that it ends with, at least one.
        place: The place of the chosen one.
        why: Why it was chosen, as part of a sentence.
        scores: By text, its score, 0 to 1; empty where nothing scored them.
    """

    texts: tuple[PartialText, ...]
    place: int
    why: str
    scores: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Search:
    """A search for one text: what an entry point of `edgedec.searches` names.

    Attributes:
        run: `(texts, run)` -> what it finds; nothing was begun in `texts`, which count what it costs and drop what it
            leaves.
        n: Its size where none is given.
        most: Its greatest size.
        n_texts: `(n)` -> how many texts it holds at most.
        draws: Whether tokens are drawn by the sampling options; else they are the most probable ones.
        scored: Whether it takes the caller's scorer: "no"; "may", and goes without; "must".
    """

    run: Callable[[PartialTexts, SearchRun], SearchResult]
    n: int
    most: int
    n_texts: Callable[[int], int]
    draws: bool = False
    scored: Literal["no", "may", "must"] = "no"


@dataclass(frozen=True, slots=True)
class SearchBy:
    """How a text is searched for.

    Attributes:
        name: The search, a plug-in of `edgedec.searches`.
        n: Its size, which the search explains; None for its own default.
        scorer: What scores the texts: a function `(prefix, steps) -> scores`, the argument list of a command, or the
            name of a plug-in, such as "likely". None for what the search does without.
        scorer_seconds: Most seconds of a call of the scorer.
        answer: The regular expression of an answer, for searches that end with a vote.
        separator: What ends a step, for searches that write step by step.

    Raises:
        OptionError: The name is unknown, the size is out of range, or the scorer is missing or not wanted.
        PluginError: The search does not import.
    """

    name: str = "beam"
    n: int | None = None
    scorer: Scorer | Sequence[str] | str | None = None
    scorer_seconds: float = SCORER_S
    answer: str = ANSWER
    separator: str = "\n"

    def __post_init__(self) -> None:
        check_fields(self)
        search, n = self.search, self.size
        if not 1 <= n <= search.most:
            raise OptionError("size", n, f"it must be a whole number from 1 to {search.most}")
        answer_pattern(self.answer)
        require_scorer(self.scorer, self.scorer_seconds)
        if self.scorer is not None and search.scored == "no":
            raise OptionError("scorer", self.scorer, f"the search {self.name!r} takes none; leave it out")
        if self.scorer is None and search.scored == "must":
            raise OptionError("scorer", None, f"the search {self.name!r} needs one; give a checker of whole texts")
        if not self.separator:
            raise OptionError("separator", self.separator, "it must be a text that ends a step, such as a line end")

    @property
    def search(self) -> Search:
        """The search itself."""
        return installed(SEARCHES, "search", self.name, Search)

    @property
    def size(self) -> int:
        """The size of the search, its own default where none was given."""
        return self.search.n if self.n is None else self.n

    @property
    def n_texts(self) -> int:
        """How many texts the search holds at most, where its scores don't lead it astray."""
        return self.search.n_texts(self.size)
