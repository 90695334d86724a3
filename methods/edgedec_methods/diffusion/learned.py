"""Learn2PD: a small trained filter says which positions have their last token already.

For each masked position the filter reads the probabilities of it and of four neighbours on each side, 1 for what is
committed and 0 outside the block, and the share of the block that is committed. A hidden layer and one output make the
probability that the position's token will stay; positions with 0.96 are committed. The paper's filter reads the 32
probabilities of a block, and fits no other block.

Paper: Learning to Parallel, github.com/ims-kdks/Learning-to-Parallel-Decoding
Option: `--method diffusion:learned:FILTER.json`
For: diffusion language models
Measured: 2.51 tokens a forward, 146 of 176 made tasks right, where `schedule:1` has 0.75 and 149
    (`python benchmarks/diffusion/compare_rules.py small.gguf --tasks 16`)
Status: study
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import OptionError
from edgedec_methods.diffusion.rules import Chosen, Pass, RuleKind

_NEAR, _SURE, _MOST_BYTES, _MOST_HIDDEN = 4, 0.96, 1_000_000, 256
N_FEATURES = 2 * _NEAR + 2


def features(size: int, places: NDArray[np.int64], confidences: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return f64[n, N_FEATURES], what the filter reads of each masked position of a block of `size`."""
    seen = np.zeros(size + 2 * _NEAR)
    seen[_NEAR : _NEAR + size] = 1.0
    seen[_NEAR + places] = confidences
    near = seen[places[:, None] + np.arange(2 * _NEAR + 1)]
    return np.concatenate([near, np.full((len(places), 1), 1 - len(places) / size)], 1)


def learned(passes: Sequence[Pass], weights: Sequence[NDArray[np.float64]]) -> Chosen:
    """Commit the positions that a filter takes as final."""
    latest, (first, bias, second, last) = passes[-1], weights
    hidden = np.maximum(features(latest.size, latest.places, latest.confidences) @ first + bias, 0.0)
    return latest.chosen(hidden @ second + last > np.log(_SURE / (1 - _SURE)))


def _read(path: str) -> list[NDArray[np.float64]]:
    """Return the weights in a file of benchmarks/diffusion/fit_filter.py: f64[N_FEATURES, n], f64[n], f64[n], f64[]."""
    wrong = OptionError("denoise", f"learned:{path}", "fit a filter by benchmarks/diffusion/fit_filter.py")
    try:
        with Path(path).open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
        values: Any = json.loads(data) if len(data) <= _MOST_BYTES else None
        arrays = [np.array(values[name], np.float64) for name in ("first", "bias", "second", "last")]
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise wrong from error
    n = arrays[1].size
    shapes = [(N_FEATURES, n), (n,), (n,), ()]
    is_whole = all(np.isfinite(array).all() and np.abs(array).max(initial=0.0) < 1e6 for array in arrays)
    if not 1 <= n <= _MOST_HIDDEN or [array.shape for array in arrays] != shapes or not is_whole:
        raise wrong
    return arrays


LEARNED = RuleKind(learned, read=_read)
