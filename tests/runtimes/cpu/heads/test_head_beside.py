"""A head beside another library's target drafts, bit for bit, what it drafts beside the cpu runtime's own.

The hidden states are those of the cpu runtime, whose rows have the same bits in any forward.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from support.heads.tiny_heads import TinyHead, write_head
from support.models.tiny_models import N_VOCAB
from support.models.tiny_quantized import Tiny, write_tiny

from edgedec.errors import SessionError, StorageError, UnsupportedModelError
from edgedec.gguf.file import GGUF, read_gguf
from edgedec.head_state import ChainRules, HeadState
from edgedec.load_options import LoadOptions
from edgedec.logit_ops import NUMPY_ROW_OPS
from edgedec_export.target_rows import embedding_rows
from edgedec_runtimes.cpu.draft_head.beside import Borrowed, HeadBeside, TextBeside
from edgedec_runtimes.cpu.draft_head.weights import borrowed_rows
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.trained_heads.load import load_head
from edgedec_runtimes.trained_heads.target import fit

pytestmark = pytest.mark.slow

FLOATS = Tiny(n_layer=4, n_embd=48, n_head=4, n_head_kv=2, head_dim=16, n_ff=80)
INTEGERS = Tiny(n_layer=4, tied=True, types=("Q8_0",))
SCALED = Tiny("gemma3", n_layer=6, n_head=2, n_head_kv=1, head_dim=128, tied=True, types=("Q4_0",))
OF_FLOATS = TinyHead(
    n_embd=48, n_embd_target=48, n_ff=80, n_head=3, n_head_kv=1, head_dim=16, taps=(2, 3, 4), n_vocab_target=N_VOCAB
)
OF_INTEGERS = TinyHead(
    n_embd=256, n_embd_target=256, n_ff=128, n_head=4, n_head_kv=2, head_dim=64, taps=(2, 3, 4), n_vocab_target=N_VOCAB
)
NORMED = replace(OF_INTEGERS, fc_norm="each", feeds_back_normed=True, speculators=True)
OWN = replace(OF_FLOATS, own_embedding=True, own_output=True)
KINDS = {
    "floats": (FLOATS, OF_FLOATS),
    "integers": (INTEGERS, OF_INTEGERS),
    "normed": (INTEGERS, NORMED),
    "scaled embeddings": (SCALED, OF_INTEGERS),
    "own matrices": (FLOATS, OWN),
}
N = 90
TEXT = np.random.default_rng(3).integers(0, N_VOCAB, N + 1, dtype=np.int32)
RULES = ChainRules(4)

States = NDArray[np.float32]


def lent(gguf: GGUF, **changes: object) -> Borrowed:
    """Return what a model's file lends a head."""
    n_embd, n_vocab = gguf.tensors["token_embd.weight"].shape
    n_layer = sum(name.endswith("attn_norm.weight") for name in gguf.tensors)
    scale = float(np.sqrt(np.float32(n_embd))) if gguf.metadata["general.architecture"] == "gemma3" else 1.0
    rows = embedding_rows(gguf)
    target = Borrowed(n_vocab, n_embd, n_layer, scale, rows, lambda ids: borrowed_rows(gguf, ids), 1000, lambda: None)
    return replace(target, **changes)  # type: ignore[arg-type]


@contextmanager
def both(folder: Path, tiny: Tiny, head: TinyHead) -> Iterator[tuple[HeadState, States, HeadBeside]]:
    """Yield the cpu runtime's own head behind TEXT[:N], the states that it read, f32[n_taps, N, n_embd], and another.

    The other is the same head beside the same target.
    """
    write_head(folder / "head", head)
    path = write_tiny(folder / "m.gguf", tiny)
    with Cpu().load(path, LoadOptions(n_ctx=256, draft_head=folder / "head")) as model:
        session, layers = model.session(200), tuple(tap - 1 for tap in head.taps)
        hidden = session.forward(TEXT[:N], n_past=0, taps=layers).hidden
        assert session.draft_head is not None
        yield session.draft_head, np.stack([hidden[layer] for layer in layers]), beside(folder)


def beside(folder: Path, **changes: object) -> HeadBeside:
    """Return the head of a folder beside the model of that folder."""
    gguf = read_gguf(folder / "m.gguf")
    return HeadBeside(fit(load_head(folder / "head"), gguf), lent(gguf, **changes), 2)


def opened(head: HeadBeside, n_ctx: int = 200) -> TextBeside:
    """Return an empty text."""
    text = head.text(n_ctx)
    assert text is not None
    return text


def state_of(text: TextBeside) -> HeadState:
    """Return the head's state of a text."""
    return text.state(nullcontext, NUMPY_ROW_OPS)


def take(text: TextBeside, states: States, begin: int, end: int) -> None:
    """Hand over rows [begin, end) of the text, as a part of a prompt."""
    text.take(begin, TEXT[begin:end], states[:, begin:end], n_wanted=1, is_tree=False)


@pytest.mark.parametrize("kind", KINDS)
def test_it_drafts_what_the_cpu_runtime_drafts(kind: str, tmp_path: Path) -> None:
    """Chains and scores are equal, to the last bit."""
    with both(tmp_path, *KINDS[kind]) as (own, states, head):
        text = opened(head)
        take(text, states, 0, 60)
        take(text, states, 60, N)
        found = state_of(text)
        assert text.layers == (1, 2, 3)
        assert found.chain(N, int(TEXT[N]), RULES) == own.chain(N, int(TEXT[N]), RULES)
        for state in (found, own):
            assert state.begin(N, int(TEXT[N])) is not None
        following = int(own.token_ids[7])
        mine, its = found.next(following), own.next(following)
        assert mine is not None
        assert its is not None
        assert np.array_equal(mine, its)
        text.close()
        head.close()


def test_how_rows_are_handed_over_changes_nothing(tmp_path: Path) -> None:
    """One by one; with rejected drafts; and with trees of which a path is kept."""
    with both(tmp_path, INTEGERS, OF_INTEGERS) as (own, states, head):
        expected = own.chain(N, int(TEXT[N]), RULES)
        slow, drafting, tree = (opened(head) for _ in range(3))
        for i in range(N):
            take(slow, states, i, i + 1)
        take(drafting, states, 0, 5)
        for i in range(5, N, 2):  # rows i and i + 1 stand, two drafted ones are wrong
            state_of(drafting).chain(i, int(TEXT[i]), RULES)
            tokens, rows = np.append(TEXT[i : i + 2], [5, 6]), states[:, [i, min(i + 1, N - 1), 3, 4]]
            drafting.take(i, tokens.astype(np.int32), rows, n_wanted=4, is_tree=False)
        take(tree, states, 0, 6)
        for i in range(6, N, 2):  # of two branches the second one is right
            tokens, rows = np.array([TEXT[i], 7, TEXT[i + 1]], np.int32), states[:, [i, 2, i + 1]]
            tree.take(i, tokens, rows, n_wanted=3, is_tree=True)
            tree.move(np.array([i, i + 2], np.int32), i)
        for text in (slow, drafting, tree):
            assert state_of(text).chain(N, int(TEXT[N]), RULES) == expected
            text.close()
        head.close()


def test_forks_and_saved_states_carry_it(tmp_path: Path) -> None:
    """So they do after more text, and a fork's parent may be closed first."""
    with both(tmp_path, INTEGERS, OF_INTEGERS) as (own, states, head):
        text, other = opened(head), opened(head)
        take(text, states, 0, 40)
        fork = text.fork(40)
        data = text.state(nullcontext, NUMPY_ROW_OPS).saved(40)
        text.close()
        other.state(nullcontext, NUMPY_ROW_OPS).restore(data, 40)
        for one in (fork, other):
            take(one, states, 40, N)
            assert state_of(one).chain(N, int(TEXT[N]), RULES) == own.chain(N, int(TEXT[N]), RULES)
            one.close()
        head.close()


def test_it_rests_and_is_freed(tmp_path: Path) -> None:
    """At rest it asks for no layers; freed, it follows no further text."""
    with both(tmp_path, INTEGERS, OF_INTEGERS) as (_, states, head):
        text = opened(head)
        take(text, states, 0, 40)
        state_of(text).rest()
        assert text.layers == ()
        text.take(40, TEXT[40:41], states[:0, :1], n_wanted=1, is_tree=False)
        assert state_of(text).chain(41, int(TEXT[41]), RULES).tokens == ()
        state_of(text).let_go()
        assert head.text(100) is None
        text.close()
        head.close()


def test_rows_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """Tokens that do not exist, rows beyond the session, and too few layers: nothing is read or written there."""
    with both(tmp_path, INTEGERS, OF_INTEGERS) as (_, states, head):
        text = opened(head, 50)
        for bad, rows, n_past in (
            (TEXT[:51], states[:, :51], 0),
            (TEXT[:2], states[:, :2], 49),
            (np.array([N_VOCAB], np.int32), states[:, :1], 0),
            (np.array([-1], np.int32), states[:, :1], 0),
            (TEXT[:1], states[:2, :1], 0),
            (TEXT[:1], states[:, :1], -1),
        ):
            with pytest.raises(SessionError):
                text.take(n_past, bad, rows, n_wanted=1, is_tree=False)
        take(text, states, 0, 40)
        assert state_of(text).chain(40, int(TEXT[40]), RULES).tokens
        text.close()
        head.close()


@pytest.mark.parametrize("error", [StorageError("the disk is gone"), KeyboardInterrupt()])
def test_what_keeps_embeddings_from_being_read_is_raised(error: BaseException, tmp_path: Path) -> None:
    """By the draft, Ctrl-C as well; once they can be read again, it is the draft that it would have been."""
    with both(tmp_path, INTEGERS, OF_INTEGERS) as (own, states, _):
        works, rows = [False], embedding_rows(read_gguf(tmp_path / "m.gguf"))

        def look_up(tokens: NDArray[np.int32]) -> NDArray[np.float32]:
            if not works[0]:
                raise error
            return rows(tokens)

        text = opened(beside(tmp_path, embeddings=look_up))
        text.take(0, TEXT[:20], states[:, :20], n_wanted=1, is_tree=False)
        with pytest.raises(type(error)):
            state_of(text).chain(20, int(TEXT[20]), RULES)
        works[0] = True
        take(text, states, 20, N)
        assert state_of(text).chain(N, int(TEXT[N]), RULES) == own.chain(N, int(TEXT[N]), RULES)


def test_what_enters_the_first_layer_is_not_put_out(tmp_path: Path) -> None:
    """A head that taps it is refused by name."""
    write_head(tmp_path / "head", replace(OF_INTEGERS, taps=(0, 2, 3)))
    write_tiny(tmp_path / "m.gguf", INTEGERS)
    with pytest.raises(UnsupportedModelError, match="reads what enters layer 0"):
        beside(tmp_path)
