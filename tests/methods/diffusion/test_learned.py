"""Learn2PD's filter against its formula, and files that are no filters."""

import json
from math import exp
from pathlib import Path

import numpy as np
import pytest
from support.decoding.denoising_passes import SIZE, check

from edgedec.errors import OptionError
from edgedec_methods.diffusion.learned import N_FEATURES, learned
from edgedec_methods.diffusion.rules import Pass, denoising_named

RNG = np.random.default_rng(3)
FILTER = {
    "first": RNG.standard_normal((N_FEATURES, 3)).tolist(),
    "bias": RNG.standard_normal(3).tolist(),
    "second": [4.0, 3.0, 5.0],
    "last": -1.0,
}


def expected(passes: list[Pass]) -> list[int]:
    """Return the positions that the filter takes as final."""
    its, chosen = passes[-1], []
    seen = dict.fromkeys(range(SIZE), 1.0) | dict(zip(its.places.tolist(), its.confidences.tolist(), strict=True))
    for i, place in enumerate(its.places.tolist()):
        x = [seen.get(place + d, 0.0) for d in range(-4, 5)] + [1 - len(its.places) / SIZE]
        hidden = [
            max(0.0, sum(a * FILTER["first"][j][k] for j, a in enumerate(x)) + FILTER["bias"][k]) for k in range(3)
        ]
        score = sum(h * w for h, w in zip(hidden, FILTER["second"], strict=True)) + FILTER["last"]
        chosen += [i] if 1 / (1 + exp(-score)) > 0.96 else []
    return chosen


def test_positions_that_the_filter_takes_as_final_are_committed(tmp_path: Path) -> None:
    """By a hidden layer over the probabilities around them."""
    path = tmp_path / "filter.json"
    path.write_text(json.dumps(FILTER))
    check(learned(str(path)), expected)


@pytest.mark.parametrize(
    "change", [{"last": [1.0]}, {"bias": []}, {"first": "x"}, {"second": [1e9, 0, 0]}, {"bias": None}]
)
def test_other_files_are_refused(tmp_path: Path, change: dict[str, object]) -> None:
    """With the name of the script that makes one."""
    path = tmp_path / "filter.json"
    path.write_text(json.dumps(FILTER | change))
    for text in (f"learned:{path}", "learned", f"learned:{tmp_path}"):
        with pytest.raises(OptionError, match=r"fit_filter\.py"):
            denoising_named(text)
