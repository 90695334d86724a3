"""The llamacpp runtime against the contract, llama.cpp itself, and the system's own count of memory."""

import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.forwards import evaluated
from support.models.cut_files import cut_in_a_forward
from support.models.tiny_mamba import tiny_mamba
from support.models.tiny_models import tiny_llama

import edgedec
from edgedec.api.options import DraftOptions
from edgedec.errors import CancelledError, CapabilityError, EdgedecError, ModelFormatError, RequestError, SessionError
from edgedec.load_options import LoadOptions
from edgedec.memory_plan import MemoryTerm
from edgedec.model import ForwardItem, Model, RowGroup, Session, Span
from edgedec.progress import Progress
from edgedec_runtimes.llamacpp.runtime import LlamaCpp

pytestmark = pytest.mark.slow


def ids(*tokens: int) -> NDArray[np.int32]:
    return np.array(tokens, dtype=np.int32)


@pytest.fixture
def model(tiny_path: Path) -> Model:
    """A tiny model with two sessions to a context."""
    return LlamaCpp().load(tiny_path, LoadOptions(n_ctx=1024, n_parallel=2))


def test_long_and_short_prefills_in_one_forward(model: Model) -> None:
    """A prefill over several micro-batches joins a short one, and only the rows asked for come back."""
    a, b, alone = model.session(1024), model.session(64), model.session(1024)
    long = np.arange(700, dtype=np.int32) % 200 + 10
    rows = ids(3, 511, 512, 699)
    forwards = model.forward(
        [ForwardItem(a, 0, (RowGroup(long),), rows=rows), ForwardItem(b, 0, (RowGroup(ids(1, 2)),))]
    )
    expected = alone.forward(long, n_past=0, rows=rows).logits
    assert forwards[0].logits.shape == (4, model.card.n_vocab)
    np.testing.assert_allclose(forwards[0].logits, expected, atol=2e-2)
    assert forwards[1].logits.shape == (1, model.card.n_vocab)
    model.close()


def test_more_rows_than_a_context_batch_holds(tiny_path: Path) -> None:
    """Forks whose rows together are over the context's batch are evaluated in turn, not refused by an abort."""
    with LlamaCpp().load(tiny_path, LoadOptions(n_ctx=40)) as model:
        first = model.session(40)
        forks = [first.fork(), first.fork()]
        items = [ForwardItem(s, 0, (RowGroup(ids(*range(5, 35))),)) for s in (first, *forks)]
        logits = [forward.logits for forward in model.forward(items)]
        np.testing.assert_allclose(logits[0], logits[1], atol=2e-2)
        np.testing.assert_allclose(logits[0], logits[2], atol=2e-2)


def test_a_kept_branch_has_the_bits_of_a_chain(model: Model) -> None:
    """After keep() of a path past rejected nodes, single steps go on with exactly a chain's bits."""
    tree, chain = model.session(64), model.session(64)
    for session in (tree, chain):
        session.forward(ids(10, 11, 12), n_past=0)
    tree.forward(ids(20, 21, 22, 23), n_past=3, parents=ids(-1, 0, 0, 2), rows="all")
    tree.keep(ids(0, 2, 3))
    for i, token in enumerate((20, 22, 23)):
        chain.forward(ids(token), n_past=3 + i)
    assert tree.n_cached == chain.n_cached == 6
    left = tree.forward(ids(30), n_past=6).logits.copy()
    assert np.array_equal(left, chain.forward(ids(30), n_past=6).logits)
    model.close()


def test_what_was_not_loaded_for_is_refused(tiny_path: Path) -> None:
    """Rows, trees and options beyond those loaded for are errors before llama.cpp sees them."""
    with LlamaCpp().load(tiny_path, LoadOptions(n_ctx=64, max_rows=1)) as model:
        session = model.session(64)
        assert not model.capabilities.trees
        assert not model.capabilities.fork
        with pytest.raises(CapabilityError, match="rows of logits"):
            session.forward(ids(1, 2), n_past=0, rows="all")
        with pytest.raises(CapabilityError, match="trees"):
            session.forward(ids(1, 2), n_past=0, parents=ids(-1, -1))
        with pytest.raises(CapabilityError, match="fork"):
            session.fork()
        with pytest.raises(CapabilityError, match="hidden"):
            evaluated(session, 0, RowGroup(vectors=np.zeros((1, 64), np.float32), span=Span(enter=1)))
        assert session.n_cached == 0
    with pytest.raises(RequestError, match="kv_type"):
        LlamaCpp().load(tiny_path, LoadOptions(kv_type="q9"))
    with pytest.raises(EdgedecError, match="no device"):
        LlamaCpp().load(tiny_path, LoadOptions(device="NoSuchDevice"))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork()")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("n_threads", [1, 2])
def test_a_forked_child_writes_with_a_model_of_its_own(tiny_path: Path, n_threads: int) -> None:
    """The thread that forks has written with two threads, which a child lacks and would wait for; both go on."""
    results: Any = multiprocessing.get_context("fork").SimpleQueue()

    def text() -> str:
        with edgedec.load(tiny_path, runtime="llamacpp", n_ctx=64, n_threads=n_threads, draft="off") as engine:
            return engine.generate("a text", max_tokens=3, ignore_end=True, temperature=0.0).text

    expected = text()
    child = multiprocessing.get_context("fork").Process(target=lambda: results.put(text()))
    child.start()
    child.join(60)
    child.kill()  # where it hangs
    child.join()
    assert not results.empty()
    assert results.get() == expected == text()


@pytest.mark.parametrize(
    "options",
    [
        {"n_threads": 100_000},  # a segmentation fault in llama.cpp
        {"n_threads": 1 << 32 | 1},
        {"n_ctx": 99_999_999_999},
        {"n_parallel": 1 << 20},
        {"max_rows": 1 << 20},
        {"n_gpu_layers": 1 << 33},
        {"n_gpu_layers": -7},
    ],
    ids=str,
)
def test_numbers_that_llama_cpp_can_not_hold_are_refused(tiny_path: Path, options: dict[str, int]) -> None:
    """They would crash it, keep it busy for minutes, or be taken modulo 2^32."""
    (name, value) = next(iter(options.items()))
    with pytest.raises(RequestError, match=f"{name} is {value}; it must be from"):
        LlamaCpp().load(tiny_path, LoadOptions(**options))  # type: ignore[arg-type]


def test_more_rows_than_llama_cpp_has_sequences(tiny_path: Path) -> None:
    """300 rows of logits are returned for a chain, though there are only 256 sequences for trees and forks."""
    with LlamaCpp().load(tiny_path, LoadOptions(n_ctx=512, max_rows=300)) as model:
        tokens = np.arange(300, dtype=np.int32) % 200 + 10
        assert model.session(512).forward(tokens, n_past=0, rows="all").logits.shape == (300, model.card.n_vocab)


@pytest.mark.parametrize("kv_type", ["f32", "f16", "q8_0"])
@pytest.mark.parametrize("flash_attention", [True, None])
def test_options_load_and_decode(tiny_path: Path, kv_type: str, flash_attention: bool | None) -> None:
    """KV types, flash attention, threads, copies instead of maps, and no repacking all decode."""
    own = {"flash_attention": flash_attention, "mmap": False, "repack": False}
    options = LoadOptions(n_ctx=64, kv_type=kv_type, runtime_options=own, n_threads=1)
    path = tiny_path
    if kv_type == "q8_0":  # quantized blocks hold 32 numbers, so heads must too
        path = tiny_llama(tiny_path.with_name("wide.gguf"), n_embd=128)
    with LlamaCpp().load(path, options) as model:
        assert np.isfinite(model.session(64).forward(ids(1, 2, 3), n_past=0).logits).all()


def test_progress_and_cancellation_of_loading(tiny_path: Path) -> None:
    """Loading reports progress, and an error in the callback or a cancel token ends it."""
    seen: list[Progress] = []
    LlamaCpp().load(tiny_path, LoadOptions(on_progress=seen.append)).close()
    assert seen[-1].done == 100
    assert [progress.done for progress in seen] == sorted(progress.done for progress in seen)

    def broken(progress: Progress) -> None:
        raise ValueError("the application's own")

    with pytest.raises(ValueError, match="own"):
        LlamaCpp().load(tiny_path, LoadOptions(on_progress=broken))
    cancel = edgedec.CancelToken()
    cancel.cancel()
    with pytest.raises(CancelledError):
        LlamaCpp().load(tiny_path, LoadOptions(cancel=cancel))


def test_cancelling_between_two_micro_batches(model: Model) -> None:
    """cancel() of any session that falls between two decodes of a forward stops it there."""
    first, second = model.session(1024), model.session(1024)
    second.forward(ids(1, 2, 3), n_past=0)
    long = np.arange(700, dtype=np.int32) % 200 + 10
    for session in (first, second):
        seen: list[int] = []

        def cancel(progress: Progress, session: Session = session, seen: list[int] = seen) -> None:
            seen.append(progress.done)
            session.cancel()

        items = [ForwardItem(first, 0, (RowGroup(long),)), ForwardItem(second, 3, (RowGroup(ids(4)),))]
        with pytest.raises(CancelledError, match="512 and 3 tokens are cached"):
            model.forward_with_progress(items, cancel)  # type: ignore[attr-defined]  # llamacpp's own
        assert (seen, first.n_cached, second.n_cached) == ([512], 512, 3)
    found = first.forward(long[512:], n_past=512).logits.copy()
    np.testing.assert_allclose(found, second.forward(long, n_past=0).logits, atol=2e-2)
    model.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork()")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_does_not_wait_for_a_thread_it_does_not_have(model: Model) -> None:
    """A fork while another thread is in a forward: the child is told to load its own model, and can close it."""
    session, inside, go_on = model.session(1024), threading.Event(), threading.Event()

    def wait(progress: Progress) -> None:
        inside.set()
        go_on.wait(60)

    def child() -> None:
        with pytest.raises(SessionError, match="before fork"):
            session.forward(ids(1), n_past=0)
        model.close()

    thread = threading.Thread(
        target=lambda: session.forward(np.arange(700, dtype=np.int32) % 200, n_past=0, on_progress=wait)
    )
    thread.start()
    inside.wait(60)
    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(30)
    hangs = process.exitcode is None
    process.kill()
    go_on.set()
    thread.join()
    assert (hangs, process.exitcode, session.n_cached) == (False, 0, 700)
    model.close()


@pytest.mark.model
def test_cancelling_a_long_prefill(smollm: edgedec.Engine) -> None:
    """cancel() from another thread stops a prefill at a chunk's end, and the session goes on."""
    session = smollm.session(2048)
    prompt = np.arange(2000, dtype=np.int32) + 1000
    reached, cancelled = threading.Event(), threading.Event()

    def on_progress(progress: Progress) -> None:
        if progress.done >= 512:
            reached.set()
        if progress.done >= 1536:  # a thread that was late has time until here
            assert cancelled.wait(60)

    def stop() -> None:
        reached.wait(60)
        time.sleep(0.05)  # into the next chunk
        session.cancel()
        cancelled.set()

    thread = threading.Thread(target=stop)
    thread.start()
    with pytest.raises(CancelledError):
        session.forward(prompt, n_past=0, on_progress=on_progress)
    thread.join()
    assert session.n_cached in (512, 1024, 1536)
    assert np.isfinite(session.forward(ids(5), n_past=session.n_cached).logits).all()
    session.close()


@pytest.mark.model
def test_rows_are_bit_equal_up_to_what_was_measured(smollm: edgedec.Engine) -> None:
    """The n that the probe reports holds on other tokens too."""
    n = int(smollm.model.batch_invariant)
    session = smollm.session(64)
    prompt, tail = ids(*range(700, 720)), ids(*range(900, 900 + n))
    session.forward(prompt, n_past=0)
    single = [session.forward(tail[i : i + 1], n_past=20 + i).logits[0].copy() for i in range(n)]
    together = session.forward(tail, n_past=20, rows="all").logits
    assert np.array_equal(together, np.stack(single))
    session.close()


@pytest.mark.model
@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.long), 0.8])
def test_drafts_in_a_long_context_leave_the_text_as_it_is(smollm_path: Path, temperature: float) -> None:
    """With two threads llama.cpp's rows differ from single steps where attention reads 512 cells or more."""
    load: dict[str, Any] = {"runtime": "llamacpp", "n_threads": 2, "n_ctx": 1024, "offline": True}
    line = "The harbour master wrote: ships in, ships out, and {} crates of oranges on the quay.\n"
    text = "".join(line.format(n) for n in range(60))
    with (
        edgedec.load(smollm_path, draft="off", **load) as plain,
        edgedec.load(smollm_path, draft="suffix", n_draft_max=3, **load) as drafting,
    ):
        n_accepted = []
        for n_prompt in (150, 300):
            prompt = plain.tokenizer.encode(text)[:n_prompt]
            options: dict[str, Any] = {"max_tokens": 20, "temperature": temperature, "seed": 1}
            found = drafting.generate(prompt, **options)
            assert found.token_ids == plain.generate(prompt, **options).token_ids
            n_accepted.append(found.stats.n_accepted_tokens)
    assert n_accepted[0] > 0
    assert n_accepted[1] == 0
    assert any("not bit-equal to single steps here" in reason for reason in found.stats.reasons)


_MEASURE = """
import json, sys
from pathlib import Path
import numpy as np
from edgedec.memory.system import peak_resident_bytes
from edgedec.load_options import LoadOptions
from edgedec_runtimes.llamacpp.runtime import LlamaCpp
path, n_ctx = Path(sys.argv[1]), int(sys.argv[2])
options = LoadOptions(n_ctx=n_ctx, max_rows=4)
planned = sum(term.n_bytes for term in LlamaCpp().plan(path, options))
with LlamaCpp().load(path, options) as model:
    model.batch_invariant  # nothing is remembered: it is measured
    session = model.session(n_ctx)
    session.forward(np.arange(n_ctx - 8, dtype=np.int32) % 1000 + 300, n_past=0)
    for i in range(4):
        session.forward(np.array([7], np.int32), n_past=n_ctx - 8 + i)
    print(json.dumps([planned, peak_resident_bytes(), sum(t.n_bytes for t in model.memory(n_ctx, 4))]))
"""


@pytest.mark.model
@pytest.mark.parametrize("n_ctx", [512, pytest.param(1024, marks=pytest.mark.long)])
def test_the_memory_plan_is_what_the_system_counts(smollm_path: Path, n_ctx: int) -> None:
    """The plan made before loading is within 5 % or 16 MB of the peak resident size, in a process of its own."""
    command = [sys.executable, "-c", _MEASURE, str(smollm_path), str(n_ctx)]
    planned, measured, stated = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    for figure in (planned, stated):
        assert abs(figure - measured) <= max(0.05 * measured, 16e6)


@pytest.mark.model
def test_without_room_for_a_plan_the_header_says_what_is_needed(smollm_path: Path) -> None:
    """A dry run of llama.cpp's is made where it has room; else the terms are a part, and say so."""

    def terms(n_bytes: int | None) -> dict[str, MemoryTerm]:
        options = LoadOptions(n_ctx=512, planning_bytes=n_bytes)
        return {term.name: term for term in LlamaCpp().plan(smollm_path, options) if not term.base}

    whole = terms(None)
    assert "KV cache" in whole
    assert not any(term.partial for term in whole.values())
    for n_mb in range(0, 60, 5):
        found = terms(n_mb * 10**6)
        assert found == whole or any(term.partial for term in found.values())
        assert sum(term.n_bytes for term in found.values()) <= sum(term.n_bytes for term in whole.values())
        if n_mb < 40:
            assert found.keys() == {"weights (mapped)", "vocabulary"}


def test_the_first_run_has_a_term_of_its_own(tmp_path: Path) -> None:
    """Where nothing is remembered of how many rows are bit-equal, finding out leaves memory behind."""
    path = tiny_llama(tmp_path / "tiny.gguf")

    def terms(**options: Any) -> set[str]:
        return {term.name for term in LlamaCpp().plan(path, LoadOptions(n_ctx=64, cache_dir=tmp_path, **options))}

    assert "first run" in terms(max_rows=4)
    assert "first run" not in terms(max_rows=1)
    with LlamaCpp().load(path, LoadOptions(n_ctx=64, max_rows=4, cache_dir=tmp_path)) as model:
        assert model.batch_invariant
    assert "first run" not in terms(max_rows=4)
    assert "first run" in terms(max_rows=8)


def test_recurrent_models_declare_that_they_cannot_go_back(tmp_path: Path) -> None:
    """A recurrent model has no rollback, trees or forks, says so, and still gives the same text for the same seed."""
    path = tiny_mamba(tmp_path / "mamba.gguf")
    with edgedec.load(path, runtime="llamacpp", n_ctx=128) as engine:
        capabilities = engine.model.capabilities
        assert (capabilities.rollback, capabilities.trees, capabilities.fork) == (False, False, False)
        assert engine.model.batch_invariant == 1
        first = engine.generate("some text", seed=1, temperature=1.0, max_tokens=12, ignore_end=True)
        for prompt in ("some text", "some other text"):
            engine.generate(prompt, seed=2, max_tokens=5, reuse="longest")
        again = engine.generate("some text", seed=1, temperature=1.0, max_tokens=12, ignore_end=True, reuse="longest")
        assert again.token_ids == first.token_ids
        session = engine.session(64)
        session.forward(ids(5, 6, 7), n_past=0)
        with pytest.raises(CapabilityError, match="can't go back"):
            session.forward(ids(8), n_past=2)
        session.forward(ids(8), n_past=3)
        session.forward(ids(5), n_past=0)
        assert session.n_cached == 1


@pytest.mark.parametrize("numerics", ["strict", "loose"])
def test_recurrent_models_draft_nothing(tmp_path: Path, numerics: Any) -> None:
    """A pinned drafter is left out with a sentence, also where drafts need not be exact; the text is the plain one."""
    path, found = tiny_mamba(tmp_path / "mamba.gguf"), []
    for draft in ("off", "suffix"):
        drafting = DraftOptions(numerics=numerics)
        with edgedec.load(path, runtime="llamacpp", n_ctx=128, draft=draft, drafting=drafting) as engine:
            result = engine.generate("ab ab ab ab ", temperature=0.0, max_tokens=40, ignore_end=True)
        found.append(result.token_ids)
        assert result.stats.n_drafts == 0
    assert found[0] == found[1]
    assert any("go back" in reason for reason in result.stats.reasons), result.stats.reasons


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it is not known where llama.cpp has mapped the file")
def test_a_file_cut_short_in_a_forward_is_an_error(tmp_path: Path) -> None:
    """The forward that meets the missing pages fails, and so do all later ones; the process goes on."""
    path = tiny_llama(tmp_path / "m.gguf", n_embd=128, n_ff=512, n_layer=4)
    first, second = cut_in_a_forward("llamacpp", path, path)
    assert first == second
    assert first.startswith(f"{path} was cut short or written to since it was loaded; ")


@pytest.mark.parametrize("mmap", [True, False])
def test_a_file_written_to_is_an_error_where_it_is_mapped(tmp_path: Path, mmap: bool) -> None:
    """Other weights under the same KV cache are no model's; weights that were copied do not change with the file."""
    path = tiny_llama(tmp_path / "m.gguf")
    with edgedec.load(path, runtime="llamacpp", n_ctx=64, runtime_options={"mmap": mmap}, draft=None) as engine:
        expected = engine.generate("Hello", max_tokens=4, temperature=0).token_ids
        before = path.stat()
        while path.stat().st_mtime_ns == before.st_mtime_ns:
            with path.open("r+b") as file:
                file.seek(-4, os.SEEK_END)
                file.write(b"\0\0\0\0")
        if mmap:
            with pytest.raises(ModelFormatError, match=r"written to since it was loaded; .* load the model again"):
                engine.generate("Hello", max_tokens=4, temperature=0)
        else:
            assert engine.generate("Hello", max_tokens=4, temperature=0).token_ids == expected
