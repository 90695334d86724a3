"""Texts of a table that are written plainly, token by token and without forks: what searches are compared with."""

import numpy as np

from edgedec.choosing.partial_texts import PartialText
from edgedec.sampling import Noise, SamplingParams, draw
from support.decoding.table_branches import END, Ids, Table, random_table

PARAMS = SamplingParams(temperature=1.0, top_p=1.0)
N_VOCAB, LENGTH = 5, 6
PROMPT = (1,)


def table_of(seed: int) -> Table:
    """Return a table whose texts have up to LENGTH tokens."""
    return random_table(seed, n_vocab=N_VOCAB, length=LENGTH)


def said(text: PartialText) -> Ids:
    """Return a text's tokens, its end token included."""
    return (*text.token_ids, END) if text.ended == "stop" else text.token_ids


def is_over(ids: Ids) -> bool:
    """Tell whether a text has ended."""
    return len(ids) >= LENGTH or (bool(ids) and ids[-1] == END)


def greedy(table: Table, ids: Ids = ()) -> Ids:
    """Return the greedy text behind some tokens."""
    while not is_over(ids):
        ids = (*ids, int(np.argmax(table[ids])))
    return ids


def sampled(table: Table, seed: int, ids: Ids = ()) -> Ids:
    """Return the text that a seed writes behind some tokens."""
    while not is_over(ids):
        seen = (*PROMPT, *ids)
        ids = (*ids, draw(table[ids], PARAMS, seen, Noise(seed), len(seen)))
    return ids


def grown(table: Table, seed: int, ids: Ids, n: int, length: int) -> Ids:
    """Return a text of at most `length` tokens with up to n drawn tokens more."""
    for _ in range(n):
        if len(ids) >= length or END in ids:
            break
        seen = (*PROMPT, *ids)
        ids = (*ids, draw(table[ids], PARAMS, seen, Noise(seed), len(seen)))
    return ids
