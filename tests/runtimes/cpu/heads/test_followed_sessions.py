"""The state of a head of any kind goes with its session: how a text came about changes no bit of what is drafted."""

from pathlib import Path

import numpy as np
import pytest
from support.heads.followed import KINDS, chain, drafted_together, followed, fresh, head_of, read, scores
from support.heads.loaded_blocks import TEXT
from support.models.tiny_models import N_VOCAB

from edgedec.errors import ModelFormatError, SessionError
from edgedec.head_state import ChainRules
from edgedec.load_options import LoadOptions
from edgedec_runtimes.cpu.runtime import Cpu

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("kind", KINDS)]


def test_how_a_text_was_read_changes_nothing(kind: str, tmp_path: Path) -> None:
    """A text read at once, token by token, and in pieces with rejected drafts between them, gives the same scores."""
    n = 70
    with followed(kind, tmp_path) as model:
        expected = fresh(model, n)
        slow, drafting, tree = (model.session(200) for _ in range(3))
        for i in range(n):
            read(slow, i, i + 1)
        assert np.array_equal(scores(slow, n), expected)
        assert np.array_equal(scores(slow, n), expected)  # with what a first block has left behind the text
        read(drafting, 0, 5)
        for i in range(5, n, 3):  # row 0 stands, two drafted tokens are right, two are not
            chain(drafting, i, ChainRules(4))
            wrong = (TEXT[i + 3 : i + 5] + 1) % N_VOCAB
            drafting.forward(np.concatenate([TEXT[i : i + 3], wrong]), n_past=i, rows="all")
        assert np.array_equal(scores(drafting, n), expected)
        read(tree, 0, 5)
        for i in range(5, n, 2):  # of two branches the second one is right
            tokens = np.array([TEXT[i], (TEXT[i + 1] + 1) % N_VOCAB, TEXT[i + 1]], np.int32)
            tree.forward(tokens, n_past=i, parents=np.array([-1, 0, 0], np.int32), rows="all")
            tree.keep(np.array([0, 2], np.int32))
        read(tree, n - 1, n)
        assert np.array_equal(scores(tree, n), expected)


def test_texts_are_drafted_together_as_alone(kind: str, tmp_path: Path) -> None:
    """Texts of different lengths, with few, many and no rows to read first: each gets the bits that it gets alone.

    A session of a text that the head does not know gets an empty chain, and each chain ends by its own probabilities.
    """
    lengths = [3, 20, 41, 70, 89, 20, 289]
    with followed(kind, tmp_path) as model:
        groups = []
        for _ in range(2):
            sessions = [model.session(320) for _ in (*lengths, 0)]
            for session, n in zip(sessions, lengths, strict=False):
                read(session, 0, n - 1)
                read(session, n - 1, n)
            groups.append(list(zip(sessions, [*lengths, 30], strict=True)))
        sure = sorted(chain(session, n, ChainRules(1)).sure[0] for session, n in groups[0][:-1])
        for rules in (
            ChainRules(6),
            ChainRules(3),
            ChainRules(6, least_path=sure[3]),
        ):  # from the second on all is read
            alone = [chain(session, n, rules) for session, n in groups[0]]
            assert drafted_together(groups[1], rules) == alone
            assert alone[-1].tokens == ()
            n_drafted = {len(each.tokens) for each in alone[:-1]}
            if not rules.least_path:
                assert n_drafted == {min(rules.n_max, len(scores(*groups[0][0])))}
        assert len(n_drafted | {0}) > 2  # chains that ended while others went on
        for session, n in groups[1][:-1]:  # and the states go on from there
            read(session, n, n + 1)
            assert np.array_equal(scores(session, n + 1), fresh(model, n + 1))


def test_forks_and_saved_states_carry_the_head(kind: str, tmp_path: Path) -> None:
    """A fork, and a session restored from bytes, draft what the first session drafts; so they do after more text."""
    with followed(kind, tmp_path) as model:
        session, other = model.session(200), model.session(200)
        read(session, 0, 40)
        fork, data = session.fork(), session.save()
        other.load(data, 40)
        expected = fresh(model, 40)
        for one in (session, fork, other):
            assert np.array_equal(scores(one, 40), expected)
            read(one, 40, 60)
            assert np.array_equal(scores(one, 60), fresh(model, 60))


def test_a_state_without_the_head_begins_anew(kind: str, tmp_path: Path) -> None:
    """Saved with a head, a text is restored without one, and the other way round: drafts then begin with new text."""
    with followed(kind, tmp_path) as model, Cpu().load(tmp_path / "m.gguf", LoadOptions(n_ctx=320)) as plain:
        with_head, without, restored = model.session(200), plain.session(200), model.session(200)
        read(with_head, 0, 40)
        read(without, 0, 40)
        plain.session(200).load(with_head.save(), 40)
        restored.load(without.save(), 40)
        assert head_of(restored).begin(40, int(TEXT[40])) is None
        assert chain(restored, 40, ChainRules(2)).tokens == ()
        read(restored, 40, 42)
        assert len(scores(restored, 42)) == len(scores(with_head, 40))
        for damaged in (without.save()[:-1], without.save() + b"x"):
            with pytest.raises(ModelFormatError):
                restored.load(damaged, 40)


def test_a_head_rests_when_told_to(kind: str, tmp_path: Path) -> None:
    """A head at rest drafts nothing and reads nothing; it goes on with what comes after follow(); freed, it is gone."""
    with followed(kind, tmp_path) as model:
        session = model.session(200)
        read(session, 0, 20)
        head = head_of(session)
        head.rest()
        read(session, 20, 30)
        assert chain(session, 30, ChainRules(3)).tokens == ()
        assert head.begin(30, int(TEXT[30])) is None
        assert head.read_s == 0.0
        head.follow()
        assert chain(session, 30, ChainRules(3)).tokens == ()
        read(session, 30, 60)
        assert len(scores(session, 60)) == len(fresh(model, 60))
        head.let_go()
        assert head.gone
        assert head.begin(60, int(TEXT[60])) is None


def test_a_closed_session_drafts_nothing(kind: str, tmp_path: Path) -> None:
    with followed(kind, tmp_path) as model:
        session = model.session(200)
        head = head_of(session)
        session.close()
        with pytest.raises(SessionError):
            head.chain(1, 1, ChainRules(2))
