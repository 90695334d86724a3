"""The searches that benchmarks/answers/better_answers.py runs on a made task, by name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from function_runner import n_passed
from made_runs import figures, prompt_of, texts_of
from made_tasks import MadeTask, given_answer

import edgedec
from edgedec.api.branching import branches
from edgedec.choosing.partial_texts import AskedPrompt, PartialText, PartialTexts
from edgedec.choosing.scorer import TextScorer, scorer_named
from edgedec.choosing.vote import voted
from edgedec.sampling import SamplingParams
from edgedec_methods.a_star import a_star
from edgedec_methods.adadec import LookAhead, reranked
from edgedec_methods.beam import beam_search
from edgedec_methods.cntp import Caution, cautious
from edgedec_methods.diverse_beams import diverse_beams
from edgedec_methods.judgement import turn_after_answer
from edgedec_methods.particles import filtered
from edgedec_methods.planning import Planning, planned
from edgedec_methods.sampled_steps import Steps, forks, seeds_from
from edgedec_methods.self_evaluation import pruned
from edgedec_methods.spec_reason import GRADING, grading_of, spec_reason
from edgedec_methods.tree import written


@dataclass(frozen=True)
class Setting:
    """What a search runs on.

    Attributes:
        engine: The model.
        small: The small model of SpecReason, or None.
        task: The task.
        params: How tokens are drawn.
        seed: The first seed.
        max_tokens: Most tokens of a text.
        scored_by: The scorer of steps, by its name.
    """

    engine: edgedec.Engine
    small: edgedec.Engine | None
    task: MadeTask
    params: SamplingParams
    seed: int
    max_tokens: int
    scored_by: str

    @property
    def steps(self) -> Steps:
        """Steps of a line each."""
        return Steps(self.params, self.seed, "\n", 48)

    def scorer(self) -> TextScorer:
        """Return the scorer of steps; of whole functions, it is the share of the public tests that they pass."""
        engine, ids = self.engine, prompt_of(self.engine, self.task)
        render = engine.requests.render
        asked = AskedPrompt(engine.model, ids, "", lambda most: branches(engine, ids, most=most), render, None)
        of_steps = scorer_named(self.scored_by)(asked)
        if self.task.kind != "functions":
            return of_steps

        def score(texts: PartialTexts, live: Sequence[PartialText], /) -> list[float]:
            growing = [text for text in live if text.ended is None]
            chances = iter(of_steps(texts, growing) if growing else [])
            return [next(chances) if text.ended is None else self.passed(texts.text(text)) for text in live]

        return score

    def passed(self, text: str) -> float:
        """Return the share of the public tests that a function passes."""
        return n_passed(text, self.task.public) / len(self.task.public)

    def place(self, said: Sequence[str]) -> int:
        """Return the place of the text that is chosen: by the vote, or for functions by the public tests."""
        if self.task.kind != "functions":
            return voted([given_answer(text) for text in said])
        return max(range(len(said)), key=[self.passed(text) for text in said].__getitem__)


Search = Callable[[Setting, PartialTexts], tuple[str, dict[str, Any]]]
"""-> the text that is chosen, and further figures."""


def _beam(n: int, n_groups: int = 1) -> Search:
    def search(setting: Setting, texts: PartialTexts) -> tuple[str, dict[str, Any]]:
        beams = diverse_beams(texts, n, n_groups=n_groups) if n_groups > 1 else beam_search(texts, n)
        found = [texts.text(each.text) for each in beams]
        place = setting.place(found) if n_groups > 1 else 0
        return found[place], {"any": any(figures(setting.task, text)["right"] for text in found)}

    return search


def _cntp(setting: Setting, texts: PartialTexts) -> tuple[str, dict[str, Any]]:
    return texts.text(cautious(texts, setting.params, setting.seed, Caution())), {}


def _adadec(setting: Setting, texts: PartialTexts) -> tuple[str, dict[str, Any]]:
    return texts.text(reranked(texts, LookAhead())), {}


def _particles(n: int) -> Search:
    def search(setting: Setting, texts: PartialTexts) -> tuple[str, dict[str, Any]]:
        found = filtered(texts, n, setting.steps, setting.scorer())
        return _best(setting, texts, found.texts, found.scores)

    return search


def _best(
    setting: Setting, texts: PartialTexts, found: Sequence[PartialText], scores: Sequence[float]
) -> tuple[str, dict[str, Any]]:
    """Return the text with the highest score, as a search with a scorer does, and what the vote would be worth."""
    said = [texts.text(text) for text in found]
    rights = [figures(setting.task, text)["right"] for text in said]
    best = max(range(len(said)), key=scores.__getitem__)
    return said[best], {"voted": rights[setting.place(said)], "any": any(rights)}


def _tree(n: int) -> Search:
    def search(setting: Setting, texts: PartialTexts) -> tuple[str, dict[str, Any]]:
        found = written(texts, n, setting.steps, setting.scorer())
        return _best(setting, texts, [text for text, _ in found], [score for _, score in found])

    return search


def _pruned(n: int, keep: int) -> Search:
    """Score texts after 24 tokens and write the best of them to their ends, which are scored again."""

    def search(setting: Setting, texts: PartialTexts) -> tuple[str, dict[str, Any]]:
        scorer, live, seeds = setting.scorer(), forks(texts, texts.begin(), n), seeds_from(setting.seed, n)
        found, _ = pruned(texts, live, setting.params, seeds, scorer, at=24, keep=keep)
        return _best(setting, texts, found, scorer(texts, found))

    return search


def _a_star(n_steps: int, ahead: float) -> Search:
    def search(setting: Setting, texts: PartialTexts) -> tuple[str, dict[str, Any]]:
        found, n_expanded = a_star(texts, n_steps, setting.steps, setting.scorer(), most_expanded=16, ahead=ahead)
        return texts.text(found), {"n_expanded": n_expanded}

    return search


def _planned(setting: Setting, texts: PartialTexts) -> tuple[str, dict[str, Any]]:
    def reward(texts: PartialTexts, live: Sequence[PartialText], /) -> list[float]:
        return [setting.passed(texts.text(text)) for text in live]

    found = planned(texts, reward, Planning(n_rollouts=8))
    return texts.text(found.text), {"reward": found.reward, "n_rollouts": found.n_rollouts}


def _spec_reason(threshold: int) -> Search:
    def search(setting: Setting, texts: PartialTexts) -> tuple[str, dict[str, Any]]:
        assert setting.small is not None, "--small names the small model"
        grading = grading_of(setting.engine.tokenizer, turn_after_answer(setting.engine.requests.render, GRADING))
        with texts_of(setting.small, setting.task, setting.max_tokens) as small:
            found = spec_reason(small, texts, setting.steps, grading, threshold=threshold)
            more = {"grades": found.grades, "kept": found.steps_kept, "small_forwards": dict(small.forwards)}
            return texts.decode(found.text.token_ids), more

    return search


SEARCHES: Mapping[str, Search] = {
    "greedy": _beam(1),
    "beam4": _beam(4),
    "beam8": _beam(8),
    "diverse4": _beam(4, 4),
    "cntp": _cntp,
    "adadec": _adadec,
    "diverse8": _beam(8, 8),
    "diverse16": _beam(16, 16),
    "particles4": _particles(4),
    "particles8": _particles(8),
    "particles16": _particles(16),
    "astar4": _a_star(4, 1.0),
    "cheapest4": _a_star(4, 0.0),
    "tree8": _tree(8),
    "pgtd8": _planned,
    "pruned8": _pruned(8, 2),
    "specreason5": _spec_reason(5),
    "specreason8": _spec_reason(8),
}

UNSCORED = ("greedy", "beam4", "beam8", "diverse4", "diverse8", "diverse16", "cntp", "adadec", "pgtd8", "specreason5")
"""Searches that take no scorer of steps; diverse beams and planning take the tests of whole functions."""
COMPARED = ("greedy", "particles4", "astar4", "cheapest4", "tree8", "pruned8", "cntp", "diverse4")
COMPARED_BY_KIND = {"functions": (*COMPARED, "adadec", "pgtd8")}
"""What `all` runs."""
