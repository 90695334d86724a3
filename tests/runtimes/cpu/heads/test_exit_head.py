"""Exit heads: drafts leave the target behind its first layers, and the verification goes on from there."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from numpy.typing import NDArray
from support.heads.followed import EXPERTS, exiting, head_of, read
from support.heads.loaded_blocks import FLOATS, TEXT
from support.heads.tiny_rows import TOKENS, check_texts, write_exit
from support.models.tiny_models import N_VOCAB, tiny_llama
from support.models.tiny_quantized import ARCHITECTURES, write_tiny

from edgedec.errors import UnsupportedModelError
from edgedec.gguf.file import read_gguf
from edgedec.load_options import LoadOptions
from edgedec.model import Model, Session
from edgedec_runtimes.cpu.draft_head.beside import tapped_layers
from edgedec_runtimes.cpu.library import address, native
from edgedec_runtimes.cpu.model import CpuModel
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.trained_heads.load import load_head
from edgedec_runtimes.trained_heads.target import fit

pytestmark = pytest.mark.slow
LAYER = 2


def plain_session(model: Model) -> Session:
    """Return a session that no head follows."""
    session = model.session(320)
    head_of(session).rest()
    return session


def behind(model: Model, folder: Path, n: int) -> NDArray[np.float32]:
    """Return f32[n_listed], what the head scores behind TEXT[:n], row by row as the formulas say."""
    head, tap = load_head(folder / "exit.gguf"), LAYER - 1
    states = plain_session(model).forward(TEXT[:n], n_past=0, taps=(tap,)).hidden[tap].astype(np.float64)
    w = {name: tensor.floats().astype(np.float64) for name, tensor in head.tensors.items()}
    dim, epsilon = head.card.head_dim, head.card.rms_epsilon

    def normed(x: NDArray[np.float64], weight: NDArray[np.float64]) -> NDArray[np.float64]:
        result: NDArray[np.float64] = x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * weight
        return result

    def turned(x: NDArray[np.float64]) -> NDArray[np.float64]:
        angles = np.arange(n)[:, None] * head.card.rope_base ** (-np.arange(0, dim, 2) / dim)
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate(
            [a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], axis=-1
        )

    x = normed(states, w["input_norm"])
    keys, values = turned(x @ w["k"].T), x @ w["v"].T
    mixed = []
    for query in np.split(x @ w["q"].T, head.card.n_head, axis=1):
        logits = turned(query)[-1] @ keys.T / np.sqrt(dim)
        shares = np.exp(logits - logits.max())
        mixed.append(shares / shares.sum() @ values)
    out = normed(states[-1] + w["o"] @ np.concatenate(mixed), w["output_norm"])
    rows = read_gguf(folder / "m.gguf").read_tensor_bytes("output.weight")
    matrix = np.frombuffer(rows, np.float32).reshape(N_VOCAB, -1)[TOKENS]
    scored: NDArray[np.float32] = (matrix @ out).astype(np.float32)
    return scored


def test_a_head_scores_what_its_formulas_say(tmp_path: Path) -> None:
    """The target's first layers, attention over what leaves them, and the target's output rows behind a norm."""
    with exiting(tmp_path) as model:
        session, n = model.session(320), 20
        read(session, 0, n - 1)
        for i in range(n - 1, n + 2):
            token = int(TEXT[i])
            row = head_of(session).begin(i, token) if i < n else head_of(session).next(token)
            assert row is not None
            assert abs(row - behind(model, tmp_path, i + 1)).max() < 2e-3


def test_verification_enters_behind_the_layers_that_the_draft_passed(tmp_path: Path) -> None:
    """Of a chain that was drafted, only the last token's row passes the layers below; of another one, all rows do."""
    path = write_tiny(tmp_path / "m.gguf", EXPERTS)
    head = write_exit(tmp_path / "exit.gguf", path, 1, EXPERTS.n_embd, N_VOCAB)
    with Cpu().load(path, LoadOptions(n_ctx=320, draft_head=head)) as model:
        assert isinstance(model, CpuModel)

        def layers_by_rows(tokens: list[int], drafted: bool) -> tuple[list[int], NDArray[np.float32]]:
            """Return how many layers a forward over tokens had 0, 1, ... rows in, and its logits."""
            session = model.session(320)
            read(session, 0, 12)
            if drafted:
                head_of(session).begin(12, tokens[0])
                for token in tokens[1:-1]:
                    head_of(session).next(token)
            before, after = np.zeros((2, 257), np.uint64), np.zeros((2, 257), np.uint64)
            native().ec_model_experts(model.handle, address(before[0]), address(before[1]))
            logits = session.forward(np.array(tokens, np.int32), n_past=12, rows="all").logits.copy()
            native().ec_model_experts(model.handle, address(after[0]), address(after[1]))
            return (after[0] - before[0])[:6].tolist(), logits

        tokens = [7, 9, 4, 30]
        entered, logits = layers_by_rows(tokens, True)
        whole, expected = layers_by_rows(tokens, False)
    assert (entered, whole) == ([0, 1, 0, 0, 1, 0], [0, 0, 0, 0, 2, 0])
    assert_array_equal(logits, expected)


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.9, "seed": 3}], ids=["greedy", "drawn"])
@pytest.mark.parametrize("more", [{}, {"kv_type": "q8_0"}, {"n_parallel": 2}], ids=["", "q8_0", "parallel"])
def test_texts_are_those_of_plain_decoding(sampling: dict[str, Any], more: dict[str, Any], tmp_path: Path) -> None:
    """Greedy and drawn, with a packed KV cache and with texts side by side."""
    model = tiny_llama(tmp_path / "m.gguf", n_layer=4, n_head=2, n_head_kv=1)
    head = write_exit(tmp_path / "exit.gguf", model, LAYER, 64, N_VOCAB, n_head=4)
    check_texts(model, head, sampling, more)


@pytest.mark.parametrize("name", ["qwen35", "lfm2", "gemma4"])
def test_models_whose_rows_must_pass_the_same_layers_are_refused(name: str, tmp_path: Path) -> None:
    """Layers with states, convolutions, and layers that read tokens."""
    tiny = ARCHITECTURES[name]
    path = write_tiny(tmp_path / "m.gguf", tiny)
    head = write_exit(tmp_path / "exit.gguf", path, 1, tiny.n_embd, N_VOCAB)
    with pytest.raises(
        UnsupportedModelError, match="the draft head exit has rows of one forward pass different layers"
    ):
        Cpu().load(path, LoadOptions(n_ctx=64, draft_head=head))


def test_heads_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """An exit behind the last layer, and another runtime."""
    model = write_tiny(tmp_path / "m.gguf", FLOATS)
    beyond = load_head(write_exit(tmp_path / "beyond.gguf", model, 4, 48, N_VOCAB))
    with pytest.raises(UnsupportedModelError, match="it leaves the model behind layer 4, but the model has 4 layers"):
        fit(beyond, read_gguf(model))
    with pytest.raises(UnsupportedModelError, match="which only the cpu runtime can do"):
        tapped_layers(beyond.card)
