"""Verification: which nodes stand, that the text is the target's for any draft, and the rules' random numbers."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.decoding.rule_checks import tree

from edgedec.draft import EMPTY_DRAFT, Draft, Verification
from edgedec.errors import DeadEndError, PluginError
from edgedec.sampling import Noise
from edgedec.verification.coupled import verify_coupled
from edgedec_methods.drawn.rule_tools import uniform_source


def verify(draft: Draft, text: Sequence[int]) -> tuple[Verification, list[int]]:
    """Verify against a target that says `text`, and return the rows it was asked for, too."""
    rows: list[int] = []

    def choose_token(row: int, accepted: tuple[int, ...]) -> int:
        rows.append(row)
        assert accepted == tuple(text[: len(accepted)])
        return text[len(accepted)]

    return verify_coupled(draft, choose_token), rows


def test_without_a_draft_the_target_says_one_token() -> None:
    """An empty draft is the plain step."""
    assert verify(EMPTY_DRAFT, [4]) == (Verification((), (4,)), [0])


def test_a_right_chain_is_accepted_with_a_bonus_token() -> None:
    """Three tokens and the one after them, asked for row by row."""
    assert verify(Draft.chain([4, 5, 6]), [4, 5, 6, 7]) == (Verification((0, 1, 2), (4, 5, 6, 7)), [0, 1, 2, 3])


def test_a_wrong_first_token_is_corrected() -> None:
    """Nothing stands, and rows after it are not looked at."""
    assert verify(Draft.chain([9, 5, 6]), [4, 5, 6, 7]) == (Verification((), (4,)), [0])


def test_a_chain_stands_up_to_its_first_wrong_token() -> None:
    """That the token after the wrong one is right again does not count."""
    verification, _ = verify(Draft.chain([4, 9, 6]), [4, 5, 6, 7])
    assert verification == Verification((0,), (4, 5))
    assert verification.token == 5


def test_a_tree_is_walked_along_what_the_target_says() -> None:
    """The path goes through later siblings and skips whole branches."""
    draft = tree([3, 4, 5, 5, 6, 7], [-1, -1, 0, 1, 1, 3])
    assert verify(draft, [4, 5, 7, 8]) == (Verification((1, 3, 5), (4, 5, 7, 8)), [0, 2, 4, 6])
    assert verify(draft, [3, 5, 7]) == (Verification((0, 2), (3, 5, 7)), [0, 1, 3])


def test_of_two_equal_siblings_the_first_stands() -> None:
    """A token drafted twice after the same node is one chance, not two."""
    assert verify(tree([4, 4, 5], [-1, -1, 1]), [4, 5, 6])[0] == Verification((0,), (4, 5))


@st.composite
def drafts(draw: st.DrawFn) -> Draft:
    """Draw trees over three token ids, so that many nodes are right by chance."""
    tokens = draw(st.lists(st.integers(0, 2), max_size=12))
    return tree(tokens, [draw(st.integers(-1, i - 1)) for i in range(len(tokens))])


@pytest.mark.slow
@given(drafts(), st.lists(st.integers(0, 2), min_size=13, max_size=13))
def test_any_draft_gives_the_targets_text(draft: Draft, text: list[int]) -> None:
    """The tokens are a start of the text, the path is one of the draft, and it could not go on."""
    verification, _ = verify(draft, text)
    path = verification.path
    assert list(verification.token_ids) == text[: len(path) + 1]
    assert [int(draft.parents[node]) for node in path] == [-1, *path][: len(path)]
    assert [int(draft.tokens[node]) for node in path] == text[: len(path)]
    end = path[-1] if path else -1
    assert (end, verification.token) not in zip(draft.parents, draft.tokens, strict=True)


@pytest.mark.parametrize(
    "draft",
    [
        Draft((0, 0), (-1,), (1.0, 1.0)),
        Draft((0, 0), (-1, 0), (1.0,)),
        tree([0, 8], [-1, 0]),
        tree([-1], [-1]),
        tree([0, 0], [-1, 1]),
        tree([0, 0], [1, -1]),
        tree([0], [-2]),
        Draft((0,), (-1,), (1.5,)),
        Draft((0,), (-1,), (float("nan"),)),
    ],
)
def test_malformed_drafts_are_refused(draft: Draft) -> None:
    """Lengths, token ids, parents and estimates are checked."""
    with pytest.raises(PluginError):
        draft.check(8)


def test_a_sound_draft_passes_and_truncates_to_a_sound_draft() -> None:
    """As parents stand first, any beginning of a draft is one."""
    draft = tree([3, 4, 5, 5], [-1, -1, 0, 1])
    for n_max in range(6):
        shorter = draft.truncated(n_max)
        shorter.check(8)
        assert len(shorter) == min(n_max, 4)


def test_a_dead_end_behind_an_accepted_token_is_left_to_the_next_step() -> None:
    """The accepted tokens come first, as in plain decoding; without one, the error is raised."""

    def choose_token(row: int, accepted: tuple[int, ...]) -> int:
        if len(accepted) == n_before:
            raise DeadEndError("nothing follows")
        return 5 + len(accepted)

    n_before = 2
    assert verify_coupled(tree([5, 6, 7], [-1, 0, 1]), choose_token) == Verification((0,), (5, 6))
    n_before = 0
    with pytest.raises(DeadEndError):
        verify_coupled(tree([5], [-1]), choose_token)


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
