"""Folders of an encoder and a decoder: logits of float64, texts of the GGUF, the same bits in pieces, and refusals."""

import json
import shutil
from collections.abc import Callable
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.forwards import distance
from support.models.tiny_runs import bits, extend
from support.models.tiny_t5 import END, PAD, TOKENS, TinyT5, t5_logits
from support.models.tiny_t5_onnx import write_folder, write_texts
from support.processes.command_line import run_here

import edgedec
from edgedec.errors import CapabilityError, EdgedecError, ModelNotFoundError, PromptTooLongError
from edgedec.gguf.file import read_header_of
from edgedec.gguf.model_info import describe
from edgedec.load_options import LoadOptions
from edgedec.model import Model
from edgedec_runtimes.onnx.library import load_library
from edgedec_runtimes.onnx.runtime import Onnx
from edgedec_runtimes.tokenizer import open_tokenizer

pytest.importorskip("onnx", reason="onnx, of the extra `export`, is not installed")
slow = pytest.mark.slow

N_CTX, PROMPT = 120, "translate the small house is a house, is the small house"
T5 = TinyT5(n_ctx=60)
SHAPES = ("pair", "merged")
RANDOM = np.random.default_rng(0)
SOURCE, OTHER = (np.append(RANDOM.integers(3, len(TOKENS), n), END).astype(np.int32) for n in (39, 20))
TEXT = np.append(PAD, RANDOM.integers(3, len(TOKENS), 30)).astype(np.int32)


def tool(name: str) -> Any:
    """Return a module of ONNX Runtime's tools, once the library is imported without its telemetry."""
    return import_module(f"{load_library().__name__}.{name}")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that copies a folder with two graphs, or with one decoder, which a test may damage."""
    root = tmp_path_factory.mktemp("sources")
    made = {name: write_folder(root / name, T5, merged=name == "merged") for name in SHAPES}
    return lambda to, name="pair": Path(shutil.copytree(made[name], to))


def load(path: Path, **options: Any) -> Model:
    """Load a folder on one thread."""
    return Onnx().load(path, LoadOptions(**({"n_ctx": N_CTX, "n_threads": 1, "max_rows": 64} | options)))


@slow
@pytest.mark.parametrize("name", SHAPES)
def test_logits(folders: Callable[..., Path], tmp_path: Path, name: str) -> None:
    """They are those of float64, with the same bits by steps, pieces, forks, saved states and behind other texts."""
    n = len(SOURCE)
    with load(folders(tmp_path / "t5", name)) as model:
        session = model.session(N_CTX)
        session.forward(SOURCE, n_past=0)
        expected = bits(session.forward(TEXT, n_past=n, rows="all").logits)
        assert distance(expected.view(np.float32), t5_logits(T5, T5.weights(), SOURCE.tolist(), TEXT.tolist())) < 2e-3
        twin = session.fork()
        for start in (9, 1, 0):
            twin.forward(TEXT[:start:-1], n_past=n + max(start, 1))
            assert (bits(twin.forward(TEXT[start:], n_past=n + start, rows="all").logits) == expected[start:]).all()
        pieces = model.session(N_CTX)
        for begin, end in pairwise((0, 7, 30, n)):
            pieces.forward(SOURCE[begin:end], n_past=begin)
        assert (extend(pieces, TEXT, (1,) * len(TEXT)) == expected).all()
        saved, restored = session.save(), model.session(N_CTX)
        restored.load(saved, n + len(TEXT))
        assert (bits(restored.forward(TEXT[5:], n_past=n + 5, rows="all").logits) == expected[5:]).all()
        assert (bits(restored.forward(TEXT, n_past=n, rows="all").logits) == expected).all()  # the encoder reads again
        session.forward(OTHER, n_past=0)
        session.forward(TEXT[:9], n_past=len(OTHER))
        session.forward(SOURCE, n_past=0)
        assert (extend(session, TEXT, (3, 9)) == expected).all()


@slow
@pytest.mark.parametrize("name", SHAPES)
def test_texts_are_those_of_the_gguf(folders: Callable[..., Path], tmp_path: Path, name: str) -> None:
    """Greedy ones, whichever runtime computes them; a second prompt is read from its beginning."""
    gguf, texts = T5.write(tmp_path / "t5.gguf"), []
    for path in (folders(tmp_path / "t5", name), gguf):
        with edgedec.load(path, offline=True, n_ctx=N_CTX, draft="off") as engine:
            options: dict[str, Any] = {"max_tokens": 30, "temperature": 0, "ignore_end": True, "logit_bias": {PAD: -99}}
            texts.append([engine.generate(prompt, **options).token_ids for prompt in (PROMPT, "a house", PROMPT)])
    assert texts[0] == texts[1]
    assert texts[0][0] == texts[0][2] != texts[0][1]


@slow
@pytest.mark.parametrize("ending", ["quantized", "fp16"])
@pytest.mark.parametrize("name", SHAPES)
def test_graphs_of_other_weights(folders: Callable[..., Path], tmp_path: Path, name: str, ending: str) -> None:
    """As transformers.js keeps them: a graph's path stands for all, logits are near float64, steps have their bits."""
    import onnx

    folder, quantize_dynamic = folders(tmp_path / "t5", name), tool("quantization").quantize_dynamic
    convert_float_to_float16 = tool("transformers.float16").convert_float_to_float16
    (place := folder / "onnx").mkdir()
    for file in folder.glob("*.onnx"):
        if ending == "fp16":
            onnx.save(convert_float_to_float16(onnx.load(file), keep_io_types=True), place / f"{file.stem}_fp16.onnx")
        else:
            quantize_dynamic(file, place / f"{file.stem}_quantized.onnx", extra_options={"EnableSubgraph": True})
    path = place / f"decoder_model{'_merged' * (name == 'merged')}_{ending}.onnx"
    assert run_here("info", path, "--json").document()["quantization"].endswith(f"decoder, {ending}")
    expected = t5_logits(T5, T5.weights(), SOURCE.tolist(), TEXT.tolist())
    with load(path) as model:
        rows, session = list[Any](), model.session(N_CTX)
        for _ in range(2):
            session.forward(SOURCE, n_past=0)
            rows.append(extend(session, TEXT, (1,) * len(TEXT)))
            session.forward(OTHER, n_past=0)
        assert (rows[0] == rows[1]).all()
        assert (model.capabilities.max_rows == 1) == (ending == "quantized")  # whose rows depend on those beside them
    least, most = {"fp16": (5e-4, 2e-2), "quantized": (2e-2, 0.5)}[ending]
    assert least < distance(rows[0].view(np.float32), expected) < most
    n_files = sum(file.stat().st_size for file in place.iterdir())
    factor = {"merged": 2.1, "pair": 1.6}[name] * (1 + (ending == "fp16"))  # whose weights are float32 when opened
    terms = {term.name: term for term in Onnx().plan(path, LoadOptions(n_ctx=100))}
    assert terms["weights"].n_bytes == int(1.01 * int(factor * n_files))


@slow
def test_endings_that_are_missing(folders: Callable[..., Path], tmp_path: Path) -> None:
    """A folder names those that are there, a graph what it lacks, and graphs that take float16 are refused."""
    import onnx

    folder, convert_float_to_float16 = folders(tmp_path / "t5"), tool("transformers.float16").convert_float_to_float16
    for file in folder.glob("*.onnx"):
        onnx.save(convert_float_to_float16(onnx.load(file)), folder / f"{file.stem}_fp16.onnx")
        file.unlink()
    with pytest.raises(ModelNotFoundError, match=r"no encoder_model.onnx; give the path of one of decoder_model_fp16"):
        load(folder)
    with pytest.raises(EdgedecError, match=r"last_hidden_state as tensor\(float16\).*, expected tensor\(float\)"):
        load(folder / "decoder_model_fp16.onnx")
    (folder / "encoder_model_fp16.onnx").unlink()
    with pytest.raises(ModelNotFoundError, match=r"but no encoder_model_fp16.onnx; export"):
        load(folder / "decoder_model_fp16.onnx")


@slow
@pytest.mark.parametrize("options", [{"rows": 1}, {"causal": False}])
def test_a_decoder_that_takes_one_token(tmp_path: Path, options: dict[str, Any]) -> None:
    """It decodes plainly, be its input of one token, or be it one that would let tokens see those behind them."""
    with load(write_folder(tmp_path / "t5", T5, **options)) as model:
        assert (model.capabilities.max_rows, model.batch_invariant) == (1, 1)
        session = model.session(N_CTX)
        session.forward(SOURCE, n_past=0)
        last = session.forward(TEXT, n_past=len(SOURCE)).logits
        expected = t5_logits(T5, T5.weights(), SOURCE.tolist(), TEXT.tolist())[-1:]
        assert distance(last, expected) < 2e-3
        with pytest.raises(CapabilityError, match="at most 1"):
            session.forward(TEXT[1:3], n_past=len(SOURCE) + 1, rows="all")


def changed(file: str, **changes: Any) -> Callable[[Path], Any]:
    """Return what changes entries of a JSON file."""

    def change(folder: Path) -> None:
        document = json.loads((folder / f"{file}.json").read_text())
        (folder / f"{file}.json").write_text(json.dumps(document | changes))

    return change


def cut(name: str) -> Callable[[Path], Any]:
    """Return what cuts a file to its half."""
    return lambda folder: (folder / name).write_bytes(
        (folder / name).read_bytes()[: (folder / name).stat().st_size // 2]
    )


def renamed(old: str, new: str) -> Callable[[Path], None]:
    """Return what renames an input or output in the decoder for later tokens."""

    def rename(folder: Path) -> None:
        path = folder / "decoder_with_past_model.onnx"
        path.write_bytes(path.read_bytes().replace(old.encode(), new.encode()))

    return rename


BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no decoder": (
        lambda f: [path.rename(path.with_suffix(".old")) for path in [*f.glob("decoder*")]],
        "but no decoder_model.onnx",
    ),
    "no encoder": (lambda f: (f / "encoder_model.onnx").unlink(), "but no encoder_model.onnx"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "but no tokenizer.json"),
    "half a graph": (cut("decoder_model.onnx"), r"decoder_model.onnx: .* bytes stands where|goes on beyond|damaged"),
    "an empty graph": (lambda f: (f / "encoder_model.onnx").write_bytes(b""), "encoder_model.onnx: cannot mmap"),
    "half a text": (cut("config.json"), r"config.json: it is no JSON object"),
    "a list": (lambda f: (f / "config.json").write_text("[1]"), "config.json: it is no JSON object"),
    "another kind": (changed("config", model_type="bart"), "of the kind 'bart', expected 't5' or 'marian'"),
    "other sizes": (changed("config", d_model=64), "a graph has 128 numbers of a row, config.json says 64"),
    "other heads": (changed("config", num_heads=4), "a graph has 3 heads, config.json says 4"),
    "other layers": (changed("config", num_decoder_layers=3), "a graph has 2 layers, config.json says 3"),
    "other logits": (changed("config", vocab_size=200), "a graph has 108 logits, config.json says 200"),
    "few tokens": (changed("config", vocab_size=50), "damaged, or of over 50 tokens"),
    "no start": (changed("generation_config", decoder_start_token_id=None), "a token of config.json is None"),
    "a start beyond": (changed("generation_config", decoder_start_token_id=108), "a token of config.json is 108"),
    "bad words": (changed("generation_config", bad_words_ids=3), "a size or a token of config.json is"),
    "a forced start": (changed("config", forced_bos_token_id=3), "without forced_bos_token_id"),
    "another tokenizer": (changed("tokenizer", model={"type": "BPE"}), "its model is 'BPE', expected 'Unigram'"),
    "no vocabulary": (changed("tokenizer", model={"type": "Unigram", "vocab": 3}), "tokenizer.json: damaged"),
    "another rule": (changed("tokenizer", normalizer={"type": "Lowercase"}), "its normalizer has the step"),
    "an unknown input": (renamed("encoder_attention_mask", "encoder_attention_mas2"), "lacks 'encoder_attention_mask'"),
    "an unknown output": (renamed("present.1.decoder.key", "present.1.decoder.kez"), "lacks 'present.1.decoder.key'"),
}


@slow
@pytest.mark.parametrize("name", BAD)
def test_what_is_refused(folders: Callable[..., Path], tmp_path: Path, name: str) -> None:
    """By the file, what is wrong with it, and what was expected."""
    damage, said = BAD[name]
    damage(folder := folders(tmp_path / "t5"))
    with pytest.raises(EdgedecError, match=said):
        load(folder)


@slow
def test_limits(folders: Callable[..., Path], tmp_path: Path) -> None:
    """A prompt over the encoder's length, a device, and the memory of what both sides keep; a Marian's text ends."""
    folder = folders(tmp_path / "t5")
    with load(folder) as model, pytest.raises(PromptTooLongError, match="the encoder of this model reads 60 at most"):
        model.session(N_CTX).forward(np.full(61, 5, np.int32), n_past=0)
    with pytest.raises(EdgedecError, match="an encoder and a decoder run on the CPU here"):
        load(folder, device="cuda")
    terms = {term.name: term for term in Onnx().plan(folder, LoadOptions(n_ctx=100))}
    assert terms["KV cache"].n_bytes == 101 * (2 * 2 * 3 * 32 * 4 + 2)
    n_files = sum(path.stat().st_size for path in folder.glob("*.onnx"))
    assert terms["weights"].n_bytes == int(1.01 * int(1.6 * n_files))


@slow
def test_a_marian_ends_with_its_positions(tmp_path: Path) -> None:
    """Its text has no more tokens than its table, and never the one that is a bad word."""
    t5 = TinyT5(n_ctx=24, head_dim=32, n_embd=96)
    with edgedec.load(write_folder(tmp_path / "marian", t5, kind="marian"), offline=True) as engine:
        assert (engine.card.architecture, engine.n_ctx) == ("marian", 48)
        result = engine.generate("a house", ignore_end=True)
    assert (len(result.token_ids), result.finish_reason, PAD in result.token_ids) == (24, "length", False)


@pytest.mark.slow
def test_the_tokenizer(tmp_path: Path) -> None:
    """Its ids are those of Hugging Face's, any white space separates words, and names of languages are whole."""
    (folder := tmp_path / "t5").mkdir()
    for name in ("encoder_model.onnx", "decoder_model_merged.onnx"):
        (folder / name).touch()
    write_texts(folder, T5)
    texts = ["translate the small house", " a\tb \n\n the  house ", "", "aing er-st", "\u00fc the"]
    tokenizer = open_tokenizer(read_header_of(folder))
    assert [tokenizer.encode(text)[-2:] for text in texts] == [[END, PAD]] * len(texts)
    assert describe(read_header_of(folder)).sampling_defaults == {"temperature": 0.0, "logit_bias": {PAD: -1e30}}
    theirs = pytest.importorskip("tokenizers").Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert [tokenizer.encode(text)[:-1] for text in texts] == [theirs.encode(text).ids for text in texts]
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    model["vocab"][-1] = [">>fra<<", -3.0]
    changed("tokenizer", model=model)(folder)
    assert open_tokenizer(read_header_of(folder)).encode(">>fra<< a")[:2] == [len(TOKENS) - 1, TOKENS.index("\u2581a")]
