"""Computes the table of edgedec/loading/comparison.py from recorded drafts.

    edgedec bench MODEL --runtime cpu --rows ROWS.jsonl
    python benchmarks/speed/draft_yields.py ROWS.jsonl

The table depends on the model, the prompts and the drafters, not on times: the drafts at every position of a text that
was decoded without drafts are compared with the text.
"""

import sys
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path

from recordings import Recorded, Recording, read_recording
from replay import n_accepted

from edgedec.errors import RequestError
from edgedec.loading.comparison import ROWS, Kind

_PROMISES = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)  # expected tokens of the best nodes, which separate the kinds of positions


def kinds_of(texts: Sequence[Recorded]) -> tuple[Kind, ...]:
    """Return the tokens that drafts of each number of rows brought, by the number of tokens that drafters expected.

    The scheduler knows that expectation when it decides, so it can tell these kinds of positions apart.
    """
    n_seen = [0] * (len(_PROMISES) + 1)
    n_tokens = [[0] * len(ROWS) for _ in n_seen]
    for text in texts:
        for position in range(min(len(text.proposals), len(text.token_ids) - 1)):
            row, rest = text.proposals[position], text.token_ids[position + 1 :]
            order = sorted(range(len(row.paths)), key=lambda node: (-row.paths[node], node))
            kind = bisect_left(_PROMISES, sum(row.paths[node] for node in order[: ROWS[-1] - 1]))
            n_seen[kind] += 1
            for i, n_rows in enumerate(ROWS):
                found = n_accepted(row, set(order[: n_rows - 1]), rest)
                n_tokens[kind][i] += 1 + min(found, len(rest) - 1)
    total = sum(n_seen)
    return tuple(
        Kind(n / total, {n_rows: found / n for n_rows, found in zip(ROWS, tokens, strict=True)})
        for n, tokens in zip(n_seen, n_tokens, strict=True)
        if n
    )


def prompt_tokens(texts: Sequence[Recorded]) -> float:
    """Return the number of prompt tokens for each token of the answers."""
    return sum(text.n_prompt_tokens for text in texts) / sum(len(text.token_ids) for text in texts)


def source_of(recording: Recording) -> str:
    """Return the table as Python source.

    Raises:
        RequestError: The recording lacks the lengths of the prompts.
    """
    texts = recording.texts
    if not all(text.n_prompt_tokens for text in texts):
        raise RequestError("the recording lacks the lengths of its prompts; record it again with edgedec bench --rows")
    rows = [
        f"    Kind({kind.share:.4f}, {{{', '.join(f'{n}: {found:.3f}' for n, found in kind.tokens.items())}}}),"
        for kind in kinds_of(texts)
    ]
    lines = [f"PROMPT_TOKENS = {prompt_tokens(texts):.2f}", "KINDS: tuple[Kind, ...] = (", *rows, ")"]
    return "\n".join(lines)


if __name__ == "__main__":
    print(source_of(read_recording(Path(sys.argv[1]))))
