"""Scorers by name: likelihood of a text and of its last step, a probe, the judgement; any of them in a search."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.decoding.plain_texts import LENGTH, PARAMS, sampled, table_of
from support.decoding.table_branches import log_law, table_texts

from edgedec.api.best_text import BestOf
from edgedec.choosing.scorer import scorer_named
from edgedec.choosing.search_by import SearchBy
from edgedec.errors import OptionError, RequestError
from edgedec_methods.sampled_steps import forks, seeds_from, write_steps
from edgedec_methods.step_scores import N_LOGITS, Likelihood, Probe


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("last_step", [False, True])
def test_likelihood_is_that_of_the_table(seed: int, last_step: bool) -> None:
    """Of all tokens, or of those behind the text that was scored before; a text that had ended keeps its score."""
    table, seeds = table_of(seed), seeds_from(seed, 4)
    texts, _ = table_texts(table, max_tokens=LENGTH)
    scorer, expected = Likelihood(last_step=last_step), [0.0] * 4
    with texts:
        live, begins = forks(texts, texts.begin(), 4), [0] * 4
        for n in (2, 4, LENGTH):
            live = write_steps(texts, live, PARAMS, seeds, separator=None, most=2)
            for i, each in enumerate(sampled(table, seed) for seed in seeds):
                ids, begin = each[:n], begins[i] if last_step else 0
                if begin < len(ids):
                    mean = (log_law(table, ids) - log_law(table, ids[:begin])) / (len(ids) - begin)
                    expected[i], begins[i] = math.exp(mean), len(ids)
            assert scorer(texts, live) == pytest.approx(expected, abs=1e-6)


def test_a_probe_reads_logits_evenly_over_the_vocabulary() -> None:
    """A logistic function of their differences from the mean, so that a constant added to all changes nothing."""
    rng = np.random.default_rng(0)
    weights, logits = rng.standard_normal(N_LOGITS), rng.standard_normal(3 * N_LOGITS - 2).astype(np.float32)
    chance = 1 / (
        1 + math.exp(-(sum(w * (x - logits.mean()) for w, x in zip(weights, logits[::3], strict=True)) + 0.5))
    )
    texts: Any = [SimpleNamespace(logits=each) for each in (logits, logits + 7)]
    assert Probe(weights, 0.5)(texts, texts) == pytest.approx([chance, chance], rel=1e-4)


def test_a_probe_comes_from_a_file_of_its_model(tmp_path: Path) -> None:
    """Whatever else stands in the file is refused with what makes one; so is another model."""
    path = tmp_path / "probe.json"
    whole: dict[str, Any] = {"weights": [0.1] * N_LOGITS, "bias": 0.0, "n_vocab": 9}
    changes: tuple[dict[str, Any], ...] = ({"weights": [1.0]}, {"bias": math.inf}, {"bias": []})
    broken = [whole | change for change in changes]
    for wrong in ("", "[]", *map(json.dumps, broken)):
        path.write_text(wrong, encoding="utf-8")
        with pytest.raises(OptionError, match="step_scorers"):
            scorer_named(f"probe:{path}")
    path.write_text(json.dumps(whole), encoding="utf-8")
    asked: Any = SimpleNamespace(model=SimpleNamespace(card=SimpleNamespace(n_vocab=8, name="other")))
    with pytest.raises(RequestError, match="9 tokens, and 'other' has 8"):
        scorer_named(f"probe:{path}")(asked)
    asked.model.card.n_vocab = 9
    assert isinstance(scorer_named(f"probe:{path}")(asked), Probe)


@pytest.mark.parametrize("name", ["nothing", "likely:first", "judge:it", "probe:nowhere"])
def test_names_are_refused_before_anything_is_loaded(name: str) -> None:
    """In a search; and a choice among whole texts takes none by a name."""
    with pytest.raises(OptionError, match="scorer"):
        SearchBy("particles", scorer=name)
    with pytest.raises(OptionError, match="a function, a sequence"):
        BestOf(4, "score", scorer="likely")
