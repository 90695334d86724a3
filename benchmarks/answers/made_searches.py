"""The searches that benchmarks/answers/better_answers.py runs on a made task, by name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from function_runner import n_passed
from made_runs import figures, question, texts_of
from made_tasks import MadeTask, given_answer

import edgedec
from edgedec.choosing.partial_texts import PartialText, PartialTexts
from edgedec.choosing.scorer import TextScorer
from edgedec.choosing.vote import voted
from edgedec.sampling import SamplingParams
from edgedec_methods.a_star import a_star
from edgedec_methods.adadec import LookAhead, reranked
from edgedec_methods.beam import beam_search
from edgedec_methods.cntp import Caution, cautious
from edgedec_methods.diverse_beams import diverse_beams
from edgedec_methods.judgement import JudgeScorer, judged, question_of, turn_after_answer
from edgedec_methods.particles import filtered
from edgedec_methods.planning import Planning, planned
from edgedec_methods.sampled_steps import Steps, seeds_from, write_steps
from edgedec_methods.self_evaluation import RESTART
from edgedec_methods.spec_reason import GRADING, grading_of, spec_reason


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
    """

    engine: edgedec.Engine
    small: edgedec.Engine | None
    task: MadeTask
    params: SamplingParams
    seed: int
    max_tokens: int

    @property
    def steps(self) -> Steps:
        """Steps of a line each."""
        return Steps(self.params, self.seed, "\n", 48)

    def scorer(self) -> TextScorer:
        """Return the model's one-token judgement; of whole functions, the share of the public tests that they pass."""
        judge = JudgeScorer(question(self.engine))
        if self.task.kind != "functions":
            return judge

        def score(texts: PartialTexts, live: Sequence[PartialText], /) -> list[float]:
            growing = [text for text in live if text.ended is None]
            chances = iter(judge(texts, growing) if growing else [])
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
        said = [texts.text(text) for text in found.texts]
        return said[setting.place(said)], {"best": figures(setting.task, texts.text(found.best))["right"]}

    return search


def _a_star(n_steps: int) -> Search:
    def search(setting: Setting, texts: PartialTexts) -> tuple[str, dict[str, Any]]:
        found, n_expanded = a_star(texts, n_steps, setting.steps, setting.scorer(), most_expanded=16)
        return texts.text(found), {"n_expanded": n_expanded}

    return search


def _planned(setting: Setting, texts: PartialTexts) -> tuple[str, dict[str, Any]]:
    def reward(texts: PartialTexts, live: Sequence[PartialText], /) -> list[float]:
        return [setting.passed(texts.text(text)) for text in live]

    found = planned(texts, reward, Planning(n_rollouts=8))
    return texts.text(found.text), {"reward": found.reward, "n_rollouts": found.n_rollouts}


def _midway(setting: Setting, texts: PartialTexts) -> tuple[str, dict[str, Any]]:
    """Judge eight texts after 24 tokens, and again when they are whole; the text that the first judgement prefers."""
    engine, root, seeds = setting.engine, texts.begin(), seeds_from(setting.seed, 8)
    asked = question_of(engine.tokenizer, turn_after_answer(engine.requests.render, RESTART), parse_special=True)
    live = [root, *(texts.fork(root) for _ in seeds[1:])]
    begun = write_steps(texts, live, setting.params, seeds, separator=None, most=24)
    chances = judged(texts, begun, asked)
    said = [texts.text(text) for text in write_steps(texts, begun, setting.params, seeds, separator=None)]
    right = [figures(setting.task, text)["right"] for text in said]
    return said[max(range(8), key=chances.__getitem__)], {"chances": chances, "rights": right}


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
    "astar4": _a_star(4),
    "astar8": _a_star(8),
    "pgtd8": _planned,
    "midway8": _midway,
    "specreason5": _spec_reason(5),
    "specreason8": _spec_reason(8),
}
