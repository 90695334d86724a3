"""A search for the best text of a prompt, by a name of edgedec.choosing.search_by."""

import secrets
from typing import Any

from edgedec.api.best_text import ManyTexts
from edgedec.api.requests import RequestOptions
from edgedec.choosing.choice import ChosenText
from edgedec.choosing.partial_texts import AskedPrompt, PartialText, PartialTexts
from edgedec.choosing.scorer import CallerScorer
from edgedec.choosing.search_by import SearchBy, SearchRun
from edgedec.choosing.vote import answer_of
from edgedec.decoding.text_room import require_room
from edgedec.errors import OptionError, argument
from edgedec.progress import check_cancelled
from edgedec.sampling import SamplingParams
from edgedec.sequence import Generation
from edgedec.sessions.text_pages import MOST_FORKS, ROWS_OF_TEXT
from edgedec.stats import DecodeStats

_OF_DRAWS = frozenset(
    {"temperature", "top_k", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"}
    | {"momentum", "penalty_last_n", "logit_bias"}
)
_OF_ALL = frozenset({"seed", "max_tokens", "stop", "ignore_end", "reuse", "draft", "on_progress"})


def searched(engine: ManyTexts, asked: AskedPrompt, how: SearchBy, options: RequestOptions) -> ChosenText:
    """Search for a text of a prompt, and return the texts that the search ends with and the chosen one.

    Args:
        engine: Has the model.
        asked: The prompt.
        how: The search.
        options: Those of samples() that a search knows: how tokens are drawn, where it draws, and where texts end.

    Raises:
        OptionError: The search does not know an option.
        ScorerError: The caller's scorer failed.
        CancelledError: The search was cancelled.
        CapabilityError: The runtime can't fork, or rows depend there on what else is in their forward.
        ContextFullError, MemoryCapError: There is no room for the texts.
    """
    _require_known(how, options)
    on_progress, cancel = options.pop("on_progress", None), asked.cancel
    of_sampling = {name for name in options if name not in RequestOptions.__annotations__} | {*SamplingParams.names()}
    sampling: dict[str, Any] = {name: value for name, value in options.items() if name in of_sampling}
    params = engine.sampling(**sampling)
    seed = secrets.randbits(62) if params.seed is None else params.seed
    scorer = None if how.scorer is None else CallerScorer(how.scorer, asked.prefix, how.scorer_seconds)
    run = SearchRun(how.size, params, seed, scorer, how.answer, how.separator, asked)
    check_cancelled(cancel, "the search")
    n_prompt = len(asked.token_ids)
    require_room(engine.pool.slots[0], how.n_texts, n_prompt, params.max_tokens, rows_each=ROWS_OF_TEXT)
    with engine.branches(asked.token_ids, most=MOST_FORKS, cancel=cancel, on_progress=on_progress) as branches:
        room = branches.n_ctx - n_prompt
        with PartialTexts(
            branches,
            asked.token_ids,
            is_end=(lambda token_id: False) if params.ignore_end else engine.tokenizer.is_end,
            decode=engine.tokenizer.decode,
            max_tokens=max(1, min(room, params.max_tokens or room)),
            stop=params.stop,
            cancel=cancel,
            on_progress=on_progress,
        ) as texts:
            found = how.search.run(texts, run)
            written = tuple(_generation(texts, text, engine.card.runtime, seed) for text in found.texts)
    answers = tuple(answer_of(text.text, how.answer) for text in written)
    return ChosenText(found.place, written, answers, found.scores, found.why)


def _require_known(how: SearchBy, options: RequestOptions) -> None:
    """Raise OptionError where an option was given that the search has no use for."""
    draws = how.search.draws
    known = _OF_ALL | (_OF_DRAWS if draws else {"temperature"})
    for name, value in options.items():
        if name not in known and value not in (None, False, "coupled", {}, ()):
            raise OptionError(name, value, f"a search by {how.name!r} can't heed it; leave it or the search out")
    if not draws and options.get("temperature"):
        accepted = f"the search {how.name!r} takes the most probable tokens; leave {argument('temperature')} out, or 0"
        raise OptionError("temperature", options["temperature"], accepted)


def _generation(texts: PartialTexts, text: PartialText, runtime: str, seed: int) -> Generation:
    """Return a text of a search as any other; its statistics are those of the whole search."""
    stats = DecodeStats(runtime=runtime, seed=seed, n_prompt_tokens=len(texts.prompt_ids))
    stats.n_generated_tokens, stats.n_steps = len(text.token_ids), sum(texts.forwards.values())
    stats.add_note(f"{texts.n_tokens} tokens were evaluated in {stats.n_steps} forwards of the search")
    return Generation(
        text=texts.text(text),
        token_ids=text.token_ids,
        finish_reason=text.ended or "length",
        stats=stats,
        logprob_sum=text.logprob - text.end_logprob,
    )
