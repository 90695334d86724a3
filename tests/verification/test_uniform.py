"""The random numbers of the rules."""

import numpy as np

from edgedec.sampling import Noise
from edgedec_methods.drawn.rule_tools import uniform_source


def test_the_random_numbers_are_uniform_keyed_and_apart_from_the_noise() -> None:
    """Ten cells hold 20,000 numbers evenly; seed, position and count matter; the Gumbel noise is another."""
    numbers = np.array([uniform_source(Noise(5), position)(k) for position in range(2000) for k in range(10)])
    assert len(set(numbers.tolist())) == 20_000
    assert 0 < numbers.min() < numbers.max() < 1
    counts = np.histogram(numbers, bins=10, range=(0, 1))[0]
    assert ((counts - 2000) ** 2 / 2000).sum() < 9 + 4 * np.sqrt(18)
    by_position = numbers.reshape(2000, 10)
    assert np.abs(np.corrcoef(by_position.T) - np.eye(10)).max() < 4 / np.sqrt(2000)
    noise = np.array([Noise(5).gumbel(position, np.arange(10)) for position in range(2000)])
    assert np.abs(np.corrcoef(by_position.ravel(), np.exp(-np.exp(-noise)).ravel())[0, 1]) < 4 / np.sqrt(20_000)
    assert uniform_source(Noise(6), 0)(0) != uniform_source(Noise(5), 0)(0)
