"""Two models that write in turn: the text, and who wrote what, are those of a slow evaluation of the whole text."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.decoding.stopped import Stopped
from support.forwards import evaluated
from support.models.tiny_models import byte_ids, tiny_llama
from support.processes.command_line import run_here

import edgedec
from edgedec.api.load import open_chosen
from edgedec.api.options import EngineOptions, Lossy
from edgedec.api.plan import choose
from edgedec.errors import CapabilityError, ContextFullError, RequestError, SessionError, UnsupportedModelError
from edgedec.grammar import Grammar
from edgedec.load_options import LoadOptions
from edgedec.loading.second_model import open_companion
from edgedec.logit_ops import NUMPY_ROW_OPS, entropy_of
from edgedec.memory_plan import MemoryTerm
from edgedec.model import Model, RowGroup, Rows
from edgedec.sampling import Noise, SamplingParams, draw
from edgedec.storage.cache_files import cache_folder
from edgedec_methods.switching import LARGE, MOST_ENTROPY, SMALL, WINDOW, SwitchingSession
from edgedec_runtimes.cpu.runtime import Cpu

N_CTX = 256
N_TOKENS = 80
PROMPT = list(range(5, 45))
TAU = 5.55  # bits; the tiny models' entropies lie around it
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "seed": 3},
    "drawn": {"temperature": 0.9, "top_p": 1.0, "seed": 3},
    "penalized": {"temperature": 0.8, "repetition_penalty": 1.3, "logit_bias": {99: 2.0}, "seed": 4},
}
Ids = NDArray[np.int32]
Row = NDArray[np.float32]
Models = tuple[Model, Model]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The files of a large and a small model of one vocabulary."""
    folder = tmp_path_factory.mktemp("switching")
    large = tiny_llama(folder / "large.gguf", seed=1, n_ctx_train=N_CTX)
    return large, tiny_llama(folder / "small.gguf", seed=2, n_ff=64, n_layer=1, n_ctx_train=N_CTX)


@pytest.fixture(scope="module")
def models(paths: tuple[Path, Path]) -> Iterator[Models]:
    """They on the cpu runtime."""
    options = LoadOptions(n_threads=1, n_ctx=N_CTX)
    with Cpu().load(paths[LARGE], options) as large, Cpu().load(paths[SMALL], options) as small:
        yield large, small


def switching(**options: Any) -> Lossy:
    """Return the options of load for two models that write in turn."""
    return Lossy(methods={"switching": options})


def pair(paths: tuple[Path, Path], entropy: float, **options: Any) -> edgedec.Engine:
    """Load both."""
    chosen: dict[str, Any] = {"runtime": "cpu", "n_ctx": N_CTX, "n_threads": 1, "offline": True} | options
    lossy = switching(small_model=paths[SMALL], entropy=entropy, entropy_force=True)
    return edgedec.load(paths[LARGE], lossy=lossy, **chosen)


@dataclass(slots=True)
class Text:
    """A text with who wrote each of its tokens, and the entropy in bits that it was drawn from."""

    token_ids: list[int] = field(default_factory=list)
    writers: list[int] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)

    def statistics(self) -> dict[str, Any]:
        """Return what the statistics of its generation must say."""
        return {
            "large_tokens": self.writers.count(LARGE),
            "small_tokens": self.writers.count(SMALL),
            "switches": sum(self.writers[i] != self.writers[i - 1] for i in range(1, len(self.writers))),
            "entropy_bits": pytest.approx(sum(self.entropies) / len(self.entropies), abs=1e-5),
        }


def bits_of(row: Row) -> float:
    """Return the entropy of a row of logits, by its definition."""
    p = np.exp(row.astype(np.float64) - float(row.max()))
    p /= p.sum()
    p = p[p > 0]
    return -float((p * np.log2(p)).sum())


def last_row(model: Model, text: Sequence[int]) -> Row:
    """Return the row after a text, from a session that evaluates all of it."""
    session = model.session(N_CTX)
    try:
        row: Row = session.forward(np.array(text, np.int32), n_past=0).logits[0].copy()
        return row
    finally:
        session.close()


def slowly(
    models: Models,
    prompt: Sequence[int],
    entropy: float,
    params: SamplingParams,
    n_tokens: int,
    allowed: Sequence[int] | None = None,
) -> Text:
    """Write a text, evaluating all of it for every token, and count who has written how much since the last change."""
    found, writer, own = Text(), LARGE, list[float]()
    for _ in range(n_tokens):
        text = [*prompt, *found.token_ids]
        row = last_row(models[writer], text)
        own.append(bits_of(row))
        found.writers.append(writer)
        found.entropies.append(own[-1])
        if allowed is not None:
            masked = np.full_like(row, -np.inf)
            masked[list(allowed)] = row[list(allowed)]
            row = masked
        found.token_ids.append(draw(row, params, text, Noise(params.seed or 0), len(text)))
        if len(own) >= 5:
            mean = sum(own[-5:]) / 5
            other = LARGE if mean > entropy else SMALL
            if other != writer:
                writer, own = other, []
    return found


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("entropy", [TAU - 0.1, TAU, TAU + 0.1])
def test_the_text_is_that_of_the_slow_way(paths: tuple[Path, Path], models: Models, way: str, entropy: float) -> None:
    """Token by token, with the same counts, and the same again whatever is cached."""
    with pair(paths, entropy) as engine:
        expected = slowly(models, PROMPT, entropy, engine.requests.sampling(**WAYS[way]), N_TOKENS)
        for n_reused in (0, len(PROMPT) - 1):
            found = engine.generate(PROMPT, max_tokens=N_TOKENS, ignore_end=True, **WAYS[way])
            assert list(found.token_ids) == expected.token_ids
            assert found.stats.switching == expected.statistics()
            assert found.stats.n_reused_tokens == n_reused
            n_small = expected.writers.count(SMALL)
            assert found.stats.notes == [f"lossy: small wrote {n_small} of {N_TOKENS} tokens"]
    assert expected.statistics()["switches"] >= 5


@pytest.mark.slow
def test_a_prompt_of_an_earlier_text_is_a_prompt(paths: tuple[Path, Path], models: Models) -> None:
    """Whoever wrote it: its row is the large model's, and the counting begins anew; with what is cached, or without."""
    way = WAYS["drawn"]
    with pair(paths, TAU) as engine:
        first = engine.generate(PROMPT, max_tokens=N_TOKENS, ignore_end=True, **way)
        for n in (1, 17, 40, 63, N_TOKENS - 1):
            prompt = [*PROMPT, *first.token_ids[:n]]
            expected = slowly(models, prompt, TAU, engine.requests.sampling(**way), 30)
            engine.generate([*PROMPT, *first.token_ids], max_tokens=1, **way)
            found = engine.generate(prompt, max_tokens=30, ignore_end=True, **way)
            assert list(found.token_ids) == expected.token_ids
            assert found.stats.switching == expected.statistics()
            assert found.stats.n_reused_tokens == len(prompt) - 1


@pytest.mark.slow
def test_the_ends_of_the_range_are_the_models_alone(paths: tuple[Path, Path]) -> None:
    """At 0 the large one writes all; at infinity the small one writes from where it may."""
    options: dict[str, Any] = {"max_tokens": N_TOKENS, "ignore_end": True, "temperature": 0.0}

    def alone(path: Path, prompt: Sequence[int]) -> tuple[int, ...]:
        with edgedec.load(path, runtime="cpu", n_ctx=N_CTX, n_threads=1, draft="off", offline=True) as engine:
            return engine.generate(prompt, **options).token_ids

    large = alone(paths[LARGE], PROMPT)
    with pair(paths, 0.0) as engine:
        found = engine.generate(PROMPT, **options)
        assert found.token_ids == large
        assert (found.stats.switching["large_tokens"], found.stats.switching["small_tokens"]) == (N_TOKENS, 0)
    with pair(paths, math.inf) as engine:
        found = engine.generate(PROMPT, **options)
        small = alone(paths[SMALL], [*PROMPT, *large[:WINDOW]])
        assert found.token_ids == (*large[:WINDOW], *small[: N_TOKENS - WINDOW])
        assert (found.stats.switching["large_tokens"], found.stats.switching["switches"]) == (WINDOW, 1)


def test_a_grammar_is_kept_to(paths: tuple[Path, Path], models: Models) -> None:
    """The entropy is that of the raw row, whatever the grammar rules out."""
    with pair(paths, TAU) as engine:
        way = WAYS["drawn"]
        expected = slowly(models, PROMPT, TAU, engine.requests.sampling(**way), 40, allowed=byte_ids("abcdef"))
        found = engine.generate(PROMPT, grammar=Grammar.regex("[a-f]{40}"), max_tokens=40, **way)
        assert list(found.token_ids) == expected.token_ids
        assert found.stats.switching == expected.statistics()


def whole(models: Models, text: Sequence[int], first: int, entropy: float) -> tuple[list[Row], list[int], list[float]]:
    """Return every row of a text by the model whose turn it is there, and from `first` on the writers and entropies."""
    every = []
    for model in models:
        session = model.session(N_CTX)
        every.append(session.forward(np.array(text, np.int32), n_past=0, rows="all").logits.copy())
        session.close()
    writers, entropies, own = list[int](), list[float](), 0
    rows, writer = list(every[LARGE][:first]), LARGE
    for place in range(first, len(text)):
        rows.append(every[writer][place])
        writers.append(writer)
        entropies.append(bits_of(rows[-1]))
        own += 1
        mean = sum(entropies[-5:]) / 5
        if own >= 5 and (mean < entropy) != (writer == SMALL):
            writer, own = SMALL - writer, 0
    return rows, writers, entropies


def kinds(n: int, some: Ids) -> list[tuple[Rows, list[int]]]:
    """Return three ways to ask for rows of a forward of `n` tokens, with what is asked for."""
    return [("all", list(range(n))), ("last", [n - 1]), (some, some.tolist())]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_every_row_is_the_one_of_its_place(models: Models, seed: int) -> None:
    """Steps, chains that a change of writers cuts, rollbacks and new texts in any order: bit for bit."""
    rng = np.random.default_rng(seed)
    session = SwitchingSession(models[LARGE].session(N_CTX), models[SMALL].session(N_CTX), TAU)
    text: list[int] = []
    first = n_switches = n_cut = 0
    for _ in range(80):
        if rng.random() < 0.05:
            n_prompt = int(rng.integers(1, 30))
            session.begin(n_prompt)
            first, text = n_prompt - 1, text[: n_prompt - 1]
        n_past = len(text) if rng.random() < 0.8 and len(text) < 180 else int(rng.integers(0, len(text) + 1))
        tokens = rng.integers(1, 250, 1 if rng.random() < 0.5 else int(rng.integers(2, 25))).astype(np.int32)
        some = np.array([0, len(tokens) - 1], np.int32)[-len(tokens) :]
        rows, wanted = kinds(len(tokens), some)[int(rng.integers(3))]
        forward = session.forward(tokens, n_past=n_past, rows=rows)
        text = [*text[:n_past], *tokens.tolist()]
        expected, writers, entropies = whole(models, text, first, TAU)
        np.testing.assert_array_equal(forward.logits, [expected[n_past + row] for row in wanted])
        assert session.n_cached == len(text)
        assert [each.writer for each in session.written] == writers
        assert [each.entropy for each in session.written] == pytest.approx(entropies, abs=1e-5)
        switches = {first + i for i in range(1, len(writers)) if writers[i] != writers[i - 1]}
        n_switches += len(switches)
        n_cut += len(switches & set(range(n_past + 1, len(text))))
    assert n_switches > 200
    assert n_cut > 20
    session.close()


@pytest.mark.parametrize("n_past", [0, 7, 30, 60])
@pytest.mark.parametrize("who", [LARGE, SMALL])
def test_what_is_stopped_in_the_middle_changes_nothing(models: Models, who: int, n_past: int) -> None:
    """After Ctrl-C while a model reads what it missed, or within a prompt, the next try gives the same bits."""
    inner: Any = [Stopped(model.session(N_CTX)) for model in models]
    session = SwitchingSession(inner[LARGE], inner[SMALL], TAU)
    session.begin(8)
    rng = np.random.default_rng(5)
    text = rng.integers(1, 250, 60).astype(np.int32)
    session.forward(text, n_past=0)
    again = rng.integers(1, 250, 90).astype(np.int32)
    written = list(session.written)
    inner[who].n_times = 1
    with pytest.raises(KeyboardInterrupt):
        session.forward(again, n_past=n_past)
    assert (session.n_cached, session.written) == (60, written)
    found = session.forward(again, n_past=n_past, rows="all").logits
    expected, writers, _ = whole(models, [*text[:n_past].tolist(), *again.tolist()], 7, TAU)
    np.testing.assert_array_equal(found, expected[n_past:])
    assert [each.writer for each in session.written] == writers


def test_a_full_context_is_refused_and_changes_nothing(models: Models) -> None:
    """As by a session of one model."""
    session = SwitchingSession(models[LARGE].session(32), models[SMALL].session(40), TAU)
    assert session.n_ctx == 32
    session.forward(np.ones(30, np.int32), n_past=0)
    written = list(session.written)
    with pytest.raises(ContextFullError):
        session.forward(np.ones(3, np.int32), n_past=30)
    assert (session.n_cached, session.written) == (30, written)
    session.close()


def test_entropy_is_in_bits_of_the_whole_row() -> None:
    """Of known distributions; of random rows as the definition says; no number where a logit isn't."""
    assert entropy_of(np.zeros(256, np.float32), NUMPY_ROW_OPS) == pytest.approx(8.0, abs=1e-12)
    sure = np.full(256, -200.0, np.float32)
    sure[7] = 0.0
    assert entropy_of(sure, NUMPY_ROW_OPS) == 0.0
    rng = np.random.default_rng(0)
    for scale in (0.1, 1.0, 4.0, 20.0):
        row = (scale * rng.standard_normal(5000)).astype(np.float32)
        assert entropy_of(row, NUMPY_ROW_OPS) == pytest.approx(bits_of(row), abs=1e-5)
    row[3] = np.inf
    assert math.isnan(entropy_of(row, NUMPY_ROW_OPS))


def test_who_writes_what_is_explained(paths: tuple[Path, Path]) -> None:
    """The command line takes the pair; its statistics, its summary and --explain say who wrote what."""
    options = "--raw --runtime cpu -t 0 -n 30 --method=ignore-end --json --explain -v".split()
    method = f"--method=switching:{paths[SMALL]},entropy=5.5,entropy-force=yes"
    result = run_here("run", paths[LARGE], "abc", method, *options)
    assert result.code == 0
    switching = json.loads(result.out)["stats"]["switching"]
    large, small, n = switching["large_tokens"], switching["small_tokens"], switching["switches"]
    assert large + small == 30
    assert f"lossy: small wrote {small} of 30 tokens" in result.err
    assert (
        f"switching: {large} tokens by large, {small} by small, {n} changes of the writer; "
        f"entropy {switching['entropy_bits']:.2f} bits on the average, below 5.5 the small model writes\n"
    ) in result.err
    assert "drafting off: two models write in turn" in result.err


@pytest.mark.slow
def test_the_memory_plan_has_both_models(paths: tuple[Path, Path]) -> None:
    """The small model has its own terms, with the large one's context and one row of logits; it loads under a cap."""

    def terms(path: Path, prefix: str) -> dict[str, int]:
        found: Sequence[MemoryTerm] = Cpu().plan(
            path, LoadOptions(n_ctx=128, max_rows=1, n_threads=1, cache_dir=cache_folder())
        )
        return {prefix + term.name: term.n_bytes for term in found if not term.base}

    expected = terms(paths[LARGE], "") | terms(paths[SMALL], "small model: ")
    with pair(paths, 1.0, n_ctx=128, memory="1GB") as engine:
        planned = {term.name: term.n_bytes for term in engine.plan.terms if term.name in expected}
        assert planned == expected
        assert len([name for name in planned if name.startswith("small model: ")]) >= 3
        assert engine.generate(PROMPT, max_tokens=3, ignore_end=True).stats.n_generated_tokens == 3
    args = (f"--method=switching:{paths[SMALL]},entropy=1", *"--runtime cpu -c 128 --threads 1 --json".split())
    document = json.loads(run_here("plan", paths[LARGE], *args).out)
    assert {term["name"]: term["n_bytes"] for term in document["terms"] if term["name"] in expected} == expected
    assert document["setting"]["small_model"] == str(paths[SMALL])
    assert document["setting"]["drafters"] == []


def test_both_models_are_closed_with_the_engine(paths: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """And the small one is no more in memory than the large one."""
    opened: list[Model] = []

    def noted(*args: Any) -> Model:
        opened.append(open_companion(*args))
        return opened[-1]

    monkeypatch.setattr("edgedec.loading.second_model.open_companion", noted)
    with pair(paths, 1.0):
        opened[0].session(8).close()
    with pytest.raises(SessionError, match="closed"):
        opened[0].session(8)


def test_requests_take_turns(paths: tuple[Path, Path]) -> None:
    """Two models have one text between them: also where several requests at once were wished for."""
    with pair(paths, TAU, n_parallel=3) as three, pair(paths, TAU) as one:
        found = [engine.generate(PROMPT, max_tokens=20, temperature=0).token_ids for engine in (three, one)]
        assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"entropy": None}, "entropy is missing; give both, small_model and entropy"),
        ({"entropies": 1.0}, "the method switching has no option 'entropies'; did you mean entropy or "),
        ({"small_model": None}, "small_model is missing; give both"),
        ({"entropy": -0.1}, "entropy is -0.1 bits; it must be 0"),
        ({"entropy": math.nan}, "entropy is nan; it must be a number"),
        ({"entropy": MOST_ENTROPY + 0.5}, f"up to {MOST_ENTROPY:g} were measured"),
        ({"draft": "suffix"}, "the drafter 'suffix'"),
        ({"slide": True}, "(slide)"),
    ],
)
def test_what_does_not_go_together_is_refused(paths: tuple[Path, Path], options: dict[str, Any], words: str) -> None:
    """Half a pair, thresholds out of range, drafters by name, a context that slides."""
    own: dict[str, Any] = {"small_model": paths[SMALL], "entropy": 1.0} | options
    draft, slide = own.pop("draft", "auto"), own.pop("slide", False)

    def load() -> None:
        edgedec.load(paths[LARGE], draft=draft, lossy=replace(switching(**own), slide=slide), offline=True)

    with pytest.raises(RequestError, match=words):
        load()


def test_other_refusals(paths: tuple[Path, Path], models: Models, tmp_path: Path) -> None:
    """A draft model, another vocabulary, trees and layers, saving; half a pair on the command line."""
    choice = choose(paths[LARGE], "cpu", LoadOptions(), measure=False)
    options = EngineOptions(n_ctx=64, lossy=switching(small_model=paths[SMALL], entropy=1.0))
    with pytest.raises(RequestError, match="draft_model"):
        open_chosen(choice, replace(options, draft_model=paths[SMALL]))
    other = tiny_llama(tmp_path / "other.gguf", n_vocab=300)
    with pytest.raises(UnsupportedModelError, match="its vocabulary of 300 tokens is not the large model's of 260"):
        edgedec.load(paths[LARGE], lossy=switching(small_model=other, entropy=1.0), runtime="cpu", offline=True)
    session = SwitchingSession(models[LARGE].session(64), models[SMALL].session(64), TAU)
    tokens = np.ones(2, np.int32)
    tree, vectors = np.array([-1, 0], np.int32), np.ones((2, 4), np.float32)
    for group in (RowGroup(tokens, sees=tree), RowGroup(vectors=vectors), RowGroup(tokens, positions=tokens)):
        with pytest.raises(CapabilityError, match="chains"):
            evaluated(session, 0, group)
    wanted: list[dict[str, Any]] = [{"taps": (0,)}, {"mass": {0: np.ones(2, np.float32)}}]
    for more in wanted:
        with pytest.raises(CapabilityError, match="chains"):
            evaluated(session, 0, RowGroup(tokens), **more)
    for groups in ([RowGroup(tokens)] * 2, []):
        with pytest.raises(CapabilityError, match="chains"):
            evaluated(session, 0, *groups)
    for refused in (session.fork, session.save, lambda: session.load(b"", 3)):
        with pytest.raises(CapabilityError):
            refused()
    with pytest.raises(SessionError):
        session.keep(np.zeros(1, np.int32))
    with pytest.raises(SessionError, match="n_past is 1"):
        session.forward(tokens, n_past=1)
    run_here("run", paths[LARGE], "abc", "--method", "switching:entropy=1").failed(40, "switching:small-model")


@pytest.mark.slow
def test_a_runtime_whose_rows_depend_on_chunks_is_refused(paths: tuple[Path, Path]) -> None:
    """There a text would depend on which model read what in which piece."""
    with pytest.raises(CapabilityError, match="the llamacpp runtime a text depends on how its prompt is cut"):
        pair(paths, 1.0, runtime="llamacpp")
