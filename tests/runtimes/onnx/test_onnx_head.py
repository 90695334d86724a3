"""A draft head on the onnx runtime: what it borrows is the export's, and its state goes with the session."""

import re
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from support.conformance.runtime import check_runtime
from support.heads.followed import TRAINED_INTEGERS as HEAD
from support.heads.followed import head_of
from support.heads.loaded_blocks import of_integers
from support.heads.tiny_blocks import tiny_block, write_block
from support.heads.tiny_heads import TinyHead, write_head
from support.models.onnx_exports import Exported, Exporter, copied, load, rewritten
from support.models.tiny_models import N_VOCAB
from support.models.tiny_quantized import Tiny, write_tiny

from edgedec.api.load import asked_plan
from edgedec.api.options import LIBRARY, EngineOptions
from edgedec.api.plan import find_model
from edgedec.drafters.head import HeadDrafter
from edgedec.errors import EdgedecError, ModelFormatError, UnsupportedModelError
from edgedec.gguf.file import read_gguf
from edgedec.head_state import ChainRules
from edgedec.load_options import LoadOptions
from edgedec.load_plan import LoadPlan
from edgedec.model import Model, Session
from edgedec.testing import check_drafter, raise_failures
from edgedec_export.target_rows import read_rows
from edgedec_models.draft_heads import HEADS
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.onnx.exported import read_export
from edgedec_runtimes.onnx.graph_parts import read_parts
from edgedec_runtimes.onnx.matrix_rows import EMBEDDING, OUTPUT, open_matrix
from edgedec_runtimes.onnx.model import OnnxModel, OnnxSession
from edgedec_runtimes.onnx.runtime import Onnx
from edgedec_runtimes.trained_heads.record import RECORD_FILE, record_text
from edgedec_runtimes.trained_heads.target import target_of

pytestmark = pytest.mark.slow

TEXT = np.random.default_rng(3).integers(0, N_VOCAB, 201, dtype=np.int32)
RULES = ChainRules(4)
TYPES = ("F32", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")


@pytest.fixture
def model(exported: Exporter) -> Exported:
    """Return a tiny model with four layers."""
    return exported(types=("Q8_0",), n_layer=4)


@contextmanager
def loaded(model: Exported, tmp_path: Path, head: TinyHead = HEAD) -> Iterator[OnnxModel]:
    """Load an export that a tiny head follows."""
    write_head(tmp_path / "head", head)
    with load(model.folder, draft_head=tmp_path / "head", n_ctx=200) as found:
        assert isinstance(found, OnnxModel)
        yield found


def give(session: Session, states: Mapping[int, NDArray[np.float32]], n: int) -> None:
    """Hand the head of a session the states of the first n tokens that a forward returned."""
    assert isinstance(session, OnnxSession)
    assert session.text is not None
    session.text.take(0, TEXT[:n], np.stack([states[layer] for layer in (1, 2, 3)]), n_wanted=1, is_tree=False)


def drafted(session: Session, n: int) -> tuple[float, ...]:
    """Return tokens and probabilities of the chain behind TEXT[: n + 1], of which the session holds n tokens."""
    chain = head_of(session).chain(n, int(TEXT[n]), RULES)
    assert chain.tokens
    return (*chain.tokens, *chain.p)


def test_it_conforms(model: Exported, tmp_path: Path) -> None:
    """The runtime with a head that follows every session, and the drafter on it."""
    write_head(tmp_path / "head", HEAD)

    def load_both() -> Model:
        return load(model.folder, draft_head=tmp_path / "head")

    raise_failures(check_runtime(load_both))
    raise_failures(check_drafter(HeadDrafter, load_both))


@pytest.mark.parametrize("quant", ["exact", "balanced", "small"])
@pytest.mark.parametrize("kind", TYPES)
def test_rows_are_those_of_the_weights(kind: str, quant: str, tmp_path: Path) -> None:
    """Rows of embedding and output matrix have the bits of what was exported, and of the GGUF where that is exact."""
    pytest.importorskip("onnx")
    from edgedec_export.packing.weights import Packed, dequantize
    from edgedec_export.quantizing import quantize
    from edgedec_export.to_onnx import export_onnx

    gguf = read_gguf(write_tiny(tmp_path / "m.gguf", Tiny(types=(kind,), n_layer=1)))
    export = read_export(export_onnx(gguf.paths[0], tmp_path / "exported", quant=quant))
    parts, rows = read_parts(export, (EMBEDDING, OUTPUT)), np.array([0, 5, N_VOCAB - 1, 5], np.int32)
    for name in (EMBEDDING, OUTPUT):
        packed = quantize(gguf, name, quant).matrix  # type: ignore[arg-type]
        matrix = open_matrix(export, parts, name)
        found = matrix.read(rows)
        assert np.array_equal(found, (dequantize(packed) if isinstance(packed, Packed) else packed)[rows])
        assert quant != "exact" or np.array_equal(found, read_rows(gguf, name, rows))
        with pytest.raises(ModelFormatError, match=f"row {N_VOCAB}"):
            matrix.read(np.array([N_VOCAB], np.int32))
        matrix.close()


@pytest.mark.parametrize(
    ("name", "types", "changes"),
    [("llama", ("Q8_0",), {"n_layer": 4}), ("llama3", ("Q6_K",), {"n_layer": 4}), ("gemma3", ("Q5_1",), {})],
)
def test_it_drafts_what_the_cpu_runtime_drafts(
    exported: Exporter, name: str, types: tuple[str, ...], changes: dict[str, int], tmp_path: Path
) -> None:
    """Given the same hidden states, bit for bit: with an output matrix, without one, and with scaled embeddings."""
    model, n = exported(name, types, **changes), 80
    with (
        loaded(model, tmp_path) as ours,
        Cpu().load(model.gguf, LoadOptions(n_ctx=200, draft_head=tmp_path / "head")) as theirs,
    ):
        other, session = theirs.session(100), ours.session(100)
        give(session, other.forward(TEXT[:n], n_past=0, taps=(1, 2, 3)).hidden, n)
        assert drafted(session, n) == drafted(other, n)


def test_a_head_that_drafts_blocks_follows_a_graph(model: Exported, tmp_path: Path) -> None:
    """Behind a prompt, a rejected draft and a fork it drafts what it drafts beside the cpu runtime's model."""
    card = of_integers({"n_layer": 2, "markov": "vanilla", "rank": 32, "confidence": True})
    write_block(tmp_path / "head", tiny_block(card))
    with (
        load(model.folder, draft_head=tmp_path / "head", n_ctx=200) as ours,
        Cpu().load(model.gguf, LoadOptions(n_ctx=200, draft_head=tmp_path / "head")) as theirs,
    ):
        assert isinstance(ours, OnnxModel)
        other, session, by_hand = theirs.session(100), ours.session(100), ours.session(100)
        give(by_hand, other.forward(TEXT[:80], n_past=0, taps=(1, 2, 3)).hidden, 80)
        assert head_of(by_hand).chain(80, int(TEXT[80]), RULES) == head_of(other).chain(80, int(TEXT[80]), RULES)
        session.forward(TEXT[:60], n_past=0)
        drafted(session, 60)
        session.forward(np.append(TEXT[60:62], [5, 6]).astype(np.int32), n_past=60, rows="all")
        fork = session.fork()
        fork.forward(TEXT[62:63], n_past=62)
        session.forward(TEXT[62:80], n_past=62)
        whole = ours.session(100)
        whole.forward(TEXT[:63], n_past=0)
        assert drafted(fork, 63) == drafted(whole, 63)
        whole.forward(TEXT[63:80], n_past=63)
        assert drafted(session, 80) == drafted(whole, 80)


def test_it_reads_what_the_graph_returns(model: Exported, tmp_path: Path) -> None:
    """Behind a long prompt, with the caller's own taps or without: the states that reach the head are the graph's."""
    n = 150
    with loaded(model, tmp_path) as found:
        tapped, plain, by_hand = (found.session(200) for _ in range(3))
        hidden = tapped.forward(TEXT[:n], n_past=0, taps=(0, 2)).hidden
        plain.forward(TEXT[:n], n_past=0)
        give(by_hand, {**hidden, **found.session(200).forward(TEXT[:n], n_past=0, taps=(1, 2, 3)).hidden}, n)
        assert drafted(tapped, n) == drafted(plain, n) == drafted(by_hand, n)


def test_a_rejected_draft_and_a_path_that_is_kept_leave_what_stands(model: Exported, tmp_path: Path) -> None:
    """The head knows the rows that were kept, by the states of the forward that evaluated them."""
    with loaded(model, tmp_path) as found:
        session, by_hand = found.session(200), found.session(200)
        hidden = session.forward(TEXT[:20], n_past=0, taps=(1, 2, 3)).hidden
        states = {layer: [rows.copy()] for layer, rows in hidden.items()}
        drafted(session, 20)
        wrong = np.concatenate([TEXT[20:22], (TEXT[22:24] + 1) % N_VOCAB])
        for layer, rows in session.forward(wrong, n_past=20, rows="all", taps=(1, 2, 3)).hidden.items():
            states[layer].append(rows[:2].copy())
        tokens, parents = np.array([TEXT[22], 7, TEXT[23]], np.int32), np.array([-1, 0, 0], np.int32)
        tree = session.forward(tokens, n_past=22, parents=parents, rows="all", taps=(1, 2, 3))
        for layer, rows in tree.hidden.items():
            states[layer].append(rows[[0, 2]])
        session.keep(np.array([0, 2], np.int32))
        give(by_hand, {layer: np.concatenate(rows) for layer, rows in states.items()}, 24)
        assert drafted(session, 24) == drafted(by_hand, 24)


def test_forks_and_saved_states_carry_the_head(model: Exported, tmp_path: Path) -> None:
    """A fork, and a session restored from bytes, draft what the first one drafts; so they do after more text.

    Saved without a head, a text is restored all the same, and drafts begin with new text.
    """
    with loaded(model, tmp_path) as found, load(model.folder) as plain:
        session, other = found.session(200), found.session(200)
        session.forward(TEXT[:40], n_past=0)
        fork, data = session.fork(), session.save()
        other.load(data, 40)
        expected = drafted(session, 40)
        session.forward(TEXT[40:60], n_past=40)
        for one in (fork, other):
            assert drafted(one, 40) == expected
            one.forward(TEXT[40:60], n_past=40)
            assert drafted(one, 60) == drafted(session, 60)
        session.close()
        assert drafted(fork, 60)
        without = plain.session(128)
        without.load(data, 40)
        other.load(without.save(), 40)
        assert head_of(other).chain(40, int(TEXT[40]), RULES).tokens == ()
        other.forward(TEXT[40:42], n_past=40)
        assert drafted(other, 42)


def test_a_head_that_was_freed_costs_nothing(model: Exported, tmp_path: Path) -> None:
    """The sessions of all texts go on without it, those that are open and those that are opened later."""
    with loaded(model, tmp_path) as found:
        session, other = found.session(100), found.session(100)
        for one in (session, other):
            one.forward(TEXT[:20], n_past=0)
        assert head_of(session).held_bytes > head_of(session).n_bytes > 0
        head_of(session).let_go()
        assert head_of(other).gone
        assert found.session(100).draft_head is None
        fork = session.fork()
        for last in (session, fork):
            last.forward(TEXT[20:30], n_past=20)
            assert head_of(last).chain(30, int(TEXT[30]), RULES).tokens == ()


def test_a_head_with_matrices_of_its_own_borrows_nothing(model: Exported, tmp_path: Path) -> None:
    """It runs beside a graph in which no embedding is found; one that borrows is refused there, by name."""
    folder = copied(model.folder, tmp_path)
    graph = (folder / "model.onnx").read_bytes()
    rewritten(folder, "model.onnx", graph.replace(b"token_embd.weight", b"token_embd.wEIGHT"))
    renamed = replace(model, folder=folder)
    with loaded(renamed, tmp_path, replace(HEAD, own_embedding=True, own_output=True)) as found:
        session = found.session(100)
        session.forward(TEXT[:20], n_past=0)
        assert drafted(session, 20)
    with pytest.raises(UnsupportedModelError, match=r"no matrix 'token_embd\.weight'"), loaded(renamed, tmp_path):
        pass


def test_a_file_that_became_shorter_is_an_error(model: Exported, tmp_path: Path) -> None:
    """Rows beyond its end are not read."""
    export = read_export(copied(model.folder, tmp_path))
    matrix = open_matrix(export, read_parts(export, (EMBEDDING,)), EMBEDDING)
    assert matrix.read(TEXT[:4]).shape == (4, 256)
    with (export.folder / "model.onnx.data").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(ModelFormatError, match="it has become shorter"):
        matrix.read(TEXT[:4])
    matrix.close()


def test_damaged_graphs_are_errors_or_other_matrices(exported: Exporter, tmp_path: Path) -> None:
    """Of 400 graphs with a few bytes changed or cut off, each gives rows, finite or not, or an error that says what."""
    folder, rng = copied(exported(types=("Q4_K",), n_layer=1).folder, tmp_path), np.random.default_rng(1)
    export, whole = read_export(folder), (folder / "model.onnx").read_bytes()
    places = [at.start() for at in re.finditer(rb"(token_embd|output)\.weight", whole)]
    n_read = 0
    for i in range(400):
        damaged = bytearray(whole)
        for _ in range(1 + i % 3):
            place = int(rng.choice(places)) + int(rng.integers(-40, 60))
            damaged[place] = int(rng.integers(256))
        (folder / "model.onnx").write_bytes(damaged[: -int(rng.integers(1, 5000))] if i % 20 == 0 else damaged)
        with suppress(EdgedecError):
            parts = read_parts(export, (EMBEDDING, OUTPUT))
            for name in (EMBEDDING, OUTPUT):
                matrix = open_matrix(export, parts, name)
                with closing(matrix):
                    assert matrix.read(TEXT[:3]).shape == (3, 256)
            n_read += 1
    assert 0 < n_read < 400


def test_the_plan_counts_the_head(model: Exported, tmp_path: Path) -> None:
    """It has the terms that the loaded model has; what the head can't be beside is refused by planning, too."""
    names = {"draft head", "KV cache of the draft head", "taps of the draft head"}
    with loaded(model, tmp_path) as found:
        held = {term.name: term.n_bytes for term in found.memory(200, 8) if term.name in names}
    options = LoadOptions(n_ctx=200, n_parallel=4, draft_head=tmp_path / "head")
    assert {term.name: term.n_bytes for term in Onnx().plan(model.folder, options) if term.name in names} == held
    assert set(held) == names
    write_head(tmp_path / "other", replace(HEAD, taps=(0, 2, 3)))
    with pytest.raises(UnsupportedModelError, match="reads what enters layer 0"):
        Onnx().plan(model.folder, replace(options, draft_head=tmp_path / "other"))


def named(folder: Path, model: Path) -> Path:
    """Write a head that names its target, a GGUF, by hashes; return its folder."""
    write_head(folder, HEAD)
    (folder / RECORD_FILE).write_text(record_text("h", target_of(read_gguf(model)), None, taps=[2, 3, 4]))
    return folder


def wishes(model: Path, cache: Path) -> LoadPlan:
    """Return what auto uses for a model."""
    options = EngineOptions(cache_dir=cache)
    return asked_plan(find_model(model, options, None), options, LIBRARY)


def test_an_export_names_what_it_was_made_of(model: Exported, tmp_path: Path) -> None:
    """auto finds the head that was trained for the source; beside rounded weights it says that they are others."""
    from edgedec_export.to_onnx import export_onnx

    head = named(tmp_path / "cache" / HEADS / "h", model.gguf)
    for folder, notes in (
        (model.folder, ()),
        (export_onnx(model.gguf, tmp_path / "balanced", quant="balanced"), ("another quantization of",)),
    ):
        assert wishes(folder, tmp_path / "cache").options.draft_head == head
        with load(folder, draft_head=head) as found:
            said = head_of(found.session(64)).notes
        assert len(said) == len(notes)
        assert all(note in sentence for note, sentence in zip(notes, said, strict=True))
    assert wishes(model.gguf, tmp_path / "cache").options.draft_head == head


def test_a_head_of_another_model_is_refused(exported: Exporter, model: Exported, tmp_path: Path) -> None:
    """Its norms are others; auto passes it over."""
    other = exported(types=("Q8_0",), n_layer=4, seed=1)
    head = named(tmp_path / "cache" / HEADS / "h", other.gguf)
    assert wishes(model.folder, tmp_path / "cache").options.draft_head is None
    with pytest.raises(UnsupportedModelError, match="is another model"):
        load(model.folder, draft_head=head)


def test_an_export_without_hashes_is_told(model: Exported, tmp_path: Path) -> None:
    """An older edgedec wrote it: a head that is named is used, with a note; auto does not find one."""
    folder, head = copied(model.folder, tmp_path), named(tmp_path / "cache" / HEADS / "h", model.gguf)
    old = (folder / "vocabulary.gguf").read_bytes().replace(b"edgedec.source.", b"another.source.")
    rewritten(folder, "vocabulary.gguf", old)
    assert wishes(folder, tmp_path / "cache").options.draft_head is None
    with load(folder, draft_head=head) as found:
        (note,) = head_of(found.session(64)).notes
    assert "does not say by a hash which weights it was made of" in note
