"""The tree of texts against a plain form of it over a table, and on a diffusion language model."""

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.decoding.plain_denoising import write_model
from support.decoding.table_branches import Ids, random_table, table_texts

import edgedec
from edgedec.api.best_text import best
from edgedec.choosing.partial_texts import PartialText, PartialTexts
from edgedec.choosing.search_by import SearchBy
from edgedec.errors import MemoryCapError
from edgedec.sampling import Noise, SamplingParams, draw
from edgedec_methods.sampled_steps import Steps
from edgedec_methods.tree import written

pytestmark = pytest.mark.slow

PARAMS = SamplingParams(temperature=1.0, top_p=1.0)
LENGTH, DEPTH = 6, 4


def score(ids: Sequence[int]) -> float:
    """Return a score of a text that its tokens tell."""
    return (sum(i * token for i, token in enumerate(ids, 1)) * 7 % 11) / 10


def by_table(texts: PartialTexts, live: Sequence[PartialText], /) -> list[float]:
    """Score texts."""
    return [score(text.token_ids) for text in live]


@pytest.mark.parametrize("seed", range(6))
def test_texts_are_those_of_a_plain_form(seed: int) -> None:
    """By paths alone: a node is the numbers of its ways down, and its value a sum over all that is below it."""
    table = random_table(seed, n_vocab=4, length=LENGTH)
    texts, branches = table_texts(table, LENGTH)
    with texts:
        found = written(texts, 14, Steps(PARAMS, seed, separator=None, most=1), by_table)
        assert len(branches.held) <= DEPTH * 14 + 2
    assert not branches.held

    ids_of: dict[Ids, Ids] = {(): ()}  # node -> text
    ends: list[tuple[Ids, float]] = []  # the node that each text ended in, and its score

    def below(node: Ids) -> list[Ids]:
        return sorted(its for its in ids_of if len(its) == len(node) + 1 and its[:-1] == node)

    def value(node: Ids) -> float:
        values = [value(child) for child in below(node)] or [its for at, its in ends if at == node]
        return math.log(sum(math.exp(10 * v) for v in values) / len(values)) / 10

    for i, (text, its_score) in enumerate(found):
        node: Ids = ()
        while len(node) < DEPTH and len(below(node)) ** 2 > sum(at[: len(node)] == node for at, _ in ends):
            going = [child for child in below(node) if 0 not in ids_of[child] and len(ids_of[child]) < LENGTH]
            if not going:
                break
            node = max(going, key=lambda child: round(value(child), 12))
        ids = ids_of[node]
        while 0 not in ids and len(ids) < LENGTH:
            ids += (draw(table[ids], PARAMS, (1, *ids), Noise(seed + i), 1 + len(ids)),)
            if len(node) < DEPTH:
                node += (len(below(node)),)
                ids_of[node] = ids
        whole = tuple(token for token in ids if token)
        assert (text.token_ids, its_score) == (whole, score(whole))
        ends.append((node, its_score))


def test_a_diffusion_language_model_is_searched(tmp_path: Path) -> None:
    """Its sessions fork in the middle of a block; the search is a function of the seed, and the best score wins.

    Its texts are planned, as those of any search.
    """
    path = write_model(tmp_path / "m.gguf", "blocks")

    def scorer(prefix: str, steps: Sequence[str], /) -> list[float]:
        return [sum(map(ord, text)) % 97 / 97 for text in steps]

    with edgedec.load(path, runtime="cpu", n_ctx=96, n_threads=1, n_texts=4 * 4 + 2) as engine:
        how = SearchBy("tree", 4, scorer=scorer, separator="\n")
        runs = [best(engine, [1, 70, 80, 90], how, max_tokens=20, seed=5, temperature=1.0) for _ in range(2)]
        assert runs[0].texts[0].token_ids != runs[0].texts[1].token_ids
        assert [text.token_ids for text in runs[0].texts] == [text.token_ids for text in runs[1].texts]
        assert runs[0].scores[runs[0].place] == max(runs[0].scores)
        assert list(runs[0].scores) == scorer("", [text.text for text in runs[0].texts])
    with (
        edgedec.load(path, runtime="cpu", n_ctx=96, n_threads=1, memory="200MB") as engine,
        pytest.raises(MemoryCapError, match="n_texts"),
    ):
        best(engine, [1, 70, 80, 90], how, max_tokens=20)
