"""The cpu runtime keeps the contract of edgedec.model, survives misuse, and refuses what it does not run by name."""

import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.conformance.memory_reading import probe_of
from support.conformance.runtime import check_runtime
from support.models.code_paths import CODE_PATHS, each_architecture
from support.models.gguf_writer import RawTensor, write_gguf
from support.models.tiny_quantized import ARCHITECTURES, TILE_TYPES, Tiny, tiny_metadata, tiny_tensors, write_tiny
from support.models.tiny_runs import bits
from support.processes.forked import in_a_forked_child

from edgedec.errors import (
    CancelledError,
    CapabilityError,
    EdgedecError,
    ModelFormatError,
    RequestError,
    RuntimeUnavailableError,
    SessionError,
    UnsupportedModelError,
)
from edgedec.gguf.tensor_types import GGMLType
from edgedec.load_options import LoadOptions
from edgedec.model import ForwardItem, LayerSet, Model, RowGroup
from edgedec.progress import Progress
from edgedec.testing import raise_failures
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.reference.runtime import Reference

TOKENS = np.random.default_rng(0).integers(0, 260, 300).astype(np.int32)
CHUNK = 256


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny") / "m.gguf", Tiny(n_layer=4, n_ctx_train=8192))


@pytest.fixture
def model(path: Path) -> Iterator[Model]:
    with load(path) as model:
        yield model


def load(path: Path, **options: Any) -> Model:
    return Cpu().load(path, LoadOptions(**({"n_ctx": 128, "n_parallel": 4, "n_threads": 2} | options)))


def conform(path: Path, *, is_measured: bool = True, **options: Any) -> None:
    """Run the conformance suite, with the memory of a process of its own where it is measured."""
    probe = probe_of("cpu", path)
    results = check_runtime(lambda: load(path, **options), memory_probe=probe if is_measured else None)
    raise_failures(results)
    skipped = {result.name for result in results if result.status == "skipped"}
    skipped -= {"cancel_stops_a_forward"}  # where forwards end too soon to be cancelled
    with load(path, **options) as model:
        undeclared = set() if not model.capabilities.hidden_input else {"undeclared_capabilities_raise"}
    assert skipped == undeclared | (set() if is_measured else {"memory_is_as_planned"})


def test_other_arithmetic_is_another_fingerprint(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was stored under kernels with another order of sums is not taken."""
    with load(path) as before, load(path) as again:
        assert before.card.fingerprint == again.card.fingerprint
        monkeypatch.setattr("edgedec_runtimes.cpu.runtime.ARITHMETIC", "0")
        with load(path) as other:
            assert other.card.fingerprint != before.card.fingerprint


@pytest.mark.slow
@pytest.mark.parametrize("name", each_architecture())
def test_tiny_models_conform(tmp_path: Path, name: str) -> None:
    """Every check passes; nothing is skipped but what there is nothing to ask of.

    The memory of a process is measured with the members of CODE_PATHS.
    """
    tiny = replace(ARCHITECTURES[name], types=TILE_TYPES)
    conform(write_tiny(tmp_path / "m.gguf", tiny), is_measured=name in CODE_PATHS)


@pytest.mark.slow
def test_int8_keys_and_values_conform(path: Path) -> None:
    conform(path, is_measured=False, kv_type="q8_0")


@pytest.mark.slow
@pytest.mark.model
def test_a_real_model_conforms(smollm_path: Path) -> None:
    """Every check passes for SmolLM2 135M."""
    conform(smollm_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_layer_subsets_are_the_references(path: Path, model: Model, seed: int) -> None:
    """Any subset of half-layers gives what the reference runtime computes, in steps and at once."""
    masks = np.random.default_rng(seed).random((2, 4)) < 0.6
    layers = LayerSet(attn=masks[0], mlp=masks[1])
    with Reference().load(path, LoadOptions(n_ctx=128)) as reference:
        expected = reference.session(64).forward(TOKENS[:20], n_past=0, layers=layers, rows="all").logits.copy()
    session = model.session(64)
    found = session.forward(TOKENS[:20], n_past=0, layers=layers, rows="all").logits.copy()
    assert float(np.abs(found - expected).max()) < 1e-3 * float(expected.std())
    for i in range(20):
        step = session.forward(TOKENS[i : i + 1], n_past=i, layers=layers).logits
        np.testing.assert_array_equal(bits(step), bits(found[i : i + 1]))


def test_what_is_no_saved_session_is_refused(path: Path, model: Model, tmp_path: Path) -> None:
    """Too short, of another length, of another model, or longer than the session: the session is as it was."""
    session = model.session(64)
    session.forward(TOKENS[:20], n_past=0)
    data = session.save()
    expected = bits(session.forward(TOKENS[20:21], n_past=20).logits)
    attempts = [(data[:-1], 20), (data + b"x", 20), (data, 19), (data, 65), (b"", 0), (data, -1)]
    with load(write_tiny(tmp_path / "other.gguf", Tiny(n_layer=4, seed=1))) as other:
        foreign = other.session(64)
        foreign.forward(TOKENS[:20], n_past=0)
        attempts.append((foreign.save(), 20))
    with load(path, kv_type="q8_0") as narrow:
        foreign = narrow.session(64)
        foreign.forward(TOKENS[:20], n_past=0)
        attempts.append((foreign.save(), 20))
    for wrong, n_tokens in attempts:
        with pytest.raises(ModelFormatError):
            session.load(wrong, n_tokens)
        assert session.n_cached == 21
    np.testing.assert_array_equal(bits(session.forward(TOKENS[20:21], n_past=20).logits), expected)


def test_a_long_prefill_is_cancelled_from_another_thread(model: Model) -> None:
    """It ends soon, what is cached ends with a whole chunk, and the session goes on from there."""
    session, started, cancelled = model.session(8192), threading.Event(), threading.Event()
    text = np.resize(TOKENS, 8000)
    caught: list[BaseException] = []

    def note(progress: Progress) -> None:
        started.set()
        if progress.done > len(text) - 2 * CHUNK:  # a thread that was late has time until here
            assert cancelled.wait(60)

    def prefill() -> None:
        try:
            session.forward(text, n_past=0, on_progress=note)
        except CancelledError as error:
            caught.append(error)

    thread = threading.Thread(target=prefill)
    thread.start()
    assert started.wait(60)
    session.cancel()
    cancelled.set()
    thread.join(60)
    assert len(caught) == 1
    n = session.n_cached
    assert n % CHUNK == 0
    assert CHUNK <= n < len(text)
    found = bits(session.forward(text[n : n + 3], n_past=n).logits)
    np.testing.assert_array_equal(found, bits(model.session(8192).forward(text[: n + 3], n_past=0).logits))


def test_any_session_of_a_forward_cancels_it(model: Model) -> None:
    """The second session's cancel() stops the forward of both."""
    first, second, text = model.session(1024), model.session(1024), np.resize(TOKENS, 1000)
    timer = threading.Timer(0.0, lambda: None)

    def cancel(_: object) -> None:
        nonlocal timer
        timer = threading.Timer(0.0, second.cancel)
        timer.start()
        timer.join()

    item = ForwardItem(second, 0, (RowGroup(text),))
    with pytest.raises(CancelledError):
        model.forward_with_progress([ForwardItem(first, 0, (RowGroup(text),)), item], cancel)  # type: ignore[attr-defined]
    assert (first.n_cached, second.n_cached) == (CHUNK, 0)
    second.forward(text[:3], n_past=0)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [{"taps": (4,)}, {"layers": LayerSet.of(3, [0])}])
def test_a_wrong_request_changes_nothing(model: Model, arguments: dict[str, Any]) -> None:
    """Of layers that there are not; the conformance suite asks for wrong tokens, places, parents and rows."""
    session = model.session(64)
    session.forward(TOKENS[:5], n_past=0)
    with pytest.raises(RequestError):
        session.forward(TOKENS[:2], n_past=5, **arguments)
    assert session.n_cached == 5
    expected = bits(model.session(64).forward(TOKENS[:6], n_past=0).logits)
    np.testing.assert_array_equal(bits(session.forward(TOKENS[5:6], n_past=5).logits), expected)


def test_too_many_rows_are_refused(model: Model) -> None:
    """256 rows of logits, or of a tree, are the most; a session stands once in a forward."""
    session = model.session(512)
    with pytest.raises(CapabilityError, match="257 rows"):
        session.forward(TOKENS[:257], n_past=0, rows="all")
    with pytest.raises(CapabilityError, match="256 rows"):
        session.forward(TOKENS[:257], n_past=0, parents=np.arange(-1, 256, dtype=np.int32))
    halves = [ForwardItem(s, 0, (RowGroup(TOKENS[:129]),), rows="all") for s in (session, model.session(512))]
    with pytest.raises(CapabilityError, match="258 rows"):
        model.forward(halves)
    with pytest.raises(RequestError, match="twice"):
        model.forward([halves[0], halves[0]])
    assert session.n_cached == 0


@pytest.mark.parametrize("n_ctx", [0, -1, 2**24 + 1])
def test_sessions_have_a_length(model: Model, n_ctx: int) -> None:
    """From 1 to 16 million tokens."""
    with pytest.raises(RequestError, match="n_ctx"):
        model.session(n_ctx)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork()")
def test_a_forked_process_loads_its_own(path: Path, model: Model) -> None:
    """In a child the parent's model is refused, another one loads and gives the same bits; the parent goes on."""
    expected = bits(model.session(64).forward(TOKENS[:20], n_past=0).logits)

    def use() -> bool:
        try:
            model.session(64)
        except SessionError:
            with load(path) as own:
                found = bits(own.session(64).forward(TOKENS[:20], n_past=0).logits)
                return bool((found == expected).all())
        return False

    assert in_a_forked_child(use) == "True"
    np.testing.assert_array_equal(bits(model.session(64).forward(TOKENS[:20], n_past=0).logits), expected)


def test_a_load_reports_its_begin_and_its_end(path: Path, tmp_path: Path) -> None:
    """Also where the tiles exist already, and nothing takes long."""
    for phases in (["load", "tiles"], ["load"]):
        reports: list[Progress] = []
        load(path, cache_dir=tmp_path, on_progress=reports.append).close()
        assert (reports[0], reports[-1]) == tuple(Progress("load", n, 100, "%", path.name) for n in (0, 100))
        assert list(dict.fromkeys(report.phase for report in reports)) == phases


_TINY = Tiny()
_Q = "blk.0.attn_q.weight"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_type": "q5_1"}, "kv_type is 'q5_1'; the cpu runtime takes f16, q8_0, q8_0/q4_0, q4_0, gear"),
        ({"n_threads": 0}, "n_threads is 0"),
        ({"n_threads": 257}, "n_threads is 257"),
        ({"n_ctx": 0}, "n_ctx is 0"),
        ({"n_parallel": 0}, "n_parallel is 0"),
        ({"max_rows": 0}, "max_rows is 0"),
        ({"n_gpu_layers": 1}, "no GPU"),
        ({"device": "CUDA0"}, "no GPU"),
    ],
)
def test_options_that_it_cannot_honour(path: Path, options: dict[str, Any], words: str) -> None:
    """Loading and planning refuse them alike."""
    for act in (Cpu().load, Cpu().plan):
        with pytest.raises(RequestError, match=words):
            act(path, LoadOptions(**options))


def test_narrow_types_want_heads_of_whole_blocks(tmp_path: Path) -> None:
    """Heads of 48 elements are kept as float16, and refused as anything narrower."""
    path = write_tiny(tmp_path / "m.gguf", Tiny(n_embd=48, n_head=1, n_head_kv=1, head_dim=48))
    Cpu().load(path, LoadOptions()).close()
    for act, kv_type in itertools.product((Cpu().load, Cpu().plan), ("q8_0", "q8_0/q4_0", "q4_0", "gear")):
        with pytest.raises(RequestError, match="heads have 48 elements"):
            act(path, LoadOptions(kv_type=kv_type))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit that holds for the stacks of threads")
def test_threads_that_the_system_refuses(path: Path) -> None:
    """Where 256 threads can't be started loading fails with an error, and it succeeds once they can."""
    code = """
import resource, sys
from pathlib import Path
from edgedec.errors import MemoryCapError
from edgedec.load_options import LoadOptions
from edgedec_runtimes.cpu.runtime import Cpu
Cpu().load(Path(sys.argv[1]), LoadOptions(n_threads=1)).close()
held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
unlimited = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (held + 2**29, unlimited[1]))
try:
    Cpu().load(Path(sys.argv[1]), LoadOptions(n_threads=256))
except MemoryCapError:
    resource.setrlimit(resource.RLIMIT_AS, unlimited)
    Cpu().load(Path(sys.argv[1]), LoadOptions(n_threads=2)).close()
    print("refused")
"""
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("refused\n", 0), done.stderr


def test_an_instruction_set_that_is_not_here(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEDEC_CPU_ISA", "mmx")
    with pytest.raises(RuntimeUnavailableError, match=r"EDGEDEC_CPU_ISA is 'mmx'; here the cpu runtime has .*portable"):
        Cpu().load(path, LoadOptions())


_NARROW = Tiny(n_embd=40, n_head=1, n_head_kv=1, head_dim=40)


def _without(tensors: dict[str, RawTensor], name: str) -> dict[str, RawTensor]:
    return {key: tensor for key, tensor in tensors.items() if key != name}


UNSUPPORTED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "architecture": (tiny_metadata(Tiny("bloom")), {}, "the architecture is 'bloom'"),
    "tensor type": (
        {},
        {_Q: RawTensor(GGMLType.NVFP4, (256, 256), bytes(256 * 144))},
        "'blk.0.attn_q.weight' is NVFP4",
    ),
    "tensor": ({}, {"blk.0.attn_sinks.weight": RawTensor(0, (4,), bytes(16))}, "'blk.0.attn_sinks.weight'"),
    "type of a vector": ({}, {"output_norm.weight": RawTensor(1, (256,), bytes(512))}, "is not a vector of F32"),
    "key": ({"llama.attention.clamp_kqv": 8.0}, {}, "'llama.attention.clamp_kqv'"),
    "experts": ({"llama.expert_count": 0}, {}, "'llama.expert_count'"),
    "rope scaling": ({"llama.rope.scaling.type": "dynamic"}, {}, "rope scaling 'dynamic' is none of"),
    "yarn": ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.yarn_beta_fast": -1.0}, {}, "the numbers of yarn"),
    "attention factor": ({"llama.rope.scaling.attn_factor": 0.0}, {}, "rope_attention_factor is 0.0"),
    "vocabulary": ({"tokenizer.ggml.model": "rwkv"}, {}, "rwkv"),
    "size": (
        {"llama.attention.key_length": 8192, "llama.attention.value_length": 8192},
        {},
        "head_dim is 8192, more than 4096",
    ),
    "no heads": (
        {f"llama.attention.{key}": 0 for key in ("head_count_kv", "key_length", "value_length")},
        {},
        "no use for tensor 'blk.0.attn_k.weight'",
    ),
    "epsilon": ({"llama.attention.layer_norm_rms_epsilon": 0.0}, {}, "rms_epsilon is 0.0"),
    "scale": ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": -2.0}, {}, "rope_scale is -0.5"),
    "width": (tiny_metadata(_NARROW), dict(tiny_tensors(_NARROW)), "no multiple of 16"),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", UNSUPPORTED)
def test_what_it_does_not_run_is_refused_by_name(tmp_path: Path, what: str) -> None:
    """accepts() tells what it is and which runtime takes it; load() and plan() raise the same."""
    metadata, tensors, words = UNSUPPORTED[what]
    path = write_gguf(tmp_path / "m.gguf", tiny_metadata(_TINY) | metadata, tiny_tensors(_TINY) | tensors)
    reason = Cpu().accepts(path)
    assert reason is not None
    assert words in reason
    assert reason.endswith("use the llamacpp runtime")
    for act in (Cpu().load, Cpu().plan):
        with pytest.raises(UnsupportedModelError) as caught:
            act(path, LoadOptions())
        assert str(caught.value) == reason


def test_more_heads_than_elements_are_refused(tmp_path: Path) -> None:
    """Where the file does not say how long a head is, there must be an element for each."""
    known = tiny_metadata(_TINY) | {"llama.attention.head_count": 512}
    metadata = {key: value for key, value in known.items() if not key.endswith(("_length", "dimension_count"))}
    metadata |= {key: known[key] for key in ("llama.embedding_length", "llama.context_length")}
    metadata["llama.feed_forward_length"] = 256
    path = write_gguf(tmp_path / "m.gguf", metadata, tiny_tensors(_TINY))
    with pytest.raises(EdgedecError, match="key_length is 0, expected 1 or more"):
        Cpu().load(path, LoadOptions())


@pytest.mark.slow
@pytest.mark.parametrize("name", [_Q, "output_norm.weight", "blk.1.ffn_norm.weight", "token_embd.weight"])
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    """What every model has must be there, in its shape."""
    for tensors in (_without(tiny_tensors(_TINY), name), tiny_tensors(_TINY) | {name: RawTensor(0, (64,), bytes(256))}):
        path = write_gguf(tmp_path / "m.gguf", tiny_metadata(_TINY), tensors)
        with pytest.raises(EdgedecError, match=name):
            Cpu().load(path, LoadOptions())


def test_vectors_that_hold_no_numbers_are_refused(tmp_path: Path) -> None:
    """A NaN in a norm is found at loading."""
    bad = RawTensor(0, (256,), np.full(256, np.nan, np.float32).tobytes())
    path = write_gguf(tmp_path / "m.gguf", tiny_metadata(_TINY), tiny_tensors(_TINY) | {"output_norm.weight": bad})
    with pytest.raises(ModelFormatError, match=r"'output_norm.weight' holds what is no number"):
        Cpu().load(path, LoadOptions())
