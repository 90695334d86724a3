"""A head beside another library's target drafts, bit for bit, what it drafts beside the cpu runtime's own.

The hidden states are those of the cpu runtime, whose rows have the same bits in any forward. Then, what the native
interface refuses of a head that drafts blocks.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.heads.followed import NORMED, TRAINED_FLOATS, TRAINED_INTEGERS
from support.heads.loaded_blocks import FLOATS, INTEGERS, TEXT, loaded, of_floats, of_integers
from support.heads.tiny_blocks import tiny_block
from support.heads.tiny_heads import TinyHead, write_head
from support.models.tiny_models import N_VOCAB
from support.models.tiny_quantized import Tiny, write_tiny

from edgedec.errors import SessionError, StorageError, UnsupportedModelError
from edgedec.gguf.file import GGUF, read_gguf
from edgedec.head_state import ChainRules, HeadState
from edgedec.load_options import LoadOptions
from edgedec.logit_ops import NUMPY_ROW_OPS
from edgedec_export.target_rows import EMBEDDING, read_rows
from edgedec_runtimes.cpu.draft_head.beside import Borrowed, HeadBeside, TextBeside
from edgedec_runtimes.cpu.draft_head.memory import require_runnable
from edgedec_runtimes.cpu.draft_head.parts import native_config
from edgedec_runtimes.cpu.draft_head.weights import borrowed_rows
from edgedec_runtimes.cpu.library import INVALID, address, last_error, native
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.trained_heads.card import HeadCard
from edgedec_runtimes.trained_heads.head import Head, HeadTensor
from edgedec_runtimes.trained_heads.load import load_head
from edgedec_runtimes.trained_heads.target import Fitted, fit

pytestmark = pytest.mark.slow


SCALED = Tiny("gemma3", n_layer=6, n_head=2, n_head_kv=1, head_dim=128, tied=True, types=("Q4_0",))
KINDS = {
    "floats": (FLOATS, TRAINED_FLOATS),
    "integers": (INTEGERS, TRAINED_INTEGERS),
    "normed": (INTEGERS, NORMED),
    "scaled embeddings": (SCALED, TRAINED_INTEGERS),
    "own matrices": (FLOATS, replace(TRAINED_FLOATS, own_embedding=True, own_output=True)),
}
N = 90
RULES = ChainRules(4)

States = NDArray[np.float32]


def lent(gguf: GGUF, **changes: object) -> Borrowed:
    """Return what a model's file lends a head."""
    n_embd, n_vocab = gguf.tensors["token_embd.weight"].shape
    n_layer = sum(name.endswith("attn_norm.weight") for name in gguf.tensors)
    scale = float(np.sqrt(np.float32(n_embd))) if gguf.metadata["general.architecture"] == "gemma3" else 1.0
    rows = partial(read_rows, gguf, EMBEDDING)
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
    text = head.text(n_ctx)
    assert text is not None
    return text


def state_of(text: TextBeside) -> HeadState:
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
    with both(tmp_path, INTEGERS, TRAINED_INTEGERS) as (own, states, head):
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


def test_it_rests_and_is_freed(tmp_path: Path) -> None:
    """At rest it asks for no layers; freed, it follows no further text."""
    with both(tmp_path, INTEGERS, TRAINED_INTEGERS) as (_, states, head):
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
    with both(tmp_path, INTEGERS, TRAINED_INTEGERS) as (_, states, head):
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
    with both(tmp_path, INTEGERS, TRAINED_INTEGERS) as (own, states, _):
        works, rows = [False], partial(read_rows, read_gguf(tmp_path / "m.gguf"), EMBEDDING)

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
    write_head(tmp_path / "head", replace(TRAINED_INTEGERS, taps=(0, 2, 3)))
    write_tiny(tmp_path / "m.gguf", INTEGERS)
    with pytest.raises(UnsupportedModelError, match="reads what enters layer 0"):
        beside(tmp_path)


FLOAT_HEAD = tiny_block(of_floats({"markov": "gated", "rank": 6, "mask_token": 5, "embedding_scale": 2.0}))
SELECTING = tiny_block(
    of_floats({"shifted": False, "markov": "selector", "rank": 6, "top_k": 4, "conv_length": 2, "conv_group": 8})
)
INTEGER_HEAD = tiny_block(of_integers({"markov": "rnn", "rank": 32, "n_layer": 2, "confidence": True}))


def block_beside(path: Path, head: Head) -> HeadBeside:
    """Return a head beside a model whose text another library evaluates."""
    return HeadBeside(Fitted(head, ()), lent(read_gguf(path)), 2)


@pytest.mark.parametrize(("tiny", "head"), [(FLOATS, FLOAT_HEAD), (FLOATS, SELECTING), (INTEGERS, INTEGER_HEAD)])
def test_blocks_are_those_of_the_cpu_runtime(tiny: Tiny, head: Head, tmp_path: Path) -> None:
    """Chains and branches are equal, to the last bit, behind rows that were handed over in parts."""
    with loaded(tmp_path, tiny, head) as model:
        session = model.session(200)
        hidden = session.forward(TEXT[:N], n_past=0, taps=(1, 2, 3)).hidden
        states, own = np.stack([hidden[layer] for layer in (1, 2, 3)]), session.draft_head
        assert own is not None
        other = block_beside(tmp_path / "m.gguf", head)
        text = opened(other)
        for begin, end in ((0, 60), (60, 61), (61, N)):
            take(text, states, begin, end)
        state = state_of(text)
        assert state.chain(N, int(TEXT[N]), RULES) == own.chain(N, int(TEXT[N]), RULES)
        rows = []
        for one in (state, own):
            assert one.begin(N, int(TEXT[N])) is not None
            rows.append(one.branches([3, 4], [-1, -1], 2))
        assert np.array_equal(rows[0], rows[1])  # type: ignore[arg-type]
        text.close()
        other.close()


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"size": 129}, "its block's size is 129, expected at most 128"),
        ({"n_layer": 65}, "its block's n_layer is 65, expected at most 64"),
        ({"conv_length": 17}, "its block's conv_length is 17, expected at most 16"),
        ({"rank": 2**14 + 1}, "its block's rank is 16385, expected at most 16384"),
        ({"embedding_scale": 1e-60}, "embedding_scale is 1e-60, expected a positive number that float32 holds"),
        ({"logit_scale": 1e60}, "logit_scale is 1e.60, expected a positive number"),
        ({"softcap": 1e60}, "softcap is 1e.60, expected a positive number"),
    ],
)
def test_blocks_that_the_kernels_do_not_take_are_refused(block: dict[str, float], message: str) -> None:
    require_runnable(FLOAT_HEAD)
    assert FLOAT_HEAD.card.block is not None
    card = replace(FLOAT_HEAD.card, block=replace(FLOAT_HEAD.card.block, **block))  # type: ignore[arg-type]
    with pytest.raises(UnsupportedModelError, match=message):
        require_runnable(replace(FLOAT_HEAD, card=card))


@pytest.mark.parametrize(
    "changes",
    [
        {"block_size": -1},
        {"block_size": 129},
        {"block_size": 2**31 - 1},
        {"n_layer": 0},
        {"n_layer": 2**31 - 1},
        {"block_size": 0, "n_layer": 2},
        {"n_vocab": -1},
        {"n_embd": 2**30},
        {"n_head_kv": 0},
    ],
)
def test_the_native_interface_refuses_sizes(changes: dict[str, int], tmp_path: Path) -> None:
    """Before anything of that size is made."""
    other = block_beside(write_tiny(tmp_path / "m.gguf", FLOATS), FLOAT_HEAD)
    config, handle = native_config(FLOAT_HEAD.card), ctypes.c_void_p()
    for name, value in changes.items():
        setattr(config, name, value)
    ids = np.arange(N_VOCAB, dtype=np.int32)
    code = native().ec_draft_head_create(
        other._target, ctypes.byref(config), None, address(ids[2:5]), address(ids), None, ctypes.byref(handle)
    )
    assert code == INVALID
    assert last_error()
    other.close()


@pytest.mark.parametrize(
    "wrong",
    [
        *("markov_w1", "markov_w2", "markov_gate", "markov_gate_bias", "hidden_norm", "layers.0.k", "fc"),
        *("selector_predecessor", "selector_successor", "selector_hidden"),
        *("layers.0.attention_conv_base", "layers.0.mlp_conv_proj"),
    ],
)
def test_the_native_interface_refuses_tensors(wrong: str, tmp_path: Path) -> None:
    """A tensor of another shape, and one that is missing."""
    head = FLOAT_HEAD if wrong in FLOAT_HEAD.tensors else SELECTING
    path, tensors = write_tiny(tmp_path / "m.gguf", FLOATS), dict(head.tensors)
    tensor = tensors.pop(wrong)
    longer = {wrong: HeadTensor.of(np.concatenate([tensor.floats(), tensor.floats()]))}
    for found in (tensors, tensors | longer):
        with pytest.raises(SessionError):
            block_beside(path, replace(head, tensors=found))


def test_the_native_interface_refuses_what_a_head_does_not_use(tmp_path: Path) -> None:
    """A mask beside a mask token, a confidence of another length, sizes of convolutions, a window below 0."""
    path = write_tiny(tmp_path / "m.gguf", FLOATS)
    for name, n in (("mask", 48), ("confidence", 48), ("confidence_bias", 1)):
        extra = HeadTensor.of(np.ones(n, np.float32))
        with pytest.raises(SessionError):
            block_beside(path, replace(FLOAT_HEAD, tensors={**FLOAT_HEAD.tensors, name: extra}))
    shapes: list[dict[str, Any]] = [{"top_k": 0}, {"conv_group": 7}, {"conv_group": 0}, {"conv_length": -1}]
    for shape in shapes:
        assert SELECTING.card.block is not None
        block = replace(SELECTING.card.block, **shape)
        with pytest.raises(SessionError):
            block_beside(path, replace(SELECTING, card=replace(SELECTING.card, block=block)))
    card: HeadCard = of_floats({"windows": (-1,)})
    with pytest.raises(SessionError, match="window"):
        block_beside(path, tiny_block(card))
