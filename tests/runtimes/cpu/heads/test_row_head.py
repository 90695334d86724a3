"""Row heads: rows behind those of a forward draft in the target's own layers, and change no bit of the text."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from numpy.typing import NDArray
from support.heads.followed import head_of, read, scores
from support.heads.loaded_blocks import FLOATS, INTEGERS, TEXT
from support.heads.tiny_rows import TOKENS, arranged, check_texts, write_rows
from support.models.tiny_models import N_VOCAB, tiny_llama
from support.models.tiny_quantized import ARCHITECTURES, Tiny, write_tiny

from edgedec.errors import CancelledError, ModelFormatError, UnsupportedModelError
from edgedec.gguf.file import read_gguf
from edgedec.head_state import ChainRules
from edgedec.load_options import LoadOptions
from edgedec.model import ForwardItem, Model, RowGroup, Session, Span
from edgedec.progress import Progress
from edgedec_runtimes.cpu.draft_head.beside import tapped_layers
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.trained_heads.card import RowShape
from edgedec_runtimes.trained_heads.load import load_head
from edgedec_runtimes.trained_heads.row_places import Placed
from edgedec_runtimes.trained_heads.target import fit

pytestmark = pytest.mark.slow
N_ROWS = 3
SHAPES = {"transfer": RowShape(N_ROWS, 2), "prompts": RowShape(N_ROWS, 0)}
by_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


@contextmanager
def followed(folder: Path, shape: RowShape, tiny: Tiny = FLOATS, **options: Any) -> Iterator[Model]:
    """Load a tiny model that a random row head follows."""
    path = write_tiny(folder / "m.gguf", tiny)
    head = write_rows(folder / "rows.gguf", path, shape, tiny.n_embd, N_VOCAB)
    with Cpu().load(path, LoadOptions(n_ctx=320, draft_head=head, **options)) as model:
        yield model


def opened(model: Model) -> Session:
    """Return a session in which the head's rows stand where they promise most if they cost nothing."""
    session = model.session(320)
    assert arranged(session) is None
    return session


def expected(model: Model, folder: Path, shape: RowShape, n: int) -> NDArray[np.float32]:
    """Return f32[N_ROWS, n_listed], what rows draft behind TEXT[:n], by the seam of forwards."""
    plain, tensors = model.session(320), load_head(folder / "rows.gguf").tensors
    head_of(plain).rest()
    read(plain, 0, n - 1)
    taps = (shape.layer - 1,) if shape.layer else ()
    hidden = plain.forward(TEXT[n - 1 : n], n_past=n - 1, taps=taps).hidden
    if shape.layer:
        state = hidden[shape.layer - 1][0]
        vectors = tensors["rows_kept"].floats() * np.tile(state, N_ROWS) + tensors["rows"].floats() @ state
    else:
        vectors = tensors["rows_base"].floats()
    groups = (
        RowGroup(TEXT[n - 1 : n], sees=np.array([-1], np.int32)),
        RowGroup(
            vectors=vectors.reshape(N_ROWS, -1).astype(np.float32),
            span=Span(enter=shape.layer),
            sees=np.arange(N_ROWS, dtype=np.int32),
        ),
    )
    return plain.evaluate(ForwardItem(plain, n - 1, groups, rows="all")).logits[1:, TOKENS].copy()


@by_shape
def test_rows_draft_what_the_seam_of_forwards_gives_them(shape: RowShape, tmp_path: Path) -> None:
    """A head's rows are rows that enter its layer as a linear map of the state there, or as vectors."""
    with followed(tmp_path, shape) as model:
        session, n = opened(model), 20
        read(session, 0, n - 1)
        read(session, n - 1, n)
        assert_allclose(scores(session, n), expected(model, tmp_path, shape, n), rtol=1e-4, atol=1e-4)
        chain = head_of(session).chain(n, int(TEXT[n]), ChainRules(5))
        best = TOKENS[expected(model, tmp_path, shape, n).argmax(axis=1)]
        assert chain.tokens == tuple(best.tolist())
        branches = head_of(session).branches([5, 6, 7], [-1, -1, 0], 2)
        assert branches is not None
        assert_array_equal(branches, scores(session, n)[[1, 2]])
        assert head_of(session).branches([5, 6, 7, 8], [-1, -1, 0, 2], 1) is None, "no row stands so far behind"


@by_shape
@pytest.mark.parametrize("tiny", [FLOATS, INTEGERS], ids=["floats", "integers"])
def test_a_forward_with_rows_has_the_bits_of_one_without(shape: RowShape, tiny: Tiny, tmp_path: Path) -> None:
    """Of a chain, a tree with a kept branch, and rejected drafts; the head knows where the text goes on."""
    with followed(tmp_path, shape, tiny) as model:
        session, plain, n = opened(model), model.session(320), 30
        head_of(plain).rest()
        read(session, 0, n)
        read(plain, 0, n)
        wrong = (TEXT[n + 2 : n + 4] + 1) % N_VOCAB
        tree = np.array([TEXT[n], (TEXT[n + 1] + 1) % N_VOCAB, TEXT[n + 1]], np.int32)
        for tokens, parents in ((np.concatenate([TEXT[n : n + 2], wrong]), None), (tree, [-1, 0, 0])):
            above = None if parents is None else np.array(parents, np.int32)
            with_rows = session.forward(tokens, n_past=n, parents=above, rows="all")
            assert with_rows.shared is not None
            assert with_rows.shared.n_rows > len(tokens)
            assert_array_equal(with_rows.logits, plain.forward(tokens, n_past=n, parents=above, rows="all").logits)
            if above is not None:
                session.keep(np.array([0, 2], np.int32))
                plain.keep(np.array([0, 2], np.int32))
            known = head_of(session).begin(n + 1, int(TEXT[n + 1]))  # the draft's first token was rejected
            assert known is not None
            alone = opened(model)
            read(alone, 0, n)
            read(alone, n, n + 1)
            assert_array_equal(known, head_of(alone).begin(n + 1, int(TEXT[n + 1])))
        twin = session.fork()
        assert_array_equal(
            twin.forward(TEXT[n + 2 : n + 3], n_past=n + 2).logits,
            plain.forward(TEXT[n + 2 : n + 3], n_past=n + 2).logits,
        )


def test_what_the_head_does_not_know_is_not_drafted(tmp_path: Path) -> None:
    """Before a forward, behind another place, after a cancel, at the context's end, and where it rests."""
    shape = SHAPES["transfer"]
    with followed(tmp_path, shape) as model:
        session = opened(model)
        head = head_of(session)
        assert head.begin(0, 1) is None
        read(session, 0, 10)
        assert head.begin(7, 1) is None
        assert head.begin(10, 1) is not None

        def stop(progress: Progress) -> None:
            session.cancel()

        with pytest.raises(CancelledError):
            session.evaluate(ForwardItem(session, 0, (RowGroup(np.tile(TEXT, 2)[:310]),)), stop)
        assert head.begin(10, 1) is None
        read(session, 0, 299)
        last = np.arange(21, dtype=np.int32)
        assert session.forward(last, n_past=299, rows="all").logits.shape[0] == 21, "no room for further rows"
        assert head.begin(320, 1) is None
        head.rest()
        read(session, 0, 10)
        assert head.begin(10, 1) is None
        why = arranged(session, lambda n_rows: float(n_rows))
        assert why is not None, "rows that cost as much as steps bring nothing"
        assert "don't pay here" in why


@by_shape
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.9, "seed": 3}], ids=["greedy", "drawn"])
@pytest.mark.parametrize("more", [{}, {"kv_type": "q8_0"}, {"n_parallel": 2}], ids=["", "q8_0", "parallel"])
def test_texts_are_those_of_plain_decoding(
    shape: RowShape, sampling: dict[str, Any], more: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy and drawn, with a packed KV cache and with texts side by side, whatever rows cost here."""
    placed = Placed((3, 2, 1, 0), speed=2.0, extra=0.5)
    monkeypatch.setattr("edgedec_runtimes.cpu.draft_head.state.best_places", lambda *arguments: placed)
    model = tiny_llama(tmp_path / "m.gguf", n_layer=4, n_head=2, n_head_kv=1)
    head = write_rows(tmp_path / "rows.gguf", model, shape, 64, N_VOCAB)
    check_texts(model, head, sampling, more)


@pytest.mark.parametrize("name", ["qwen35", "lfm2", "gemma4"])
def test_models_whose_forwards_take_no_rows_are_refused_by_name(name: str, tmp_path: Path) -> None:
    """Layers with states, convolutions, and layers that read tokens."""
    tiny = ARCHITECTURES[name]
    path = write_tiny(tmp_path / "m.gguf", tiny)
    head = write_rows(tmp_path / "rows.gguf", path, RowShape(2, 1), tiny.n_embd, N_VOCAB)
    with pytest.raises(
        UnsupportedModelError, match="the draft head rows has rows of one forward pass different layers"
    ):
        Cpu().load(path, LoadOptions(n_ctx=64, draft_head=head))


def test_heads_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """A layer that the model does not have, another runtime, and files that contradict themselves."""
    model = write_tiny(tmp_path / "m.gguf", FLOATS)
    beyond = load_head(write_rows(tmp_path / "beyond.gguf", model, RowShape(1, 4), 48, N_VOCAB))
    with pytest.raises(UnsupportedModelError, match="its rows enter layer 4, but the model has 4 layers"):
        fit(beyond, read_gguf(model))
    with pytest.raises(UnsupportedModelError, match="which only the cpu runtime can do"):
        tapped_layers(beyond.card)
    narrow = write_rows(tmp_path / "narrow.gguf", model, RowShape(1, 2), 32, N_VOCAB)
    data = narrow.read_bytes()
    (tmp_path / "cut.gguf").write_bytes(data[:-100])
    with pytest.raises(UnsupportedModelError, match="its taps have 32 numbers"):
        fit(load_head(narrow), read_gguf(model))
    with pytest.raises(ModelFormatError):
        load_head(tmp_path / "cut.gguf")


def test_the_plan_holds_what_rows_take(tmp_path: Path) -> None:
    """The terms name the head and its rows, and no KV cache of its own."""
    with followed(tmp_path, SHAPES["transfer"]) as model:
        terms = {term.name: term for term in model.memory(320, 8)}
    assert terms["draft head"].n_bytes > 3 * 48 * 48 * 4
    assert "KV cache of the draft head" not in terms
    assert terms["rows of the draft head"].detail == "at most 12"
