"""Adapters of requests: each text is that of an engine that has no other adapters, whatever was written before it."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.models.tiny_adapters import tiny_adapter
from support.models.tiny_models import tiny_llama

import edgedec
from edgedec.decoding.reading import prompt_read
from edgedec.errors import ModelFormatError, OptionError, RequestError
from edgedec.progress import CancelToken
from edgedec_apps.embedding import embed
from edgedec_apps.prompt_cache import load_prompt_cache, read_prompt_cache, save_prompt_cache, write_prompt_cache

pytestmark = pytest.mark.slow
SETS = ((1.0, 0.0), (0.0, 0.5), (0.0, 0.0), (1.0, 0.5), (1.0, 0.0))
PROMPT = "a prompt that is longer than a page of the cache, so that parallel requests can take parts of it over: one"
WISH: dict[str, Any] = {"max_tokens": 24, "ignore_end": True, "seed": 5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama and two adapters of it."""
    found = tmp_path_factory.mktemp("adapters")
    tiny_llama(found / "base.gguf")
    for seed, name in enumerate(("a", "b"), 1):
        tiny_adapter(found / f"{name}.gguf", found / "base.gguf", seed=seed)
    return found


def opened(folder: Path, **options: Any) -> edgedec.Engine:
    """Return an engine with both adapters."""
    lora = [folder / "a.gguf", (folder / "b.gguf", 0.5)]
    usual: dict[str, Any] = {"lora": lora, "n_threads": 1, "n_ctx": 256}
    return edgedec.load(folder / "base.gguf", runtime="cpu", **usual | options)


Plain = dict[tuple[tuple[float, ...], float], tuple[int, ...]]


@pytest.fixture(scope="module")
def plain(folder: Path) -> Plain:
    """The tokens of PROMPT by scales and temperature, from engines that were loaded with these adapters alone."""
    found: Plain = {}
    for scales in set(SETS):
        lora = [(folder / f"{name}.gguf", scale) for name, scale in zip("ab", scales, strict=True) if scale]
        with opened(folder, lora=lora, draft="off") as engine:
            for temperature in (0.0, 0.9):
                found[scales, temperature] = engine.generate(PROMPT, temperature=temperature, **WISH).token_ids
    assert len(set(found.values())) == len(found), "each set of adapters has texts of its own"
    return found


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[edgedec.Engine]:
    """Three requests at once, with drafters whose drafts are always verified."""
    with opened(folder, n_parallel=3, draft="suffix+recycling") as found:
        yield found


def test_one_after_another(folder: Path, plain: Plain) -> None:
    """Adapter A, B, none, both, A again on one session, with drafts: == plain decoding with those adapters alone."""
    with opened(folder, draft="suffix+recycling") as engine:
        for scales in SETS:
            for temperature in (0.0, 0.9, 0.0):
                generation = engine.generate(PROMPT, lora=scales, temperature=temperature, **WISH)
                assert generation.token_ids == plain[scales, temperature]
            assert generation.stats.n_reused_tokens == len(engine.prompt_ids(PROMPT)) - 1  # of the same adapters
        generation = engine.generate(PROMPT, temperature=0.0, **WISH)
        assert generation.token_ids == plain[(1.0, 0.5), 0.0]  # those of load
        assert "with a.gguf × 1, b.gguf × 0.5" in generation.stats.notes
        engine.lora = (0.0, 0.0)
        assert engine.generate(PROMPT, temperature=0.0, **WISH).token_ids == plain[(0.0, 0.0), 0.0]


def test_in_parallel(engine: edgedec.Engine, plain: Plain) -> None:
    """Ten requests of four sets of adapters on three sessions at once: each text is its own set's."""
    jobs = [(scales, temperature) for temperature in (0.0, 0.9) for scales in SETS]
    begin = threading.Barrier(len(jobs))

    def ask(scales: Sequence[float], temperature: float) -> tuple[int, ...]:
        begin.wait(60)
        return engine.generate(PROMPT, lora=scales, temperature=temperature, **WISH).token_ids

    for _ in range(2):
        with ThreadPoolExecutor(len(jobs)) as pool:
            found = [future.result(120) for future in [pool.submit(ask, *job) for job in jobs]]
        assert found == [plain[job] for job in jobs]


def test_samples_have_the_adapters_of_their_request(engine: edgedec.Engine, plain: Plain) -> None:
    """Several texts of a prompt are forks of one session: the first one is the text of the seed alone."""
    for scales in SETS:
        texts = engine.samples(PROMPT, 3, lora=scales, temperature=0.9, **WISH)
        assert texts[0].token_ids == plain[scales, 0.9]
        other = engine.generate(PROMPT, lora=scales, temperature=0.9, **{**WISH, "seed": 6})
        assert texts[1].token_ids == other.token_ids


@pytest.mark.parametrize("scales", [(1.0, 0.5), (0.0, 0.5), (0.0, 0.0)])
def test_a_prompt_cache_belongs_to_its_adapters(
    folder: Path, tmp_path: Path, plain: Plain, scales: tuple[float, ...]
) -> None:
    """What is saved after a text with any scales is read by the same engine; texts of these scales alone go on."""
    file, usual = tmp_path / "cache", (1.0, 0.5)
    with opened(folder, draft="off") as engine:
        engine.generate(PROMPT, temperature=0.0, lora=scales, **WISH)
        save_prompt_cache(engine, file)
        assert load_prompt_cache(engine, file) > 0
        n_whole = len(engine.prompt_ids(PROMPT)) - 1
    with opened(folder, draft="off") as engine:
        for its in (scales, usual):
            assert load_prompt_cache(engine, file) > 0
            generation = engine.generate(PROMPT, temperature=0.0, lora=its, **WISH)
            assert generation.token_ids == plain[its, 0.0]
            assert generation.stats.n_reused_tokens == (n_whole if its == scales else 0)
        cache = read_prompt_cache(file, engine.card.fingerprint)
        write_prompt_cache(file, replace(cache, scales=(1.0,)))
        with pytest.raises(ModelFormatError, match="damaged"):
            load_prompt_cache(engine, file)
        write_prompt_cache(file, replace(cache, scales=None))  # as earlier versions did
        with nullcontext() if scales == usual else pytest.raises(ModelFormatError):
            load_prompt_cache(engine, file)
        assert engine.generate(PROMPT, temperature=0.0, **WISH).token_ids == plain[usual, 0.0]


def test_a_cancelled_text_leaves_nothing_to_other_adapters(folder: Path, plain: Plain) -> None:
    """A stream of A that is closed half-way, then B, then A again: each text is its own."""
    with opened(folder, draft="off") as engine:
        stream = engine.stream(PROMPT, lora=(1.0, 0.0), temperature=0.0, **WISH)
        assert [next(stream).token_id for _ in range(3)] == list(plain[(1.0, 0.0), 0.0][:3])
        stream.close()
        for scales in ((0.0, 0.5), (1.0, 0.0)):
            assert engine.generate(PROMPT, lora=scales, temperature=0.0, **WISH).token_ids == plain[scales, 0.0]


def test_a_context_that_slides(folder: Path) -> None:
    """A prompt longer than the context, with A, B and A again: the texts of engines with these adapters alone."""
    wish: dict[str, Any] = {"max_tokens": 30, "temperature": 0.0, "ignore_end": True}
    prompt = PROMPT * 2
    slide: dict[str, Any] = {"n_ctx": 96, "lossy": edgedec.Lossy(slide=True), "draft": "off"}
    expected = {}
    for scales in ((1.0, 0.0), (0.0, 1.0)):
        with opened(folder, lora=[folder / ("a.gguf" if scales[0] else "b.gguf")], **slide) as engine:
            expected[scales] = engine.generate(prompt, **wish).token_ids
    assert len(set(expected.values())) == 2
    with opened(folder, **slide) as engine:
        for scales in ((1.0, 0.0), (0.0, 1.0), (0.0, 1.0), (1.0, 0.0)):
            assert engine.generate(prompt, lora=scales, **wish).token_ids == expected[scales]


def test_what_does_not_go_with_adapters(folder: Path, plain: Plain) -> None:
    """A further model that writes the text is refused; a draft model has no adapters, and changes no text."""
    small = edgedec.Lossy(methods={"switching": {"small_model": str(folder / "base.gguf"), "entropy": 1.0}})
    with pytest.raises(RequestError, match="adapters"):
        opened(folder, lossy=small)
    with opened(folder, draft="model", draft_model=folder / "base.gguf") as engine:
        for scales in SETS:
            generation = engine.generate(PROMPT, lora=scales, temperature=0.0, **WISH)
            assert generation.token_ids == plain[scales, 0.0]


def test_embeddings_and_branches_have_the_adapters_of_the_engine(folder: Path) -> None:
    """A vector and the logits behind a prompt depend on the engine's scales, not on the request before."""
    found = []
    for before in ((0.0, 0.0), (1.0, 0.5)):
        with opened(folder, draft="off") as engine:
            engine.generate(PROMPT, lora=before, temperature=0.0, **WISH)
            vector = embed(engine, ["some text"], pooling="mean")[0].tobytes()
            engine.generate(PROMPT, lora=before, temperature=0.0, **WISH)
            with prompt_read(engine.pool, engine.requests.plain(PROMPT, {}), CancelToken()) as read:
                found.append((vector, read.forward.logits.tobytes()))
    assert found[0] == found[1]


def test_wrong_scales_are_refused(engine: edgedec.Engine, folder: Path) -> None:
    """So many finite numbers as there are adapters; an engine without adapters takes none."""
    for wrong in ((1.0,), (1.0, float("nan")), (1.0, float("inf")), "ab", 1.0, (1.0, "x"), ((1.0, 2.0), (1.0, 2.0))):
        says = "a sequence or None" if wrong in ("ab", 1.0) else "2 numbers, one for each adapter"
        with pytest.raises(OptionError, match=f"it must be {says}"):
            engine.generate(PROMPT, lora=wrong, max_tokens=1)  # type: ignore[arg-type]
    for scale in (float("inf"), float("nan"), True, "x"):
        says = "an adapter's scale must be a number"
        says = says if scale == float("inf") else "it must be a text, a path or a tuple"
        with pytest.raises(RequestError, match=says):
            opened(folder, lora=[(folder / "a.gguf", scale)])
    with opened(folder, lora=()) as bare:
        assert bare.lora == ()
        assert bare.generate(PROMPT, lora=(), max_tokens=1).token_ids
        with pytest.raises(OptionError, match="it must be 0 numbers"):
            bare.generate(PROMPT, lora=(1.0,), max_tokens=1)


def test_runtimes_without_adapters_say_so(folder: Path) -> None:
    """A runtime that takes no adapters names those that do."""
    with pytest.raises(RequestError, match="the reference runtime does not take adapters; use the cpu"):
        edgedec.load(folder / "base.gguf", runtime="reference", lora=[folder / "a.gguf"])
