"""Soft prompts: behind the embeddings of tokens a text is the one behind these tokens, and other files are refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.models.tiny_models import tiny_llama

import edgedec
from edgedec.api.options import Lossy
from edgedec.errors import CapabilityError, EdgedecError, ModelFormatError, OptionError, UnsupportedModelError
from edgedec.gguf.file import read_gguf
from edgedec.gguf.tensor_types import GGMLType
from edgedec_export.gguf_writer import OutTensor, write_gguf
from edgedec_export.target_rows import read_rows
from edgedec_methods.soft_prompt import SoftPrompt, SoftSession
from edgedec_runtimes.weights.soft_vectors import KIND, MOST_VECTORS, TARGET, TENSOR, tuned_model

N_CTX, SOFT, PROMPT = 128, [7, 90, 31, 8, 200], [1, *range(40, 60), *range(40, 60)]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 30, "ignore_end": True}
DRAWN: dict[str, Any] = {"temperature": 0.9, "seed": 3, "max_tokens": 30, "ignore_end": True}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama's file."""
    return tiny_llama(tmp_path_factory.mktemp("soft") / "tiny.gguf", n_layer=6, n_ctx_train=N_CTX)


def opened(path: Path, methods: dict[str, Any] | None = None, **changes: Any) -> edgedec.Engine:
    """Load the model on the cpu runtime."""
    lossy = Lossy(methods=methods, layer_skip=changes.pop("layer_skip", None), layer_skip_force=True)
    options: dict[str, Any] = {"draft": "off", "n_ctx": N_CTX, **changes}
    return edgedec.load(path, runtime="cpu", n_threads=1, lossy=lossy, **options)


def written(out: Path, vectors: Any, target: str, kind: str = KIND, name: str = TENSOR) -> Path:
    """Write a soft prompt."""
    data = np.asarray(vectors, np.float32)
    tensor = OutTensor(name, data.shape[::-1], GGMLType.F32, lambda: iter([data.tobytes()]))
    write_gguf(out, {"general.type": kind, TARGET: target}, [tensor])
    return out


def embeddings(path: Path) -> Any:
    """Return the embeddings of the tokens SOFT."""
    return read_rows(read_gguf(path), "token_embd.weight", np.array(SOFT, np.int32))


@pytest.mark.slow
@pytest.mark.parametrize("layer_skip", [None, 1.4], ids=["whole", "layers left out"])
def test_a_text_is_that_behind_the_tokens(path: Path, tmp_path: Path, layer_skip: float | None) -> None:
    """With drafts and beside other requests, too, and where the prompt is cached; what is drawn goes by the place."""
    with opened(path, layer_skip=layer_skip) as engine:
        card = engine.card
        target = tuned_model(card.architecture, card.n_layer, card.n_embd, card.n_vocab, card.variant)
        behind = engine.generate([*SOFT, *PROMPT], **GREEDY).token_ids
        assert behind != engine.generate(PROMPT, **GREEDY).token_ids, "the tokens make a difference"
    soft = {"soft_prompt": {"file": str(written(tmp_path / "soft.gguf", embeddings(path), target))}}
    texts = []
    for options in ({}, {"draft": "suffix"}, {"n_parallel": 2}):
        with opened(path, soft, layer_skip=layer_skip, **options) as engine:
            assert engine.n_ctx == N_CTX - len(SOFT)
            texts.append([engine.generate(PROMPT, **way).token_ids for way in (GREEDY, DRAWN, GREEDY)])
            assert texts[-1] == texts[0]
    assert texts[0][0] == texts[0][2] == behind


@pytest.mark.slow
def test_a_fork_goes_on_behind_the_vectors(path: Path, tmp_path: Path) -> None:
    """Its next row is the session's own."""
    with opened(path) as engine:
        row = np.array([9], np.int32)
        session = SoftSession(engine.model.session(N_CTX), embeddings(path))
        session.forward(np.array(PROMPT, np.int32), n_past=0)
        fork = session.fork()
        assert fork.n_cached == session.n_cached == len(PROMPT)
        rows = [each.forward(row, n_past=len(PROMPT)).logits.copy() for each in (session, fork)]
        assert (rows[0] == rows[1]).all()
        with pytest.raises(CapabilityError, match="can't be saved"):
            session.save()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"kind": "adapter"}, UnsupportedModelError, "general.type is 'adapter'"),
        ({"target": "llama 6x64 261"}, UnsupportedModelError, "tuned for 'llama 6x64 261'"),
        ({"name": "other"}, ModelFormatError, "shape None"),
        ({"vectors": np.zeros((5, 32))}, ModelFormatError, r"shape \(32, 5\), expected F32 of 64"),
        ({"vectors": np.zeros((MOST_VECTORS + 1, 64))}, ModelFormatError, "1025 vectors"),
        ({"vectors": np.full((2, 64), np.nan)}, ModelFormatError, "no number"),
        ({"vectors": np.zeros((N_CTX - 1, 64))}, EdgedecError, "no room behind 127 vectors"),
    ],
)
def test_what_does_not_fit_is_refused(
    path: Path, tmp_path: Path, change: dict[str, Any], error: type[EdgedecError], says: str
) -> None:
    """Before anything is read into the session."""
    parts = {"vectors": embeddings(path), "target": "llama 6x64 260"} | change
    file = written(tmp_path / "soft.gguf", **parts)
    with pytest.raises(error, match=says):
        opened(path, {"soft_prompt": {"file": str(file)}})


def test_a_file_must_be_named() -> None:
    """It is no option of the runtime."""
    with pytest.raises(OptionError, match="path of a soft prompt"):
        SoftPrompt()
