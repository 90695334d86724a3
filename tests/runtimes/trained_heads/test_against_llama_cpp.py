"""llama.cpp runs the files that edgedec writes, and its drafts are those of the numpy head."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.heads.reference_head import ReferenceHead
from support.heads.tiny_heads import TinyHead, write_head
from support.models.tiny_models import tiny_llama

from edgedec.gguf.file import read_gguf
from edgedec_export.head_to_gguf import write_head_gguf
from edgedec_export.target_rows import embedding_rows, output_name, read_rows
from edgedec_runtimes.trained_heads.load import load_head

pytest.importorskip("llama_cpp", reason="llama-cpp-python, of the extra `llamacpp`, is not installed")

from support.heads.llama_head import LlamaHead

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not LlamaHead.available(), reason="the library has no names as gcc gives them"),
]

SIZES: dict[str, Any] = {"n_embd": 64, "n_embd_target": 64, "head_dim": 16, "taps": (2, 3, 4), "n_vocab_target": 260}
N_TEXT = 8


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("change", "own_output"),
    [
        ({}, False),
        ({}, True),
        ({"norm_before_residual": True, "fc_norm": "joined"}, True),
        ({"own_embedding": True, "own_output": True}, False),
        ({"config": {"rope_scaling": {"type": "linear", "factor": 4.0}}, "n_head": 2, "n_head_kv": 1}, True),
    ],
)
def test_llama_cpp_computes_the_same(tmp_path: Path, change: dict[str, Any], own_output: bool, tied: bool) -> None:
    """Features, states and logits of a text and of a chain of four agree; so do the drafted tokens."""
    target_path = tiny_llama(tmp_path / "target.gguf", n_layer=6, tied=tied)
    target = read_gguf(target_path)
    write_head(tmp_path / "head", TinyHead(**SIZES | change))
    source = load_head(tmp_path / "head")
    path = write_head_gguf(source, target, tmp_path / "head.gguf", types="F32", own_output=own_output)
    head = load_head(path)
    rows = head.tensors["output"].floats() if head.card.own_output else read_rows(target, output_name(target), head.d2t)
    own = head.tensors["embedding"].floats() if head.card.own_embedding else None
    reference = ReferenceHead(head, embedding_rows(target) if own is None else lambda tokens: own[tokens], rows)
    rng = np.random.default_rng(5)
    taps = rng.standard_normal((N_TEXT - 1, 192)).astype(np.float32)
    text = rng.integers(0, 260, N_TEXT).tolist()
    reference.absorb(taps)
    drafted, expected = reference.draft(text, 4)
    borrows = not (head.card.own_output and head.card.own_embedding)
    with LlamaHead(path, target_path if borrows else None) as theirs:
        features = theirs.fuse(taps)
        np.testing.assert_allclose(features, reference.features, rtol=0, atol=2e-4 * np.abs(features).max())
        tokens, states = text[1:], features
        for i in range(4):
            position = 0 if i == 0 else N_TEXT - 2 + i
            logits, states = theirs.step(tokens, states, position)
            np.testing.assert_allclose(
                logits[-1, head.d2t], expected[i], rtol=0, atol=1e-3 * np.abs(expected).max(), err_msg=f"token {i}"
            )
            assert int(head.d2t[logits[-1, head.d2t].argmax()]) == drafted[i]
            tokens, states = [drafted[i]], states[-1:]
