"""A search for the best text of a prompt, by a name of edgedec.choosing.search_by."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgedec.api.best_text import ManyTexts
from edgedec.api.request_options import RequestOptions
from edgedec.choosing.choice import Chosen
from edgedec.choosing.judgement import question_of
from edgedec.choosing.partial_texts import PartialText, PartialTexts
from edgedec.choosing.particles import Steps
from edgedec.choosing.scorer import CallerScorer, JudgeScorer, TextScorer
from edgedec.choosing.search_by import MOST_STEP_TOKENS, SearchBy, Setting
from edgedec.choosing.vote import answer_of
from edgedec.decoding.branches import Branches
from edgedec.errors import OptionError, argument
from edgedec.progress import CancelToken, OnProgress, check_cancelled, report_progress
from edgedec.sampling import SamplingParams
from edgedec.sequence import Generation
from edgedec.sessions.forks import MOST_FORKS, ROWS_OF_TEXT
from edgedec.stats import DecodeStats

_OF_DRAWS = frozenset(
    {"temperature", "top_k", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"}
    | {"momentum", "penalty_last_n", "logit_bias"}
)
_OF_ALL = frozenset({"seed", "max_tokens", "stop", "ignore_end", "reuse", "draft", "on_progress"})


def searched(
    engine: ManyTexts,
    prompt_ids: Sequence[int],
    how: SearchBy,
    words: tuple[str, str],
    cancel: CancelToken | None,
    options: RequestOptions,
) -> Chosen:
    """Search for a text of a prompt, and return the texts that the search ends with and the chosen one.

    Args:
        engine: Has the model.
        prompt_ids: The prompt.
        how: The search.
        words: The prompt as text, for the caller's scorer; and what the model reads after a text before it judges that
            text, with control tokens spelled out.
        cancel: Ends the search and the scorer.
        options: Those of samples() that a search knows: how tokens are drawn, where it draws, and where texts end.

    Raises:
        OptionError: The search does not know an option.
        ScorerError: The caller's scorer failed.
        CancelledError: `cancel` was cancelled.
        CapabilityError: The runtime can't fork, or rows depend there on what else is in their forward.
        ContextFullError, MemoryCapError: There is no room for the texts.
    """
    _require_known(how, options)
    on_progress = options.pop("on_progress", None)
    of_sampling = {name for name in options if name not in RequestOptions.__annotations__} | {*SamplingParams.names()}
    sampling: dict[str, Any] = {name: value for name, value in options.items() if name in of_sampling}
    params = engine.sampling(**sampling)
    seed = secrets.randbits(62) if params.seed is None else params.seed
    prefix, turn = words
    check_cancelled(cancel, "the search")
    engine.require_room(how.n_texts, len(prompt_ids), params.max_tokens, rows_each=ROWS_OF_TEXT)
    with engine.branches(prompt_ids, most=MOST_FORKS, cancel=cancel, on_progress=on_progress) as branches:
        room = branches.n_ctx - len(prompt_ids)
        with PartialTexts(
            _Reported(branches, on_progress),
            prompt_ids,
            is_end=(lambda token_id: False) if params.ignore_end else engine.tokenizer.is_end,
            decode=engine.tokenizer.decode,
            max_tokens=max(1, min(room, params.max_tokens or room)),
            stop=params.stop,
            cancel=cancel,
        ) as texts:
            steps = Steps(params, seed, how.separator, MOST_STEP_TOKENS)
            scorer = _scorer(engine, how, prefix, turn)
            found = how.method.run(texts, Setting(how.size, steps, scorer, how.scorer is not None, how.answer))
            written = tuple(_generation(texts, text, engine.card.runtime, seed) for text in found.texts)
    answers = tuple(answer_of(text.text, how.answer) for text in written)
    return Chosen(found.place, written, answers, found.scores, found.why)


def _require_known(how: SearchBy, options: RequestOptions) -> None:
    """Raise OptionError where an option was given that the search has no use for."""
    known = _OF_ALL | (_OF_DRAWS if how.method.draws else {"temperature"})
    for name, value in options.items():
        if name not in known and value not in (None, False, "coupled", {}, ()):
            raise OptionError(name, value, f"a search by {how.name!r} can't heed it; leave it or the search out")
    if not how.method.draws and options.get("temperature"):
        accepted = f"the search {how.name!r} takes the most probable tokens; leave {argument('temperature')} out, or 0"
        raise OptionError("temperature", options["temperature"], accepted)


def _scorer(engine: ManyTexts, how: SearchBy, prefix: str, turn: str) -> TextScorer | None:
    if how.scorer is not None:
        return CallerScorer(how.scorer, prefix, how.scorer_seconds)
    if how.method.scored == "judge":
        return JudgeScorer(question_of(engine.tokenizer, turn, parse_special=True))
    return None


def _generation(texts: PartialTexts, text: PartialText, runtime: str, seed: int) -> Generation:
    """Return a text of a search as any other; its statistics are those of the whole search."""
    stats = DecodeStats(runtime=runtime, seed=seed, n_prompt_tokens=len(texts.prompt_ids))
    stats.n_generated_tokens, stats.n_steps = len(text.token_ids), sum(texts.forwards.values())
    stats.add_reason(f"{texts.n_tokens} tokens were evaluated in {stats.n_steps} forwards of the search")
    return Generation(
        text=texts.text(text),
        token_ids=text.token_ids,
        finish_reason=text.ended or "length",
        stats=stats,
        logprob_sum=text.logprob - text.end_logprob,
    )


@dataclass(slots=True)
class _Reported:
    """Implements BranchesOfPrompt by branches, and reports the tokens that a search evaluates."""

    branches: Branches
    on_progress: OnProgress | None
    n_tokens: int = 0

    @property
    def root(self) -> int:
        return self.branches.root

    @property
    def logits(self) -> NDArray[np.float32]:
        logits: NDArray[np.float32] = self.branches.logits
        return logits

    def fork(self, branch: int) -> Sequence[int]:
        return self.branches.fork(branch)

    def drop(self, branch: int) -> None:
        self.branches.drop(branch)

    def forward(self, tokens: Mapping[int, Sequence[int]]) -> Mapping[int, NDArray[np.float32]]:
        found = self.branches.forward(tokens)
        self.n_tokens += sum(map(len, tokens.values()))
        report_progress(self.on_progress, "searching", self.n_tokens, None, "tokens")
        return found
