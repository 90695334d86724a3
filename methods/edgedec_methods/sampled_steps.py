"""Writing steps: several texts are sampled side by side, each up to the end of its step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from edgedec.choosing.partial_texts import PartialText, PartialTexts
from edgedec.choosing.search_by import SearchRun
from edgedec.sampling import Noise, SamplingParams, draw

BLANK_LINE = "\n\n"
"""The default end of a step: chat models put a blank line between the steps of an answer."""
MOST_STEP_TOKENS = 64
"""Most tokens of a step of a search that is run by its name."""


@dataclass(frozen=True, slots=True)
class Steps:
    """How the steps of a text are written.

    Attributes:
        params: How tokens are drawn.
        seed: The first of the seeds.
        separator: What ends a step; None for steps of `most` tokens alone.
        most: Most tokens of a step; None for no limit.
    """

    params: SamplingParams
    seed: int = 0
    separator: str | None = BLANK_LINE
    most: int | None = None


def steps_of(run: SearchRun) -> Steps:
    """Return how a search that is run by its name writes steps."""
    return Steps(run.params, run.seed, run.separator, MOST_STEP_TOKENS)


def forks(texts: PartialTexts, text: PartialText, n: int) -> list[PartialText]:
    """Return n texts that say the same, the first of them `text` itself."""
    return [text, *(texts.fork(text) for _ in range(n - 1))]


def next_step(texts: PartialTexts, text: PartialText, steps: Steps) -> PartialText:
    """Return a text with one step more, drawn with the first of the seeds."""
    (written,) = write_steps(texts, [text], steps.params, [steps.seed], separator=steps.separator, most=steps.most)
    return written


def write_steps(
    texts: PartialTexts,
    live: Sequence[PartialText],
    params: SamplingParams,
    seeds: Sequence[int],
    *,
    separator: str | None = BLANK_LINE,
    most: int | None = None,
) -> list[PartialText]:
    """Return each of these texts with one step more, in their order.

    All texts share forwards. A text that has ended is returned as it is. Text i draws its tokens with the noise of
    `seeds[i]` at their absolute positions, so it is the text that this seed writes alone.

    Args:
        texts: Who holds them.
        live: The texts; they are used up.
        params: How tokens are drawn.
        seeds: By text, its seed.
        separator: What ends a step; None to write to the end of the text.
        most: Most tokens of a step; None for no limit but the text's own.
    """
    written, starts = list(live), [len(text.token_ids) for text in live]
    going = [i for i, text in enumerate(written) if text.ended is None]
    noises = {i: Noise(seeds[i]) for i in going}
    while going:
        choices = [(written[i], drawn(texts, written[i], params, noises[i])) for i in going]
        for i, text in zip(going, texts.advance(choices), strict=True):
            written[i] = text
        going = [i for i in going if not _is_step(texts.decode, written[i], starts[i], separator, most)]
    return written


def drawn(texts: PartialTexts, text: PartialText, params: SamplingParams, noise: Noise) -> int:
    """Return the token that a text's noise draws next."""
    seen = (*texts.prompt_ids, *text.token_ids)
    return draw(text.logits, params, seen, noise, len(seen))


def _is_step(
    decode: Callable[[Sequence[int]], str], text: PartialText, start: int, separator: str | None, most: int | None
) -> bool:
    """Return whether a text has ended or has written a whole step since it had `start` tokens."""
    n_new = len(text.token_ids) - start
    if text.ended is not None or (most is not None and n_new >= most):
        return True
    if separator is None:
        return False
    tail = text.token_ids[start:][-len(separator.encode()) - 1 :]
    return separator in decode(tail)


def seeds_from(seed: int, n: int, step: int = 0) -> list[int]:
    """Return the seeds of n texts: seed, seed + 1, ... A later step goes on where the one before ended.

    >>> seeds_from(7, 3), seeds_from(7, 3, step=1)
    ([7, 8, 9], [10, 11, 12])
    """
    return [seed + step * n + i for i in range(n)]


def unique(texts: Sequence[PartialText]) -> list[PartialText]:
    """Return the first text of each content: of the same tokens and the same end."""
    by_text: dict[tuple[tuple[int, ...], str | None], PartialText] = {}
    for text in texts:
        by_text.setdefault((text.token_ids, text.ended), text)
    return list(by_text.values())
