"""A head that drafts blocks beside another library's target, and what the native interface refuses of such a head."""

import ctypes
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.heads.loaded_blocks import FLOATS, INTEGERS, TEXT, loaded, of_floats, of_integers
from support.heads.tiny_blocks import tiny_block
from support.models.tiny_models import N_VOCAB
from support.models.tiny_quantized import Tiny, write_tiny

from edgedec.errors import SessionError, UnsupportedModelError
from edgedec.gguf.file import read_gguf
from edgedec.head_state import ChainRules
from edgedec.logit_ops import NUMPY_ROW_OPS
from edgedec_export.target_rows import embedding_rows
from edgedec_runtimes.cpu.draft_head.beside import Borrowed, HeadBeside
from edgedec_runtimes.cpu.draft_head.memory import require_runnable
from edgedec_runtimes.cpu.draft_head.parts import native_config
from edgedec_runtimes.cpu.draft_head.weights import borrowed_rows
from edgedec_runtimes.cpu.library import INVALID, address, last_error, native
from edgedec_runtimes.trained_heads.card import HeadCard
from edgedec_runtimes.trained_heads.head import Head, HeadTensor
from edgedec_runtimes.trained_heads.target import Fitted

pytestmark = pytest.mark.slow

N = 90
RULES = ChainRules(4)
FLOAT_HEAD = tiny_block(of_floats({"markov": "gated", "rank": 6, "mask_token": 5, "embedding_scale": 2.0}))
SELECTING = tiny_block(
    of_floats({"shifted": False, "markov": "selector", "rank": 6, "top_k": 4, "conv_length": 2, "conv_group": 8})
)
INTEGER_HEAD = tiny_block(of_integers({"markov": "rnn", "rank": 32, "n_layer": 2, "confidence": True}))


def beside(path: Path, head: Head) -> HeadBeside:
    """Return a head beside a model whose text another library evaluates."""
    gguf = read_gguf(path)
    rows = embedding_rows(gguf)
    n_embd, n_vocab = gguf.tensors["token_embd.weight"].shape
    target = Borrowed(n_vocab, n_embd, 4, 1.0, rows, lambda ids: borrowed_rows(gguf, ids), 1000, lambda: None)
    return HeadBeside(Fitted(head, ()), target, 2)


@pytest.mark.parametrize(("tiny", "head"), [(FLOATS, FLOAT_HEAD), (FLOATS, SELECTING), (INTEGERS, INTEGER_HEAD)])
def test_it_drafts_what_the_cpu_runtime_drafts(tiny: Tiny, head: Head, tmp_path: Path) -> None:
    """Chains and branches are equal, to the last bit, behind rows that were handed over in parts."""
    with loaded(tmp_path, tiny, head) as model:
        session = model.session(200)
        hidden = session.forward(TEXT[:N], n_past=0, taps=(1, 2, 3)).hidden
        states, own = np.stack([hidden[layer] for layer in (1, 2, 3)]), session.draft_head
        assert own is not None
        other = beside(tmp_path / "m.gguf", head)
        text = other.text(200)
        assert text is not None
        for begin, end in ((0, 60), (60, 61), (61, N)):
            text.take(begin, TEXT[begin:end], states[:, begin:end], n_wanted=1, is_tree=False)
        state = text.state(nullcontext, NUMPY_ROW_OPS)
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
    """Each size and each factor by name."""
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
    other = beside(write_tiny(tmp_path / "m.gguf", FLOATS), FLOAT_HEAD)
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
            beside(path, replace(head, tensors=found))


def test_the_native_interface_refuses_what_a_head_does_not_use(tmp_path: Path) -> None:
    """A mask beside a mask token, a confidence of another length, sizes of convolutions, a window below 0."""
    path = write_tiny(tmp_path / "m.gguf", FLOATS)
    for name, n in (("mask", 48), ("confidence", 48), ("confidence_bias", 1)):
        extra = HeadTensor.of(np.ones(n, np.float32))
        with pytest.raises(SessionError):
            beside(path, replace(FLOAT_HEAD, tensors={**FLOAT_HEAD.tensors, name: extra}))
    shapes: list[dict[str, Any]] = [{"top_k": 0}, {"conv_group": 7}, {"conv_group": 0}, {"conv_length": -1}]
    for shape in shapes:
        assert SELECTING.card.block is not None
        block = replace(SELECTING.card.block, **shape)
        with pytest.raises(SessionError):
            beside(path, replace(SELECTING, card=replace(SELECTING.card, block=block)))
    card: HeadCard = of_floats({"windows": (-1,)})
    with pytest.raises(SessionError, match="window"):
        beside(path, tiny_block(card))
