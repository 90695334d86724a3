"""First Finish Search: of texts written side by side, the first that ends is the answer (arXiv:2505.18149).

Its authors found that, among the traces of reasoning models, shorter ones are more often right. The others are dropped
at once, so it costs the shortest text's steps.
"""

from collections.abc import Sequence

from edgedec.choosing.partial_texts import PartialText, PartialTexts
from edgedec.choosing.sampled_steps import write_steps
from edgedec.sampling import SamplingParams


def first_finished(ended: Sequence[bool], n_tokens: Sequence[int]) -> int:
    """Return the place of the text that ended by itself after the fewest tokens; of equals the first.

    Where none ended by itself, the first text is chosen.

    >>> first_finished([True, True, False], [9, 7, 3]), first_finished([False], [3])
    (1, 0)
    """
    whole = [i for i, has_ended in enumerate(ended) if has_ended]
    return min(whole, key=n_tokens.__getitem__, default=0)


def first_finish(
    texts: PartialTexts, live: Sequence[PartialText], params: SamplingParams, seeds: Sequence[int]
) -> PartialText:
    """Return the first of these texts that ends by itself; the others are dropped when it does.

    Where none ends within the most tokens allowed, the first text is returned.
    """
    written = list(live)
    while not any(text.ended == "stop" for text in written) and any(text.ended is None for text in written):
        written = write_steps(texts, written, params, seeds, separator=None, most=1)
    ended, counts = [text.ended == "stop" for text in written], [len(text.token_ids) for text in written]
    chosen = written[first_finished(ended, counts)]
    texts.drop(*(text for text in written if text is not chosen))
    return chosen
