"""Prompts that are kept on the disk: every text is that of an engine that keeps none, whatever the disk gave."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.heads.loaded_blocks import FLOATS, of_floats
from support.heads.tiny_blocks import tiny_block, write_block
from support.heads.tiny_heads import OF_FLOATS, write_head
from support.models.tiny_adapters import tiny_adapter
from support.models.tiny_models import tiny_llama
from support.models.tiny_quantized import ARCHITECTURES, write_tiny
from support.models.tiny_t5 import END, PAD, TinyT5

import edgedec
from edgedec.api.options import Lossy
from edgedec.decoding.reading import prompt_read
from edgedec.errors import RequestError
from edgedec.load_options import LoadOptions
from edgedec.model import RecallingSession
from edgedec.pictures import Block, PictureRows
from edgedec.progress import CancelToken
from edgedec.storage.whole_file import write_atomically
from edgedec_runtimes.cpu import kept_prompts
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.cpu.source_model import CpuSourceModel, CpuSourceSession
from edgedec_runtimes.shared.block_files import BlockFiles, _Job

pytestmark = pytest.mark.slow
BLOCK, HELD = 256, 576  # of the prompts below: two blocks, and one of a page
N_CTX = 800
WISH: dict[str, Any] = {"max_tokens": 12, "ignore_end": True, "temperature": 0.9, "seed": 4}
DOCUMENT = tuple(int(token_id) for token_id in np.random.default_rng(7).integers(3, 200, 600))
FIRST, SECOND = (*DOCUMENT, 70, 71, 72), (*DOCUMENT, 80, 81)
OTHER = (*DOCUMENT[:300], *DOCUMENT[:300])  # shares a block, and a part of another one
KINDS = ("llama", "qwen35", "lfm2", "mamba2", "falcon-h1", "gemma3", "t5")


@pytest.fixture(autouse=True)
def no_file_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let files wait for a disk that is busy with other tests: a file that finds no place in the queue is dropped."""
    monkeypatch.setattr(kept_prompts, "QUEUED", 32)


def load(path: Path, cache: Path, **options: Any) -> edgedec.Engine:
    """Load a model that keeps prompts."""
    usual: dict[str, Any] = {"n_ctx": N_CTX, "n_threads": 1, "draft": "off", "prompt_cache": "1GB", "offline": True}
    return edgedec.load(path, runtime="cpu", cache_dir=cache, **usual | options)


def asked(engine: edgedec.Engine, prompt: tuple[int, ...]) -> tuple[int, ...]:
    """Return a prompt as a model takes it: one with an encoder has it end as a source, and a text begin behind that."""
    return (*(3 + i % 100 for i in prompt), END, PAD) if engine.card.architecture == "t5" else prompt


def held(engine: edgedec.Engine, prompt: tuple[int, ...]) -> int:
    """Return how many of a long prompt's tokens come from the disk: blocks of it, or its source."""
    return len(prompt) + 1 if engine.card.architecture == "t5" else HELD


def texts(engine: edgedec.Engine, *prompts: tuple[int, ...], **options: Any) -> list[tuple[int, ...]]:
    """Return what follows prompts, one after another."""
    return [engine.generate(asked(engine, prompt), **WISH | options).token_ids for prompt in prompts]


def reused(engine: edgedec.Engine, prompt: tuple[int, ...], **options: Any) -> int:
    """Return how much of a prompt an engine did not read."""
    return engine.generate(asked(engine, prompt), **WISH | options).stats.n_reused_tokens


def files(cache: Path, kind: str = "*") -> list[Path]:
    """Return the files that are kept."""
    return sorted((cache / "prompts").glob(f"*/*.{kind}"))


def wait_for(cache: Path, n_files: int) -> None:
    """Wait until so many files are written."""
    for _ in range(1000):
        if len(files(cache)) == n_files:
            return
        time.sleep(0.01)
    raise AssertionError(f"{len(files(cache))} files are written, not {n_files}")


@pytest.fixture(scope="module", params=KINDS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model: with attention alone, with each kind of states, and with an encoder."""
    if request.param == "t5":
        return TinyT5(n_ctx=700).write(tmp_path_factory.mktemp("t5") / "m.gguf")
    return write_tiny(tmp_path_factory.mktemp(request.param) / "m.gguf", ARCHITECTURES[request.param])


@pytest.fixture(scope="module")
def plain(path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, ...], tuple[int, ...]]:
    """The texts of an engine that keeps nothing."""
    found: dict[tuple[int, ...], tuple[int, ...]] = {}
    for prompt in (FIRST, SECOND, OTHER):
        with load(path, tmp_path_factory.mktemp("cache"), prompt_cache=None) as engine:
            (found[prompt],) = texts(engine, prompt)
    return found


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama") / "m.gguf", n_embd=32, n_ff=32, n_head=2, n_head_kv=1, n_layer=1)


@pytest.fixture
def of_llama(llama: Path, tmp_path: Path) -> dict[tuple[int, ...], tuple[int, ...]]:
    """The texts of the llama without anything kept."""
    with load(llama, tmp_path / "none", prompt_cache=None) as engine:
        return dict(zip((FIRST, SECOND, OTHER), texts(engine, FIRST, SECOND, OTHER), strict=True))


def test_another_process_begins_with_what_was_read(path: Path, plain: dict[Any, Any], tmp_path: Path) -> None:
    """With the bits of reading; where there are states, up to the last block that has them."""
    with load(path, tmp_path) as engine:
        assert texts(engine, FIRST) == [plain[FIRST]]
    with load(path, tmp_path) as engine:
        for prompt in (SECOND, FIRST, OTHER, SECOND):
            assert texts(engine, prompt) == [plain[prompt]]
    for prompt in (SECOND, OTHER):
        with load(path, tmp_path) as engine:
            n_held, result = held(engine, prompt), engine.generate(asked(engine, prompt), **WISH)
        assert (result.token_ids, result.stats.n_reused_tokens) == (plain[prompt], n_held)
        assert f"{n_held} tokens of the prompt came from the prompt cache on the disk" in result.stats.explanation


def test_going_back_begins_at_the_states_on_the_disk(
    path: Path, plain: dict[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the engine that has read a longer text, whose own states of that place are gone; files are written at once."""

    def write(files: BlockFiles, name: str, data: Any, used_s: float) -> None:
        files._write(_Job(files._folder / name, data, used_s))

    monkeypatch.setattr(BlockFiles, "write", write)
    shorter = (*DOCUMENT[:520], 90, 91)
    with load(path, tmp_path / "none", prompt_cache=None) as engine:
        (text,) = texts(engine, shorter)
    with load(path, tmp_path) as engine:
        assert texts(engine, FIRST) == [plain[FIRST]]
        kind = path.parent.name[:-1]
        wait_for(tmp_path, {"llama": 3, "gemma3": 3, "mamba2": 2, "t5": 1}.get(kind, 5))
        result = engine.generate(asked(engine, shorter), **WISH)
        n_reused = 520 if kind in ("llama", "gemma3", "lfm2") else 2 * BLOCK  # lfm2 has the columns of the place itself
        n_reused = 0 if kind == "t5" else n_reused  # it is another source
        assert (result.token_ids, result.stats.n_reused_tokens) == (text, n_reused)
        assert texts(engine, FIRST) == [plain[FIRST]]


@pytest.mark.parametrize("kind", ["pairs", "block"])
def test_a_trained_head_knows_what_is_kept(tmp_path: Path, kind: str) -> None:
    """Behind a prompt from the disk its scores have the bits of those behind one that was read."""
    model, head = write_tiny(tmp_path / "m.gguf", FLOATS), tmp_path / "head"
    if kind == "pairs":
        write_head(head, OF_FLOATS)
    else:
        write_block(head, tiny_block(of_floats({"n_layer": 2, "size": 6})))
    ids = np.array(FIRST, np.int32)

    def scores(cache: Path, n_bytes: int, n_files: int) -> tuple[int, list[float]]:
        options = LoadOptions(n_ctx=N_CTX, draft_head=head, prompt_cache_bytes=n_bytes, cache_dir=cache, n_threads=1)
        with Cpu().load(model, options) as loaded, closing(loaded.session(N_CTX)) as session:
            assert isinstance(session, RecallingSession)
            n = session.recall(FIRST, 0)
            session.forward(ids[n:], n_past=n)
            assert session.draft_head is not None
            found = session.draft_head.begin(len(ids), 9)
            assert found is not None
            found = found.tolist()
            for i in range(100):  # what found no place among those that are written is tried again
                if len(files(cache)) == n_files:
                    break
                session.forward(ids[:1], n_past=len(ids) + i)
                time.sleep(0.01)
            assert len(files(cache)) == n_files
            return n, found

    n, read = scores(tmp_path / "none", 0, 0)
    assert n == 0
    assert scores(tmp_path, 1 << 30, 4) == (0, read)
    assert scores(tmp_path, 1 << 30, 4) == (2 * BLOCK, read)
    files(tmp_path, "head-*")[0].unlink()
    assert scores(tmp_path, 1 << 30, 3)[0] == 2 * BLOCK


def test_what_two_contexts_and_threads_keep_is_one(llama: Path, of_llama: dict[Any, Any], tmp_path: Path) -> None:
    """The layout depends on neither; a prompt of the other length finds the blocks."""
    with load(llama, tmp_path) as engine:
        texts(engine, FIRST)
    with load(llama, tmp_path, n_ctx=2000, n_threads=2) as engine:
        result = engine.generate(SECOND, **WISH)
    assert (result.token_ids, result.stats.n_reused_tokens) == (of_llama[SECOND], HELD)


@pytest.mark.parametrize("draft", ["suffix", "suffix+recycling", "skip"])
def test_drafts(llama: Path, of_llama: dict[Any, Any], tmp_path: Path, draft: str) -> None:
    """Chains, trees and fewer layers change no block, and drafters see the whole prompt."""
    for prompt in (FIRST, SECOND):
        with load(llama, tmp_path, draft=draft) as engine:
            assert texts(engine, prompt) == [of_llama[prompt]]
            assert texts(engine, OTHER) == [of_llama[OTHER]]
    with load(llama, tmp_path) as engine:
        assert texts(engine, FIRST, SECOND, OTHER) == [of_llama[p] for p in (FIRST, SECOND, OTHER)]


def test_joint_requests_and_several_texts(path: Path, plain: dict[Any, Any], tmp_path: Path) -> None:
    """Three at a time, with prompts that begin alike; what they keep together serves forks of one session later."""
    prompts = (FIRST, SECOND, OTHER)
    for _ in range(2):
        with load(path, tmp_path, n_parallel=3) as engine, ThreadPoolExecutor(3) as pool:
            assert list(pool.map(lambda p: texts(engine, p)[0], prompts)) == [plain[prompt] for prompt in prompts]
    with load(path, tmp_path, n_texts=2) as engine:
        found = engine.samples(asked(engine, SECOND), 2, **WISH)
        assert (found[0].token_ids, found[0].stats.n_reused_tokens) == (plain[SECOND], held(engine, SECOND))


@pytest.mark.parametrize("kv_type", ["q8_0", "q8_0/q4_0", "q4_0", "gear"])
def test_kv_types_are_apart(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, kv_type: str) -> None:
    """Each finds its own blocks alone."""
    model = write_tiny(tmp_path / "m.gguf", ARCHITECTURES["qwen2"])
    cache = tmp_path / "cache"
    with load(model, cache) as engine:
        texts(engine, FIRST)
    with load(model, cache, kv_type=kv_type) as engine:
        assert reused(engine, FIRST) == 0
        (text,) = texts(engine, SECOND)
    with load(model, cache, kv_type=kv_type) as engine:
        result = engine.generate(SECOND, **WISH)
    assert (result.token_ids, result.stats.n_reused_tokens) == (text, HELD)


def test_adapters_are_apart(tmp_path: Path) -> None:
    """A request's scales are part of the address."""
    base = tiny_llama(tmp_path / "base.gguf", n_layer=1)
    adapter, cache = tiny_adapter(tmp_path / "a.gguf", base, seed=1), tmp_path / "cache"
    found = dict[float, tuple[int, ...]]()
    for keeps in (None, "1GB"):
        for _ in range(2):
            for scale in (1.0, 0.5, 0.0):
                with load(base, cache, lora=[adapter], prompt_cache=keeps) as engine:
                    result = engine.generate(FIRST, lora=[scale], **WISH)
                assert found.setdefault(scale, result.token_ids) == result.token_ids
                assert result.stats.n_reused_tokens in ((0, HELD) if keeps else (0,))
    assert len(files(cache)) == 3 * 3


def test_what_the_cap_evicts_is_read(llama: Path, of_llama: dict[Any, Any], tmp_path: Path) -> None:
    """A cap of two blocks: whatever is left of a prompt's beginning is used, and the cap holds."""
    with load(llama, tmp_path) as engine:
        texts(engine, FIRST)
    n_bytes = files(tmp_path)[0].stat().st_size
    for prompt in (SECOND, OTHER, FIRST):
        with load(llama, tmp_path, prompt_cache=2 * n_bytes) as engine:
            assert texts(engine, prompt) == [of_llama[prompt]]
    assert len(files(tmp_path)) <= 2


def test_damage_is_read_anew(path: Path, plain: dict[Any, Any], tmp_path: Path) -> None:
    """A changed byte in each file in turn: the text is the same, and a file that was read is whole again afterwards."""
    are_whole = list[bool]()
    with load(path, tmp_path) as engine:
        texts(engine, FIRST)
    for file in files(tmp_path):
        before = file.read_bytes()
        file.write_bytes(before[:-5] + bytes([before[-5] ^ 4]) + before[-4:])
        with load(path, tmp_path) as engine:
            assert texts(engine, FIRST) == [plain[FIRST]]
        with load(path, tmp_path) as engine:
            assert reused(engine, FIRST) == held(engine, FIRST)
        are_whole.append(file.read_bytes() == before)
    assert are_whole.count(False) == len(files(tmp_path, "state")) // 2  # those before the states that a text begins at


def test_a_full_disk_is_said_once(llama: Path, of_llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The texts go on, and say why nothing is kept."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("edgedec_runtimes.shared.block_files.write_atomically", refuse)
    with load(llama, tmp_path) as engine:
        said: list[str] = []
        while not said:  # the writing is another thread's
            result = engine.generate(FIRST, **WISH)
            assert result.token_ids == of_llama[FIRST]
            said = [sentence for sentence in result.stats.explanation if "No space left on device" in sentence]


@pytest.mark.parametrize("path", ["qwen35"], indirect=True)
def test_states_find_a_place_before_blocks_that_can_wait(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a disk that is slower than the reading, blocks are written later; no later forward has the states."""
    go, real, cache = threading.Event(), write_atomically, path.parent / "slow"

    def slow(*args: Any, **options: Any) -> None:
        go.wait(20)
        real(*args, **options)

    monkeypatch.setattr("edgedec_runtimes.shared.block_files.write_atomically", slow)
    with load(path, cache) as engine:
        for output in engine.stream((*DOCUMENT, *DOCUMENT[:170]), max_tokens=20, ignore_end=True):
            assert output.text is not None
            go.set()
            time.sleep(0.02)
    monkeypatch.undo()
    with load(path, cache) as engine:
        assert reused(engine, (*DOCUMENT, *DOCUMENT[:172])) == 3 * BLOCK


def test_cancelled_while_reading(llama: Path, of_llama: dict[Any, Any], tmp_path: Path) -> None:
    """What was read by then is kept, and serves the next one, here and elsewhere."""
    cancel = CancelToken()
    with load(llama, tmp_path) as engine:
        result = engine.generate(FIRST, cancel=cancel, on_progress=lambda _: cancel.cancel(), **WISH)
        assert result.finish_reason == "cancelled"
    for n_reused in (BLOCK, HELD):
        with load(llama, tmp_path) as engine:
            result = engine.generate(FIRST, **WISH)
        assert (result.token_ids, result.stats.n_reused_tokens) == (of_llama[FIRST], n_reused)


def test_a_text_of_other_forwards_is_not_kept(llama: Path, of_llama: dict[Any, Any], tmp_path: Path) -> None:
    """Forwards of one's own on a session that has read a prompt write nothing under the prompt's addresses."""
    with (
        load(llama, tmp_path) as engine,
        prompt_read(engine.pool, engine.requests.plain(FIRST[:300], {}), CancelToken()) as read,
    ):
        wrong = np.array(FIRST[:600][::-1], np.int32)
        read.slot.session.forward(wrong, n_past=0)
        read.slot.session.forward(wrong[:300], n_past=300)
    with load(llama, tmp_path) as engine:
        assert texts(engine, FIRST) == [of_llama[FIRST]]


def test_a_sliding_context_and_short_prompts_keep_nothing(llama: Path, tmp_path: Path) -> None:
    """Nor does an engine that was not asked to; a draft model's own sessions never do."""
    for prompt, options in (
        (FIRST, {"lossy": Lossy(slide=True)}),
        (FIRST, {"prompt_cache": None}),
        (FIRST[: BLOCK - 1], {}),
    ):
        with load(llama, tmp_path, **options) as engine:
            texts(engine, prompt)
    assert files(tmp_path) == []
    with load(llama, tmp_path, draft="model", draft_model=llama) as engine:
        texts(engine, FIRST)
    assert len(files(tmp_path)) == 3
    with pytest.raises(RequestError, match="no size"):
        load(llama, tmp_path, prompt_cache="much", lossy=Lossy(slide=True))


def test_what_keeps_nothing_says_so(llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of a size that was asked for by name: a runtime that can't, and options that change what is read."""
    options: dict[str, Any] = {"runtime": "reference", "cache_dir": tmp_path, "n_ctx": 64, "offline": True}
    with edgedec.load(llama, prompt_cache="auto", **options):
        assert caplog.messages == []
    why = ["no prompts are kept on the disk: the cpu runtime can, for lossless texts from left to right"]
    with edgedec.load(llama, prompt_cache="1GB", **options):
        assert caplog.messages == why
    half, deep = Lossy(methods={"prompt_keep": {"keep": 0.5}}), tiny_llama(tmp_path / "deep.gguf", n_layer=5)
    for lossy, n_parallel in ((Lossy(slide=True), 1), (Lossy(layer_skip=1.1, layer_skip_force=True), 2), (half, 1)):
        caplog.clear()
        with load(deep, tmp_path, lossy=lossy, n_parallel=n_parallel, n_ctx=128):
            assert caplog.messages == why


def test_a_conversation_is_kept_with_its_answers(llama: Path, tmp_path: Path) -> None:
    """The answer's tokens are kept once the next message has them in its prompt."""
    with load(llama, tmp_path) as engine:
        answer = engine.generate(FIRST, **WISH | {"max_tokens": 170}).token_ids
        turn = (*FIRST, *answer, 90, 91)
        (text,) = texts(engine, turn)
    with load(llama, tmp_path) as engine:
        assert reused(engine, turn) == len(turn) // BLOCK * BLOCK
        assert texts(engine, turn) == [text]


def test_two_engines_keep_and_read_at_once(llama: Path, of_llama: dict[Any, Any], tmp_path: Path) -> None:
    """While a third deletes what they keep."""
    done = threading.Event()

    def delete() -> None:
        while not done.wait(0.002):
            for file in files(tmp_path)[::2]:
                if file.suffix != ".tmp":
                    os.unlink(file)

    thread = threading.Thread(target=delete)
    thread.start()
    try:
        with load(llama, tmp_path) as one, load(llama, tmp_path) as two, ThreadPoolExecutor(2) as pool:
            for _ in range(4):
                found = [pool.submit(texts, engine, FIRST, SECOND, OTHER) for engine in (one, two)]
                assert [future.result() for future in found] == [[of_llama[p] for p in (FIRST, SECOND, OTHER)]] * 2
                for engine in (one, two):
                    for slot in engine.pool.slots:
                        slot.cached_ids, slot.n_exact = [], 0
    finally:
        done.set()
        thread.join()


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen35"])
def test_pictures(tmp_path: Path, name: str) -> None:
    """A prompt with the same picture finds it; one with another picture what stands before; places are kept, too."""
    model, cache = write_tiny(tmp_path / "m.gguf", replace(ARCHITECTURES[name], types=("Q8_0",))), tmp_path / "cache"
    block = Block(80, 10, 8, mutual=name == "gemma3")

    def picture(number: int, n_embd: int) -> PictureRows:
        rows = 4 * np.random.default_rng(number).standard_normal((80, n_embd)).astype(np.float32)
        return PictureRows(block, rows, tuple(-(2**61) - 1000 * number - i for i in range(80)))

    def write(number: int, keeps: str | None) -> tuple[tuple[int, ...], int]:
        with load(model, cache, prompt_cache=keeps) as engine:
            seen = picture(number, engine.card.n_embd)
            ids = (*DOCUMENT[:300], *seen.ids, *DOCUMENT[300:500])
            result = engine.generate(ids, pictures={seen.ids[0]: seen}, **WISH)
            return result.token_ids, result.stats.n_reused_tokens

    expected = [write(number, None)[0] for number in (1, 2)]
    assert write(1, "1GB") == (expected[0], 0)
    assert write(1, "1GB") == (expected[0], HELD)
    n_before = 0 if name == "qwen35" else BLOCK  # the states are behind the picture
    assert write(2, "1GB") == (expected[1], n_before)
    assert [write(number, "1GB") for number in (2, 1)] == [(expected[1], HELD), (expected[0], HELD)]


@pytest.mark.parametrize("options", [{}, {"kv_type": "q8_0"}, {"draft": "suffix"}, {"n_ctx": 1000, "n_threads": 2}])
@pytest.mark.parametrize("path", ["t5"], indirect=True)
def test_a_source_is_found_whole(path: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    """Behind it stands any text; sources that begin or end alike, and short ones, are others; a second one is kept."""
    sources = FIRST, (*FIRST, 73), FIRST[:-1], (9, *FIRST[1:]), FIRST[:BLOCK], FIRST[: BLOCK - 2]

    def write(keeps: str | None, behind: tuple[int, ...] = ()) -> list[tuple[tuple[int, ...], int]]:
        found = []
        for source in sources:
            with load(path, tmp_path, prompt_cache=keeps, **options) as engine:
                result = engine.generate((*asked(engine, source), *behind), **WISH)
                found.append((result.token_ids, result.stats.n_reused_tokens))
        return found

    plain, behind = write(None), write(None, (50, 51))
    assert write("1GB") == plain
    assert len(files(tmp_path)) == len(sources) - 1
    held = [len(source) + 1 for source in sources[:-1]] + [0]
    assert write("1GB") == [(text, n) for (text, _), n in zip(plain, held, strict=True)]
    assert write("1GB", (50, 51)) == [(text, n) for (text, _), n in zip(behind, held, strict=True)]


@pytest.mark.parametrize("path", ["t5"], indirect=True)
def test_a_source_that_was_not_read_is_not_kept(
    path: Path, plain: dict[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the encoder was cancelled, or read another one of that length, or no page had room for its end."""
    real = CpuSourceModel._encode

    def cancelled(model: CpuSourceModel, session: CpuSourceSession) -> None:
        session.cancel()
        real(model, session)

    with load(path, tmp_path) as engine:
        monkeypatch.setattr(CpuSourceModel, "_encode", cancelled)
        assert engine.generate(asked(engine, FIRST), **WISH).finish_reason == "cancelled"
        monkeypatch.undo()
        prompt = asked(engine, FIRST)
        for n_ctx, source in ((N_CTX, (9, *prompt[1:-1])), (len(prompt), prompt[:-1])):
            with closing(engine.model.session(n_ctx)) as session:
                assert isinstance(session, RecallingSession)
                assert session.recall(prompt, 0) == 0
                session.forward(np.array(source, np.int32), n_past=0)
                session.forward(np.array(prompt[-1:], np.int32), n_past=len(source))
    assert files(tmp_path) == []
    for n_reused in (0, len(FIRST) + 1):
        with load(path, tmp_path) as engine:
            result = engine.generate(asked(engine, FIRST), **WISH)
        assert (result.token_ids, result.stats.n_reused_tokens) == (plain[FIRST], n_reused)
