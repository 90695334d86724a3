"""Prompts that are read in part: the text is the target's own after the tokens that the reading model chooses."""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.decoding.stopped import Stopped
from support.forwards import evaluated
from support.models.tiny_models import tiny_llama
from support.processes.command_line import run_here

import edgedec
from edgedec.api.options import Lossy
from edgedec.errors import CapabilityError, OptionError, RequestError
from edgedec.grammar import Grammar
from edgedec.load_options import LoadOptions
from edgedec.model import LayerSet, Model, RowGroup, Span
from edgedec_methods.prompt_keep import LAST, LEAST, WINDOW, KeptSession, PromptKeep, Reader, frame_of, kept_tokens
from edgedec_runtimes.cpu.runtime import Cpu

pytestmark = pytest.mark.slow

N_CTX = 768
RNG = np.random.default_rng(11)
PROMPT = [1, *RNG.integers(5, 260, 599).tolist()]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24, "ignore_end": True}
DRAWN: dict[str, Any] = {"temperature": 0.9, "seed": 3, "max_tokens": 24, "ignore_end": True}
NO_ROWS = np.empty(0, np.int32)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The files of a target and a reading model of one vocabulary."""
    folder = tmp_path_factory.mktemp("keep")
    target = tiny_llama(folder / "target.gguf", seed=1, n_ctx_train=N_CTX)
    return target, tiny_llama(folder / "reader.gguf", seed=2, n_layer=8, n_ff=64, n_ctx_train=N_CTX)


@pytest.fixture(scope="module")
def models(paths: tuple[Path, Path]) -> Iterator[tuple[Model, Model]]:
    """They on the cpu runtime."""
    options = LoadOptions(n_threads=1, n_ctx=N_CTX)
    with Cpu().load(paths[0], options) as target, Cpu().load(paths[1], options) as reader:
        yield target, reader


def kept(models: tuple[Model, Model], prompt: Sequence[int], keep: float, *, own: bool) -> list[int]:
    """Return the tokens of a prompt that are to be read, by one forward over all of it."""
    model = models[0] if own else models[1]
    n_layer = 1 if own else 2  # a quarter of the target's two, and of the reading model's eight
    run = LayerSet.of(model.card.n_layer, range(n_layer))
    session = model.session(N_CTX)
    heard, rising = tuple(range(n_layer // 3, n_layer)), np.arange(1, WINDOW + 1, dtype=np.float32) / np.float32(WINDOW)
    found = evaluated(
        session,
        0,
        RowGroup(np.array(prompt, np.int32), span=Span(layers=run)),
        rows=NO_ROWS,
        mass=dict.fromkeys(heard, rising),
    ).mass
    session.close()
    assert found is not None, "it was asked for"
    places = kept_tokens(found.max(axis=(0, 1)), frame_of(model.tokenizer, prompt), keep)
    return [prompt[i] for i in places]


def loaded(paths: tuple[Path, Path], *, own: bool, keep: float = 0.5, **options: Any) -> edgedec.Engine:
    """Load the target with its reading model, or with its own first layers in that place."""
    chosen: dict[str, Any] = {"runtime": "cpu", "n_ctx": N_CTX, "n_threads": 1, "offline": True} | options
    method = {"keep": keep} if own else {"keep": keep, "model": paths[1]}
    return edgedec.load(paths[0], lossy=Lossy(methods={"prompt_keep": method}), **chosen)


@pytest.mark.parametrize("own", [False, True])
def test_the_text_is_the_target_s_after_the_kept_tokens(
    paths: tuple[Path, Path], models: tuple[Model, Model], own: bool
) -> None:
    """Read cold, once more, behind another prompt, and as the next turn of a chat; the statistics count what was read.

    A drawn text has its own noise, by the text's positions: it is the same however the KV cache came about.
    """
    second = [*PROMPT, *RNG.integers(5, 260, 60).tolist()]
    other = [*PROMPT[:300], *second[400:]]
    with edgedec.load(paths[0], runtime="cpu", n_ctx=N_CTX, n_threads=1, draft="off", offline=True) as plain:
        expected = [plain.generate(kept(models, p, 0.5, own=own), **GREEDY).token_ids for p in (PROMPT, second, other)]
    with loaded(paths, own=own) as engine:
        found = engine.generate(PROMPT, **GREEDY)
        assert found.token_ids == expected[0]
        by = "its first layers" if own else "reader"
        assert found.stats.notes == [f"lossy: 300 of 600 prompt tokens were read, chosen by {by}"]
        assert any(line.startswith("prompt read in part: 300 tokens left out at ") for line in found.stats.explanation)
        again = engine.generate(PROMPT, **GREEDY)
        assert (again.token_ids, again.stats.n_reused_tokens) == (expected[0], 599)
        for prompt, ids in ((second, expected[1]), (other, expected[2]), (PROMPT, expected[0])):
            assert engine.generate(prompt, **GREEDY).token_ids == ids
        drawn = engine.generate(PROMPT, **DRAWN).token_ids
        engine.generate([*PROMPT, *drawn, *second[:20]], **DRAWN)
        assert engine.generate(PROMPT, **DRAWN).token_ids == drawn
    with loaded(paths, own=own) as engine:
        assert engine.samples(PROMPT, n=2, **DRAWN)[0].token_ids == drawn


def test_drafts_stops_and_grammars_keep_the_text(paths: tuple[Path, Path]) -> None:
    """Drafts that are looked up in all of the prompt; a stop string, which rolls the text back; a grammar."""
    repeated = [*PROMPT[:100] * 5, *PROMPT[100:200]]
    kept_to = {"grammar": Grammar.regex("[a-c]{12}"), "ignore_end": False}
    ways: list[dict[str, Any]] = [GREEDY, DRAWN, GREEDY | kept_to, DRAWN | kept_to]
    texts = {}
    for draft in ("off", "suffix"):
        with loaded(paths, own=True, draft=draft) as engine:
            found = [engine.generate(repeated, **way) for way in ways]
            text = engine.generate(repeated, **GREEDY)
            stop = text.text[len(text.text) // 2 :][:3]
            found.append(engine.generate(repeated, **GREEDY, stop=(stop,)))
            texts[draft] = [each.token_ids for each in found]
            if draft == "suffix":
                assert sum(each.stats.n_draft_tokens for each in found) > 0
    assert texts["off"] == texts["suffix"]


def test_parallel_requests_have_the_texts_of_single_ones(paths: tuple[Path, Path]) -> None:
    """Three prompts at the same time on two sessions, each read by the target's own first layers."""
    prompts = [PROMPT, PROMPT[::-1], [*PROMPT[:300], *PROMPT[:250]]]
    with loaded(paths, own=True) as engine:
        expected = [engine.generate(prompt, **DRAWN).token_ids for prompt in prompts]
    with loaded(paths, own=True, n_parallel=2) as engine, ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda prompt: engine.generate(prompt, **DRAWN).token_ids, prompts))
    assert found == expected


def test_a_short_prompt_is_read_whole(paths: tuple[Path, Path]) -> None:
    """With the text of the plain model, and a note in the explanation only."""
    with edgedec.load(paths[0], runtime="cpu", n_ctx=N_CTX, n_threads=1, draft="off", offline=True) as plain:
        expected = plain.generate(PROMPT[:LEAST], **DRAWN).token_ids
    with loaded(paths, own=False, keep=0.1) as engine:
        found = engine.generate(PROMPT[:LEAST], **DRAWN)
        assert (found.token_ids, found.stats.notes) == (expected, [])
        assert any(line.startswith("prompt read whole") for line in found.stats.explanation)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("where", ["reader", "target"])
def test_what_is_stopped_in_the_middle_is_read_anew(models: tuple[Model, Model], own: bool, where: str) -> None:
    """After Ctrl-C while either reads the prompt, the next try gives the bits of a cold one."""
    prompt = np.array(PROMPT, np.int32)
    inner = Stopped(models[0].session(N_CTX))
    reading = inner if own else Stopped(models[1].session(N_CTX))
    session = KeptSession(inner, Reader(reading, is_target=own), 0.5)
    with session.generating(len(prompt)):
        expected = session.forward(prompt, n_past=0).logits.copy()
        session.forward(prompt[:3], n_past=600)
    changed = prompt[::-1].copy()
    with session.generating(len(prompt)):
        (reading if where == "reader" else inner).n_times = 1
        with pytest.raises(KeyboardInterrupt):
            session.forward(changed, n_past=0)
        n_held = session.n_cached
        assert n_held in (0, 603)
        found = session.forward(prompt[min(n_held, 599) :], n_past=min(n_held, 599)).logits
        assert found.tobytes() == expected.tobytes()
    session.close()


def test_what_is_kept() -> None:
    """The first and last tokens, control tokens with those behind them, and stretches around the best tokens."""
    worth, frame = np.zeros(2000, np.float32), np.zeros(2000, np.bool_)
    worth[[700, 1000]] = 1, 0.5
    frame[1500] = True
    found = kept_tokens(worth, frame, 0.1)
    assert len(found) == LEAST
    held = set(found.tolist())
    assert {*range(32), *range(2000 - LAST, 2000), *range(1500, 1504), *range(684, 716), *range(984, 1016)} <= held
    assert kept_tokens(worth, frame, 1.0).tolist() == list(range(2000))
    ends = {*range(32), *range(2000 - LAST, 2000)}
    assert ends <= set(kept_tokens(worth, np.ones(2000, np.bool_), 0.1).tolist())


def test_what_does_not_fit_is_refused(paths: tuple[Path, Path], models: tuple[Model, Model]) -> None:
    """Shares out of range, other methods, pictures, and logits of tokens that were left out."""
    for keep in (None, 0, -1, 1.5, float("nan"), "0.3"):
        with pytest.raises(OptionError, match="share"):
            PromptKeep(keep)  # type: ignore[arg-type]
    with pytest.raises(CapabilityError, match="slide"):
        edgedec.load(
            paths[0], runtime="cpu", n_ctx=N_CTX, lossy=Lossy(slide=True, methods={"prompt_keep": {"keep": 0.3}})
        )
    with pytest.raises(RequestError, match="one of them"):
        loaded(paths, own=False, draft_model=paths[1])
    target = models[0].session(N_CTX)
    session = KeptSession(target, Reader(target, is_target=True), 0.5)
    with session.generating(600):
        for rows in ("all", np.arange(0, 600, 7, dtype=np.int32)):
            with pytest.raises(CapabilityError, match="left out"):
                session.forward(np.array(PROMPT, np.int32), n_past=0, rows=rows)
        some = session.forward(np.array(PROMPT, np.int32), n_past=0, rows=np.array([0, 599], np.int32)).logits
        assert some.shape == (2, models[0].card.n_vocab)
    with pytest.raises(CapabilityError, match="pictures"):
        evaluated(session, 0, RowGroup(vectors=np.zeros((1, 64), np.float32)))
    session.close()


def test_the_command_line_says_what_was_read(paths: tuple[Path, Path]) -> None:
    """With a reading model; a model without a share is refused by the option's name."""
    text, options = "abcdefghij " * 60, ("--raw", "--runtime", "cpu", "-t", "0", "-n", "8", "--method=ignore-end")
    given = ("--method", "prompt-keep:keep=0.5", "--method", f"prompt-keep:model={paths[1]}")
    result = run_here("run", paths[0], text, *options, *given, "--json", "--explain", "-v")
    assert result.code == 0, result.err
    n_prompt = json.loads(result.out)["stats"]["n_prompt_tokens"]
    assert f"of {n_prompt} prompt tokens were read, chosen by reader" in result.err
    assert "prompt read in part: " in result.err
    result = run_here("run", paths[0], text, *options, *given[2:])
    assert (result.code, "--method prompt-keep:keep is missing" in result.err) == (40, True)
    result = run_here("plan", paths[0], *given, "--runtime", "cpu")
    assert b"reading model: " in result.out
