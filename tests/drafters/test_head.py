"""The drafter `head`: the contract, what it drafts, and when it rests."""

import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.decoding.decoding_loop import exact, generated, p_value
from support.decoding.drawings import drawn
from support.heads.loaded_blocks import of_floats
from support.heads.tiny_blocks import tiny_block, write_block
from support.heads.tiny_heads import TinyHead, head_weights, stored_tensors, write_head
from support.heads.tiny_nextn import write_nextn
from support.models.hf_checkpoints import safetensors_bytes
from support.models.tiny_models import N_VOCAB
from support.models.tiny_quantized import Tiny, write_tiny

import edgedec
from edgedec.api.options import Lossy
from edgedec.cost_curve import CostCurve
from edgedec.decoding.generate import TokenStream
from edgedec.decoding.grammars import Grammars
from edgedec.decoding.session_pool import SessionPool, SessionSlot
from edgedec.draft import Verification
from edgedec.drafter import DraftContext, DrafterRestsError
from edgedec.drafters.head import HeadDrafter, Tally
from edgedec.errors import CapabilityError, EdgedecError, RequestError
from edgedec.gguf.layer_bytes import layer_bytes
from edgedec.grammar import Grammar
from edgedec.load_options import LoadOptions
from edgedec.model import Model
from edgedec.sampling import Noise, SamplingParams
from edgedec.scheduler.drafter_record import DrafterRecord
from edgedec.scheduler.drafter_set import Drafting
from edgedec.sequence import Generation, Request
from edgedec.stats import DecodeStats
from edgedec.testing import check_drafter, raise_failures
from edgedec.verification.rules import rule_names
from edgedec_apps.bench.recorder import Evaluated, Recorder, record_text
from edgedec_apps.prompt_cache import load_prompt_cache, save_prompt_cache
from edgedec_methods.drawn.drawn_trees import parse_shape
from edgedec_runtimes.cpu.draft_head.state import CpuDraftHeadState
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.trained_heads import nextn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "speed"))

from replay import replay

pytestmark = pytest.mark.slow

TINY = Tiny(n_layer=4, n_embd=48, n_head=4, n_head_kv=2, head_dim=16, n_ff=80)
HEAD = TinyHead(
    n_embd=48, n_embd_target=48, n_ff=80, n_head=3, n_head_kv=1, head_dim=16, taps=(2, 3, 4), n_vocab_target=N_VOCAB
)
BLOCK = of_floats({"n_layer": 2, "size": 6, "markov": "vanilla", "rank": 6, "confidence": True})
GREEDY = SamplingParams(temperature=0, seed=1)
TEXT = np.random.default_rng(3).integers(0, N_VOCAB, 30).tolist()
PROMPT = "the cat sat on the mat, the dog sat on the "


@pytest.fixture(params=["pairs", "block", "nextn"])
def files(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A tiny model and a random head for it, which drafts a token after the other or a block at once.

    A nextn layer is in the model's own file, and drafts the first letters only.
    """
    if request.param == "nextn":
        monkeypatch.setattr(nextn, "n_listed", lambda gguf, n_vocab: 112)
        path = write_nextn(tmp_path / "m.gguf", TINY)
        return path, path
    if request.param == "pairs":
        write_head(tmp_path / "head", HEAD)
    else:
        write_block(tmp_path / "head", tiny_block(BLOCK))
    return write_tiny(tmp_path / "m.gguf", TINY), tmp_path / "head"


def load(files: tuple[Path, Path]) -> Model:
    """Load the model with the head."""
    return Cpu().load(files[0], LoadOptions(n_ctx=128, n_parallel=4, draft_head=files[1]))


def engine_of(files: tuple[Path, Path], draft: str = "head", **options: Any) -> edgedec.Engine:
    """Load the model and its head for requests, without a cache of tiles."""
    chosen: dict[str, Any] = {"n_ctx": 128, "runtime_options": {"tile_cache": False}, "draft_head": files[1]} | options
    return edgedec.load(files[0], runtime="cpu", offline=True, draft=draft, **chosen)


def drafter(model: Model, params: SamplingParams = GREEDY, **context: object) -> HeadDrafter:
    """Return a drafter that has begun TEXT, whose session holds all but the last token."""
    session = model.session(100)
    session.forward(np.array(TEXT[:-1], np.int32), n_past=0)
    made = HeadDrafter(DraftContext(session, params, Noise(1), **drawn(params, **context)))  # type: ignore[arg-type]
    made.begin(TEXT)
    return made


def verified(made: Generation) -> bool:
    """Tell whether nodes of the head were verified, in most steps of a text."""
    return 2 * made.stats.n_drafts > made.stats.n_steps > 0 and made.stats.drafters["head"]["tried"] > 0


def test_it_keeps_the_contract(files: tuple[Path, Path]) -> None:
    """The conformance suite, with texts equal to plain decoding's, greedy and sampled."""
    results = check_drafter(HeadDrafter, lambda: load(files))
    raise_failures(results)
    assert all(result.status == "passed" for result in results)


def test_sampled_and_penalized_drafts_use_the_targets_own_transform(files: tuple[Path, Path]) -> None:
    """A banned token is never drafted, noise changes no draft, and drawn nodes come with their q."""
    with load(files) as model:
        best = drafter(model).propose(1, np.inf).tokens[0]
        banned = SamplingParams(temperature=0, logit_bias={best: -np.inf})
        assert best not in list(drafter(model, banned).propose(4, np.inf).tokens)
        sampled = SamplingParams(temperature=1.0, top_p=1.0, seed=1)
        assert drafter(model, sampled).propose(4, np.inf).tokens == drafter(model).propose(4, np.inf).tokens
        drawn = drafter(model, sampled, coupled=False).propose(4, np.inf)
        assert drawn.is_chain
        assert drawn.q is not None
        assert all(law is not None and token in law.token_ids for law, token in zip(drawn.q, drawn.tokens, strict=True))
        ids = set(drafter(model).state.token_ids.tolist())
        assert all(law is not None and ids.issuperset(law.token_ids.tolist()) for law in drawn.q)


def test_a_head_that_accepts_too_little_rests(files: tuple[Path, Path]) -> None:
    """After 200 drafts with next to no right token the drafter ends, says why, and stays away from later texts."""
    store: dict[str, object] = {}
    with load(files) as model:
        made = drafter(model, store=store)
        tally = store["head"]
        assert isinstance(tally, Tally)
        tally.n_drafts, tally.n_right = 199, 3
        token = made.propose(1, np.inf).tokens[0]
        with pytest.raises(DrafterRestsError, match="rests"):
            made.learn(Verification((), ((token + 1) % N_VOCAB,)), {})
        with pytest.raises(DrafterRestsError, match="rests"):
            drafter(model, store=store)


@pytest.mark.parametrize("files", ["pairs"], indirect=True)
def test_scores_that_are_no_numbers_end_the_drafts(files: tuple[Path, Path], tmp_path: Path) -> None:
    """A head whose scores overflow is left out, with its name and what to do; the text stays."""
    weights = head_weights(HEAD)
    weights["output_norm"][:] = 3e38
    (files[1] / "model.safetensors").write_bytes(safetensors_bytes(stored_tensors(HEAD, weights)))
    texts = []
    for draft in ("off", "head"):
        with engine_of(files, draft) as engine:
            made = engine.generate(PROMPT, max_tokens=9, temperature=0, ignore_end=True)
            texts.append(made.token_ids)
    assert texts[0] == texts[1]
    why = next(reason for reason in made.stats.reasons if reason.startswith("head off: "))
    assert "a score of the draft head head is infinite or no number" in why
    assert "choose another head (draft_head), or 'off' for none" in why


def test_a_head_that_rests_comes_back_when_the_engine_forgets(files: tuple[Path, Path]) -> None:
    """It rests in later texts with the same sentence; after forget() it drafts and is judged anew; texts stay."""
    with engine_of(files, "off", n_draft_max=4) as engine:
        expected = engine.generate(PROMPT, max_tokens=20, temperature=0, ignore_end=True).token_ids
    texts, tried, why = [], [], []
    with engine_of(files, n_draft_max=4) as engine:
        for step in ("judged", "later", "forgotten", "after"):
            if step == "judged":
                assert engine.pool.slots[0].drafting is not None
                engine.pool.slots[0].drafting.store["head"] = Tally(n_drafts=195, n_right=-20)
            if step == "forgotten":
                engine.forget()
            made = engine.generate(PROMPT, max_tokens=20, temperature=0, ignore_end=True)
            texts.append(made.token_ids)
            tried.append(made.stats.drafters.get("head", {}).get("tried", 0))
            why.append([reason for reason in made.stats.reasons if "rests" in reason])
    assert texts == [expected] * 4
    assert tried[0] > 0
    assert why[0] == why[1] != []
    assert tried[1] == 0
    assert min(tried[2:]) > tried[0]
    assert why[2:] == [[], []]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_recording_counts_what_drafts_read(temperature: float, files: tuple[Path, Path]) -> None:
    """Each level of a chain is a forward that reads the head's share of a token's bytes, and a replay charges it.

    A block's forward comes with the first level.
    """
    with engine_of(files, n_draft_max=4) as engine:
        recorder = Recorder()
        made = record_text(engine, PROMPT, recorder, max_tokens=20, temperature=temperature, ignore_end=True)
        head = engine.session(64).draft_head
        assert isinstance(head, CpuDraftHeadState)
        price, n_rows = head.price, 1 if head.head.card.block is None else 6
    sizes = layer_bytes(files[0])
    read = head_weights(HEAD)
    least = sum(read[name].size for name in ("q", "k", "v", "o", "gate", "up", "down"))
    assert least / sizes.total < price.of(1) < 1
    rows = [row for row in recorder.rows if row.tokens]
    assert len(rows) > 10
    for row in rows:
        n_levels = sum(parent == -1 or row.after[node] > row.after[parent] for node, parent in enumerate(row.parents))
        levels = (Evaluated(1, price.level),) * (max(row.after) - 1)
        assert row.evaluated == (Evaluated(n_rows, price.of(1)), *levels)
        assert n_levels >= max(row.after) >= 1
    text, flat = [1, *made.token_ids], (lambda n: 1.0)
    free = replay(text[1:], recorder.rows, flat, 4)
    charged = replay(text[1:], recorder.rows, flat, 4, lambda forward: forward.share or 0.0, 4)
    assert charged.seconds > free.seconds


@pytest.mark.parametrize("files", ["pairs", "block"], indirect=True)
def test_without_a_head_it_says_what_to_do(files: tuple[Path, Path]) -> None:
    """The drafter is refused before loading where no head is named, and when opened where none was loaded."""
    with pytest.raises(RequestError, match="draft_head"):
        engine_of(files, draft_head=None)
    with Cpu().load(files[0], LoadOptions(n_ctx=64)) as model, pytest.raises(CapabilityError, match="draft_head"):
        drafter(model)


@pytest.mark.parametrize(
    ("drafters", "options"),
    [
        ("head", {}),
        ("head", {"n_parallel": 2}),
        ("head", {"lossy": Lossy(slide=True), "n_ctx": 64}),
        ("head+suffix", {}),
    ],
)
def test_texts_are_plain_decodings(
    drafters: str, options: dict[str, object], files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone and merged, with parallel sessions and in a context that slides, the head drafts and changes no text."""
    monkeypatch.setattr("edgedec.api.load.cost_curve", lambda *_, **__: CostCurve({1: 0.01, 64: 0.01}))
    texts = []
    for draft in ("off", drafters):
        with engine_of(files, draft, **{"n_draft_max": 5} | options) as engine:
            for temperature in (0.0, 1.0):
                made = engine.generate(PROMPT, max_tokens=40, temperature=temperature, seed=4, ignore_end=True)
                texts.append(made.token_ids)
                assert draft == "off" or verified(made)
                assert draft == "off" or any("read the text" in line for line in made.stats.explanation)
    assert texts[:2] == texts[2:]


def test_texts_that_a_head_leaves_alone_are_plain_decodings(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One text and several of one prompt are the same, whether the head follows every text, none or every second."""
    monkeypatch.setattr("edgedec.api.load.cost_curve", lambda *_, **__: CostCurve({1: 0.01, 64: 0.01}))
    found = []
    for draft, idles in (("off", ()), ("auto", (False,)), ("auto", (True,)), ("auto", (False, True, True))):
        turns = cycle(idles or (False,))
        monkeypatch.setattr(DrafterRecord, "goes_without", lambda record, greedy, loss_s=0.0, turns=turns: next(turns))
        drawn: dict[str, Any] = {"max_tokens": 40, "temperature": 1.0, "ignore_end": True}
        with engine_of(files, draft) as engine:
            texts = [engine.generate(PROMPT, seed=seed, **drawn) for seed in (4, 5)]
            texts += engine.samples(PROMPT, 3, seed=6, **drawn)
            texts.append(engine.generate(PROMPT, **drawn | {"temperature": 0.0}))
        found.append([text.token_ids for text in texts])
    assert found[1:] == found[:1] * 3


def test_requests_at_the_same_time_draft_each_for_itself(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six texts, three at once, each with its own head's state: they are plain decoding's, greedy and sampled.

    What each drafts is what it drafts in turn. Which session gets which text is chance, so no two texts begin with the
    same token, of which a session would keep what its head made, and nothing is calibrated.
    """
    monkeypatch.setattr("edgedec.scheduler.policy.DEADLINE_S", 1000.0)  # a busy machine must not end a draft
    monkeypatch.setattr("edgedec.drafter.Calibration.observe", lambda *_: None)
    texts, drafted = [], []
    for draft, n_parallel in (("off", 3), ("head", 3), ("head", 1)):
        with (
            engine_of(files, draft, n_parallel=n_parallel, n_draft_max=4) as engine,
            ThreadPoolExecutor(n_parallel) as threads,
        ):
            asks = [
                partial(engine.generate, [first, *TEXT], max_tokens=30, seed=4, temperature=t, ignore_end=True)
                for first, t in zip(range(7, 13), (0.0, 1.0) * 3, strict=True)
            ]
            made = list(threads.map(lambda ask: ask(), asks))
        texts.append([one.token_ids for one in made])
        assert draft == "off" or all(map(verified, made))
        drafted.append([one.stats.drafters.get("head", {}) | {"draft_s": 0} for one in made])
    assert texts[1:] == texts[:1] * 2
    assert drafted[1] == drafted[2]


def test_a_fork_of_a_prompt_drafts_on(files: tuple[Path, Path]) -> None:
    """Two texts of one prompt: the fork of a session that read it drafts at once, and both are plain decoding's."""
    with load(files) as model:
        plain = [written(SessionSlot(model.session(100)), seed)[0] for seed in (1, 2)]
        first = model.session(100)
        first.forward(np.array(TEXT[:-1], np.int32), n_past=0)
        for seed, session in enumerate((first.fork(), first.fork()), 1):
            slot = SessionSlot(session, TEXT[:-1], drafting=Drafting({"head": HeadDrafter}, 4, always=True))
            text, stats = written(slot, seed)
            assert text == plain[seed - 1]
            assert stats.n_reused_tokens == len(TEXT) - 1
            assert stats.drafters["head"]["tried"] >= stats.n_steps > 0
    assert plain[0] != plain[1]


def written(slot: SessionSlot, seed: int) -> tuple[tuple[int, ...], DecodeStats]:
    """Return the text that follows TEXT, and its statistics."""
    sampling = SamplingParams(temperature=1.0, seed=seed, max_tokens=20, ignore_end=True)
    stream = TokenStream(SessionPool([slot]), Request(tuple(TEXT), sampling, seed, "longest"))
    assert list(stream)
    return stream.generation.token_ids, stream.generation.stats


@pytest.mark.parametrize("rule", sorted(rule_names()[1:]))
def test_other_rules_verify_what_was_drawn(rule: str, files: tuple[Path, Path]) -> None:
    """Drafts drawn from the head's q are verified by every rule; runs of a seed behind a read prompt are the same."""
    with engine_of(files, n_draft_max=4) as engine:
        made = [
            engine.generate(PROMPT, max_tokens=30, temperature=1.0, seed=4, ignore_end=True, verify=rule, reuse="exact")
            for _ in range(3)
        ][1:]
    assert made[0].token_ids == made[1].token_ids
    assert all(map(verified, made))


@pytest.mark.parametrize(
    ("rule", "shape", "n_max", "files"),
    [
        ("recursive", "siblings:3-2", 8, "pairs"),
        ("recursive", "beam:3", 8, "nextn"),
        ("recursive", "grow", 8, "block"),
        ("kseq", "paths:3", 6, "block"),
        ("multipath", "paths:2", 6, "pairs"),
    ],
    indirect=["files"],
)
def test_drawn_trees_keep_the_distribution(rule: str, shape: str, n_max: int, files: tuple[Path, Path]) -> None:
    """Texts of two tokens fit plain sampling's exact law, while the head's trees are accepted and rejected."""
    with load(files) as model:
        session = model.session(100)
        head = session.draft_head
        assert head is not None
        allowed = head.token_ids[:4].tolist()
        params = SamplingParams(temperature=1.0, top_p=1.0, logit_bias=dict.fromkeys(allowed, 30.0))
        law = exact(session, tuple(TEXT), params, 2)
        found = generated(
            *(session, tuple(TEXT), params, rule, {"head": HeadDrafter}),
            n_tokens=2,
            seeds=range(200),
            n_draft=n_max,
            tree=shape,
        )
    assert p_value(found.texts, law) > 1e-4
    assert 0.05 < found.n_accepted / found.n_drafted < 0.9


@pytest.mark.parametrize("files", ["pairs", "nextn"], indirect=True)
def test_nodes_of_a_tree_have_the_scores_of_chains(files: tuple[Path, Path]) -> None:
    """Each node's scores are, bit for bit, those of the chain that leads to it; malformed trees are refused."""
    with load(files) as model:
        session = model.session(100)
        session.forward(np.array(TEXT[:-1], np.int32), n_past=0)
        head, n_past = session.draft_head, len(TEXT) - 1
        assert head is not None
        tokens, parents = [5, 9, 5, 7, 9, 11], [-1, -1, 0, 0, 1, 3]
        root = head.begin(n_past, TEXT[-1])
        assert root is not None
        root = root.copy()
        levels = [head.branches(tokens[:n], parents[:n], n_new) for n, n_new in ((2, 2), (5, 3), (6, 1))]
        scores = np.concatenate([level for level in levels if level is not None])
        for node in range(len(tokens)):
            path = [node]
            while parents[path[0]] >= 0:
                path.insert(0, parents[path[0]])
            found = head.begin(n_past, TEXT[-1])
            np.testing.assert_array_equal(found, root)
            for above in path:
                found = head.next(tokens[above])
            np.testing.assert_array_equal(found, scores[node])
        with pytest.raises(ValueError, match="new nodes"):
            head.branches([1, 2], [-1], 2)
        head.begin(n_past, TEXT[-1])
        wrong = (([1], [0], 1), ([1, 2], [-1, 0], 2), ([N_VOCAB], [-1], 1), ([1, 2], [-1, 0], 1))
        for tree, above_them, n_new in wrong:
            with pytest.raises(EdgedecError):
                head.branches(tree, above_them, n_new)


@pytest.mark.parametrize("coupled", [True, False])
@pytest.mark.parametrize("options", [{"temperature": 1.0}, {"top_p": 1.0}, {"min_p": 0.01}])
def test_rows_over_the_heads_own_tokens_draft_as_rows_over_all(
    options: dict[str, float], coupled: bool, files: tuple[Path, Path]
) -> None:
    """Where an option names another token, rows have all of the target's tokens: levels and their q are the same."""
    with load(files) as model:
        unknown = min(set(range(N_VOCAB)) - set(drafter(model).state.token_ids.tolist()))
        for shape in ("grow",) if coupled else ("chain", "grow"):
            few, all_of_them = (
                drafter(model, SamplingParams(**options, logit_bias=bias), coupled=coupled, shape=parse_shape(shape))  # type: ignore[arg-type]
                for bias in ({}, {unknown: 0.0})
            )
            one, other = (made.propose(8, np.inf) for made in (few, all_of_them))
            assert (one.tokens, one.parents) == (other.tokens, other.parents)
            assert one.p_accept == pytest.approx(other.p_accept)
            assert few.memory_bytes() < all_of_them.memory_bytes()
            for law, same in zip(one.q or (), other.q or (), strict=True):
                assert law is not None
                assert same is not None
                assert law.token_ids.tolist() == same.token_ids.tolist()
                np.testing.assert_array_equal(law.probs, same.probs)


@pytest.mark.parametrize("shape", ["chain", "siblings:2"])
def test_no_clock_decides_what_is_drawn(shape: str, files: tuple[Path, Path]) -> None:
    """A drawn draft is the same after its deadline, as another draft would lead to another text."""
    params = SamplingParams(temperature=1.0, top_p=1.0, seed=1)
    with load(files) as model:
        drafts = [
            drafter(model, params, coupled=False, shape=parse_shape(shape)).propose(6, deadline_s)
            for deadline_s in (np.inf, 0.0)
        ]
    assert len(drafts[0]) == 6
    assert drafts[0].tokens == drafts[1].tokens


def test_texts_of_a_grammar_are_plain_decodings(files: tuple[Path, Path]) -> None:
    """Where a grammar limits the tokens, the head drafts among what the grammar forces, and changes nothing."""
    grammar = Grammar.regex(r"(.|\n){30}-?\d{2}")
    texts = []
    for draft in ("off", "head"):
        with engine_of(files, draft, n_draft_max=5, n_threads=1) as engine:
            made = [engine.generate(PROMPT, grammar=grammar, max_tokens=40, temperature=t, seed=3) for t in (0.0, 1.0)]
        texts.append([one.token_ids for one in made])
        assert draft == "off" or all(one.stats.n_drafts > 5 for one in made)  # others are against the grammar
    assert texts[0] == texts[1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("coupled", [True, False])
def test_a_draft_keeps_to_the_grammar(temperature: float, coupled: bool, files: tuple[Path, Path]) -> None:
    """Where the head's own token is ruled out, its best allowed one takes the place; what is drawn comes with its q."""
    params = SamplingParams(temperature=temperature, seed=1)
    with load(files) as model:
        free = drafter(model, params, coupled=coupled).propose(4, np.inf).tokens[0]
        ids = drafter(model).state.token_ids.tolist()
        letters = [i for i in ids if model.tokenizer.piece(i).isalpha() and i != free]
        pattern = "[" + "".join(sorted({model.tokenizer.piece(i).decode()[0] for i in letters})[:9]) + "]{30}"
        constraint = Grammars(model.tokenizer).open(Grammar.regex(pattern))
        assert not constraint.allows((), free)
        draft = drafter(model, params, coupled=coupled, constraint=constraint).propose(8, np.inf)
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(draft.tokens, draft.parents, strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        on_chain = [path for node, path in enumerate(paths) if node == 0 or node in draft.parents]
        assert len(on_chain) >= 2
        assert all(constraint.allows(path[:-1], path[-1]) for path in on_chain)
        if not coupled and temperature:
            assert draft.q is not None
            for law, path in zip(draft.q, paths, strict=True):
                assert law is not None
                assert constraint.allowed(path[:-1])[law.token_ids].all()
        nothing = Grammars(model.tokenizer).open(
            Grammar.regex(model.tokenizer.piece(ends(model, ids)).decode() + "{9}")
        )
        assert not len(drafter(model, params, coupled=coupled, constraint=nothing).propose(4, np.inf))


def ends(model: Model, ids: list[int]) -> int:
    """Return a token of one letter that the head can't draft."""
    return next(i for i in range(N_VOCAB) if i not in ids and model.tokenizer.piece(i).isalpha())


def test_a_prompt_cache_carries_the_head(files: tuple[Path, Path], tmp_path: Path) -> None:
    """A text that goes on from a file drafts as the one that goes on in the same process."""
    counts = []
    for restored in (False, True):
        with engine_of(files) as engine:
            if restored:
                load_prompt_cache(engine, tmp_path / "cache")
            else:
                engine.generate(PROMPT, max_tokens=1, temperature=0)
                save_prompt_cache(engine, tmp_path / "cache")
            made = engine.generate(PROMPT + "log", max_tokens=20, temperature=0, ignore_end=True)
            counts.append((made.token_ids, made.stats.drafters["head"]["nodes"], made.stats.n_reused_tokens))
    assert counts[0] == counts[1]
    assert counts[0][1] > 10
    assert counts[0][2]
