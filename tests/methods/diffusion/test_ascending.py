"""The ascending steps against their sentence."""

from support.decoding.denoising_passes import by_confidence, check

from edgedec_methods.diffusion.ascending import ascending


def test_each_pass_commits_twice_as_many() -> None:
    """1, 2, 4 and 8, as far as there are masked positions."""
    check(ascending(2), lambda passes: by_confidence(passes[-1])[: [1, 2, 4, 8][len(passes) - 1]])
