"""Where a step of a text ends."""

import numpy as np
import pytest
from support.decoding.table_branches import random_table, table_texts

from edgedec.sampling import SamplingParams
from edgedec_methods.sampled_steps import write_steps

LENGTH = 7


@pytest.mark.parametrize(
    ("separator", "most", "lengths"),
    [("aa", None, [2, 4, 6, 7]), ("b", None, [7]), (None, 3, [3, 6, 7]), ("aaa", 2, [2, 4, 6, 7])],
)
def test_a_step_ends_with_its_own_separator(separator: str | None, most: int | None, lengths: list[int]) -> None:
    """Of a model that writes "a" for ever: what earlier steps wrote is no part of the next step's separator."""
    table = {ids: np.array([-9, 9, -9], np.float32) for ids in random_table(0, n_vocab=3, length=LENGTH)}
    texts, _ = table_texts(table, max_tokens=LENGTH)
    params, found = SamplingParams(temperature=0.0), list[int]()
    with texts:
        text = texts.begin()
        while text.ended is None:
            (text,) = write_steps(texts, [text], params, [0], separator=separator, most=most)
            found.append(len(text.token_ids))
    assert found == lengths
