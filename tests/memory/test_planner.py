"""The order of sacrifice: what is given up under which cap, what never is, and what comes back."""

import math
import os
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from support.models.tiny_models import tiny_llama

import edgedec
from edgedec.drafter_traits import keeps_store
from edgedec.errors import MemoryCapError, RequestError
from edgedec.load_options import LoadOptions
from edgedec.load_plan import LoadPlan
from edgedec.memory.ladder import rungs
from edgedec.memory.planner import all_plans, plan_within
from edgedec.memory.setting import Cap
from edgedec.memory.shedding import margin_bytes
from edgedec.memory_plan import MemoryTerm
from edgedec.scheduler.drafter_factories import drafter_factories, drafter_factory
from edgedec_apps.base_memory import base_bytes

MB = 1_000_000
_KV = {"f16": 40_000, "q8_0": 22_500, "q8_0/q4_0": 17_500, "gear": 16_000, "q4_0": 12_500}  # bytes a token


class Sized:
    """A runtime that only plans: 500 MB of weights, which may be read as needed, and KV by length and type."""

    name = "sized"
    mb_slowdown = math.inf  # of a step, for each MB of weights that it reads

    def accepts(self, path: Path) -> str | None:
        return None

    def plan(self, path: Path, options: LoadOptions) -> tuple[MemoryTerm, ...]:
        kept = 500 * MB if options.resident_bytes is None else options.resident_bytes
        if kept < 100 * MB:
            raise RequestError("too little")
        assert options.n_ctx is not None
        slowdown = 1.0 if options.resident_bytes is None else 1 + (500 - kept / MB) * self.mb_slowdown
        return (
            MemoryTerm("interpreter and libraries", 50 * MB, base=True),
            MemoryTerm("weights", kept, slowdown=slowdown),
            MemoryTerm("reading ahead", 0 if options.resident_bytes is None else 20 * MB),
            MemoryTerm("KV cache", options.n_ctx * _KV[options.kv_type]),
            MemoryTerm("logits", options.max_rows * MB),
            MemoryTerm("prompt cache", 10 * MB if options.prompt_cache_bytes else 0),
        )

    def load(self, path: Path, options: LoadOptions) -> Any:
        raise NotImplementedError

    def report(self) -> Any:
        raise NotImplementedError


class NoStream(Sized):
    """The same without reading weights as needed."""

    def plan(self, path: Path, options: LoadOptions) -> tuple[MemoryTerm, ...]:
        if options.resident_bytes is not None:
            raise RequestError("all or nothing")
        return super().plan(path, options)


@pytest.fixture
def choice(tmp_path: Path) -> LoadPlan:
    """A file of 4,096 tokens of context on that runtime."""
    return LoadPlan(tiny_llama(tmp_path / "tiny.gguf", n_ctx_train=4096), Sized())


BOTH, _ = drafter_factories("suffix+common", with_model=False)
WISHES = LoadPlan(Path(), Sized(), options=LoadOptions(max_rows=16), drafters=BOTH)
WISHES_KEPT = replace(WISHES, max_rows_pinned=True)


def of(choice: LoadPlan, wishes: LoadPlan) -> LoadPlan:
    """Return the wishes for a model's file on a runtime."""
    return replace(wishes, path=choice.path, runtime=choice.runtime, slower=choice.slower, reason=choice.reason)


def share(n_mb: float) -> Cap:
    """A cap for models only: what the process holds besides does not count, so that figures are exact."""
    return Cap(int(n_mb * MB))


def whole(n_mb: int) -> Cap:
    """A cap for the whole process, which holds 60 MB without the model."""
    return Cap(n_mb * MB, 60 * MB, whole_process=True)


def planned(choice: LoadPlan, n_mb: float, wishes: LoadPlan = WISHES) -> LoadPlan:
    return plan_within(of(choice, wishes), share(n_mb))


def test_the_wishes_are_kept_where_they_fit(choice: LoadPlan) -> None:
    """500 + 163.84 KV + 16 logits + 44.58 drafters + 4 + 8 of reserve = 736.42 MB; one byte less gives something up."""
    found = planned(choice, 737)
    assert (found.given_up, found.options.n_ctx) == ({}, 4096)
    drafters = 32 * MB + 10 * MB + int(4096 * 1.5 * 420)
    assert found.memory.total_bytes == (500 + 16 + 4 + 8) * MB + 4096 * 40_000 + drafters
    exactly = found.memory.total_bytes
    assert plan_within(of(choice, WISHES), Cap(exactly)).given_up == {}
    less = plan_within(of(choice, WISHES), Cap(exactly - 1))
    assert less.given_up == {"store": "draft stores cut to 8.0 MB"}


def test_things_are_given_up_in_order(choice: LoadPlan) -> None:
    """From ample to too small: stores, long drafts, context, the common text, drafting, weights in memory; refusal."""
    totals = [entry.memory.total_bytes for entry in all_plans(of(choice, WISHES), share(1000))]
    assert totals == sorted(totals, reverse=True)
    assert planned(choice, 650).options.n_ctx == 2048
    assert planned(choice, 590).options.n_ctx == 1024
    short, small, none = (planned(choice, n_mb) for n_mb in (554, 540, 535))
    assert ([*short.drafters], short.options.max_rows) == (["suffix", "common"], 8)
    assert ([*small.drafters], small.options.max_rows) == (["suffix"], 4)
    assert ([*none.drafters], none.options.max_rows) == ([], 1)
    assert "rows" not in none.given_up
    assert {found.options.n_ctx for found in (short, small, none)} == {512}
    for found in (short, small, none):
        assert found.memory.fits
        assert found.memory.total_bytes <= (found.memory.cap_bytes or 0)


@pytest.mark.parametrize(
    ("n_mb", "mb_slowdown", "n_ctx"),
    [
        (670, 0.0005, 4096),  # 79 MB are read for 4,096 tokens: 4 % of a step's time
        (670, 0.002, 2048),  # 16 %
        (590, 0.0005, 4096),  # 167 MB, 8 %
        (590, 0.001, 2048),  # 17 %, and 85 MB for 2,048 tokens: 9 %
        (590, math.inf, 1024),
        (450, 0.01, 1024),  # 121 MB are read anyway, and 20 MB more for this context: 9 % of that time
        (450, 1e-6, 4096),
    ],
)
def test_the_context_is_cut_last_where_reading_weights_costs_little(
    choice: LoadPlan, monkeypatch: pytest.MonkeyPatch, n_mb: int, mb_slowdown: float, n_ctx: int
) -> None:
    """The longest one is taken whose step is less than a tenth slower than that of the shorter ones."""
    monkeypatch.setattr(Sized, "mb_slowdown", mb_slowdown)
    found = planned(choice, n_mb)
    assert found.memory.fits
    assert found.options.n_ctx == n_ctx, (found.memory.slowdown, found.options.resident_bytes)
    asked = replace(WISHES, options=replace(WISHES.options, n_ctx=1024))
    assert planned(choice, n_mb, asked).options.n_ctx == 1024


def test_a_context_beyond_4096_tokens_is_given_up_first(tmp_path: Path) -> None:
    """The default one, before drafts or stores shrink; a context that was asked for is not given up."""
    choice = LoadPlan(tiny_llama(tmp_path / "long.gguf", n_ctx_train=32768), Sized())
    found = planned(choice, 737)
    assert (found.options.n_ctx, found.given_up) == (4096, {"context": "context cut to 4096 tokens"})
    assert planned(choice, 736).given_up.keys() == {"context", "store"}
    assert planned(choice, 3000).options.n_ctx == 32768
    asked = replace(WISHES, options=replace(WISHES.options, n_ctx=16384))
    assert {one.options.n_ctx for one in all_plans(of(choice, asked), share(737))} == {16384}


@pytest.mark.slow
def test_rows_that_were_asked_for_by_name_are_not_given_up(choice: LoadPlan) -> None:
    """Nor with drafting. Drafts are cut to 15 before weights are read as needed, and to 3 before there are none."""
    found = planned(choice, 530, WISHES_KEPT)
    assert found.options.max_rows == 16
    assert not any(plan.options.max_rows != 16 for plan in all_plans(of(choice, WISHES_KEPT), share(530)))
    many = replace(WISHES, options=LoadOptions(max_rows=200))
    assert planned(choice, 600, many).given_up["rows"] == "drafts cut to 15 tokens"
    assert planned(choice, 500, many).options.max_rows == 16
    least = min(n_mb for n_mb in range(120, 200) if planned(choice, n_mb, many).drafters)
    assert planned(choice, least, many).options.max_rows == 4


def test_what_was_given_up_in_vain_comes_back(choice: LoadPlan) -> None:
    """Where a shorter context makes the room, the drafters keep all that still fits."""
    found = planned(choice, 670)
    assert (found.given_up, found.store_bytes) == ({"context": "context cut to 2048 tokens"}, 32 * MB)


def test_below_the_weights_they_are_read_as_needed_with_drafting(choice: LoadPlan) -> None:
    """What is kept of them is what the cap leaves; drafting stays, as each reading then gives several tokens."""
    found = planned(choice, 400)
    assert found.memory.fits
    assert found.drafters
    assert found.options.max_rows == 16  # the longer the drafts, the fewer the readings
    assert found.options.resident_bytes is not None
    assert found.memory.total_bytes == 400 * MB
    with pytest.raises(MemoryCapError, match="over by"):
        planned(choice, 120).memory.require()


def test_stores_are_planned_for_the_drafters_that_declare_one(choice: LoadPlan) -> None:
    """Each drafter that keeps something between requests has its store in the plan; no other drafter has one."""
    factories, _ = drafter_factories("suffix+common+recycling+trigram+stand+learned", with_model=False)
    assert [name for name in factories if keeps_store(factories[name])] == ["suffix", "recycling", "trigram", "stand"]
    wishes = replace(WISHES, drafters=factories, store_bytes=MB)
    terms = {term.name: term.n_bytes for term in planned(choice, 2000, wishes).memory.terms}
    assert terms["draft stores"] == 4 * MB
    without = planned(choice, 2000, replace(wishes, drafters={"common": factories["common"]}))
    assert "draft stores" not in without.memory.table()


def test_a_runtime_that_needs_all_weights_refuses(tmp_path: Path) -> None:
    """Without reading as needed the smallest setting is the one without drafting; it says how much it is over."""
    found = planned(LoadPlan(tiny_llama(tmp_path / "tiny.gguf", n_ctx_train=8192), NoStream()), 400)
    assert not found.memory.fits
    assert not found.drafters
    with pytest.raises(MemoryCapError, match=r"at the least, even with .*, drafting turned off; allowed: 400\.0 MB"):
        found.memory.require()


@pytest.mark.parametrize("pinned", [True, False])
def test_drafters_are_given_up_unless_they_were_named(tmp_path: Path, pinned: bool) -> None:
    """Whatever is the last step down, with the draft model, the head and the files that they draft from."""
    drafters, _ = drafter_factories("suffix+common+model+head+learned", with_model=True, with_head=True)
    options = LoadOptions(max_rows=16, n_ctx=4096, draft_head=tmp_path)
    plan = replace(WISHES, options=options, drafters=drafters, pinned=pinned, draft_model=Path("small.gguf"))
    *_, lowest = accumulate(rungs(plan), lambda below, rung: rung(below), initial=plan)
    kept = ([*drafters], Path("small.gguf"), tmp_path) if pinned else ([], None, None)
    assert ([*lowest.drafters], lowest.draft_model, lowest.options.draft_head) == kept
    phrases = ["draft model left out", "draft head left out", "your learned files left out", "common text left out"]
    left_out = [phrase for phrase in lowest.given_up.values() if phrase.endswith(" left out")]
    assert left_out == ([] if pinned else phrases)


@pytest.mark.parametrize(("n_mb", "kv_type", "n_ctx"), [(737, "f16", 4096), (670, "q8_0", 4096), (590, "q8_0", 2048)])
def test_the_kv_type_is_left_to_the_plan_only_where_it_is_auto(
    choice: LoadPlan, n_mb: float, kv_type: str, n_ctx: int
) -> None:
    """ "auto" begins at f16 and takes q8_0 before the context is cut; f16 that was given stays."""
    found = planned(choice, n_mb, replace(WISHES, options=LoadOptions(max_rows=16, kv_type="auto")))
    assert (found.options.kv_type, found.options.n_ctx) == (kv_type, n_ctx)
    assert planned(choice, n_mb).options.kv_type == "f16"


def test_the_reserve_and_all_models_of_the_process_count(choice: LoadPlan) -> None:
    """2 % of the cap, at most 8 MB, which the watch keeps free; a second model gets what the first one leaves."""
    terms = {term.name: term.n_bytes for term in planned(choice, 900).memory.terms}
    assert terms["reserve"] == margin_bytes(900 * MB) == 8 * MB
    assert "other models" not in terms
    others = plan_within(of(choice, WISHES), Cap(900 * MB, 100 * MB)).memory.terms
    assert [term.n_bytes for term in others if term.name == "other models"] == [100 * MB]


def test_kept_prompts_are_given_up_first(choice: LoadPlan) -> None:
    """Where memory is short, nothing is kept on the disk; where it is not, as much as was asked for."""
    wishes = replace(WISHES, options=replace(WISHES.options, prompt_cache_bytes=10**9))
    assert planned(choice, 747, wishes).options.prompt_cache_bytes == 10**9
    tight = planned(choice, 740, wishes)
    assert tight.given_up == {"prompts": "no prompts kept on the disk"}
    assert tight.options.prompt_cache_bytes == 0


def test_each_text_of_one_prompt_counts(choice: LoadPlan) -> None:
    """Three texts take the KV cache thrice, the prompt's last page once more, and two rows of logits for each more."""
    for n_ctx, n_pages in ((512, 8), (129, 3)):
        options = replace(WISHES.options, n_ctx=n_ctx)
        wishes = replace(WISHES, n_texts=3, grammar_bytes=10 * MB, options=options)
        found = {term.name: term.n_bytes for term in planned(choice, 5000, wishes).memory.terms}
        kv_bytes = found["KV cache"]
        assert found["grammars"] == (1 + 3) * 10 * MB  # to compile them, and for each text
        assert found["texts of one prompt"] == 2 * kv_bytes + kv_bytes // n_pages + 2 * 2 * MB
        one = planned(choice, 5000, replace(wishes, n_texts=1)).memory.terms
        (index,) = (term.n_bytes for term in one if term.name == "index of the text")
        assert found["index of the text"] == 3 * index


def test_learned_files_count_and_are_left_out(choice: LoadPlan, tmp_path: Path) -> None:
    """Their mapped bytes are a term; they are given up before the common text, and stay where drafters are pinned."""
    (tmp_path / "learned").mkdir()
    os.truncate(os.open(tmp_path / "learned" / "v.learned", os.O_CREAT | os.O_WRONLY), 30 * MB)
    factories, _ = drafter_factories("suffix+common+learned", with_model=False)
    wishes = replace(WISHES.with_options(cache_dir=tmp_path), drafters=factories)
    terms = {term.name: term.n_bytes for term in planned(choice, 2000, wishes).memory.terms}
    assert terms["learned files"] == 30 * MB
    kinds = [list(entry.given_up)[-1:] for entry in all_plans(of(choice, wishes), share(1000))]
    assert kinds.index(["your learned files"]) == kinds.index(["common text"]) - 1
    short = planned(choice, 554, wishes)
    assert ("learned" in short.drafters, "your learned files left out" in short.given_up.values()) == (False, True)
    kept = planned(choice, 554, replace(wishes, pinned=True))
    assert "learned" in kept.drafters


def test_the_whole_process_counts_where_asked_for(choice: LoadPlan) -> None:
    """The interpreter is a term then, as measured, not as the runtime says."""
    found = plan_within(of(choice, WISHES), whole(10_000))
    (base,) = (term for term in found.memory.terms if term.base)
    assert base.n_bytes == 60 * MB
    assert found.memory.process_cap_bytes == 10_000 * MB
    assert planned(choice, 900).memory.process_cap_bytes is None


class Large(NoStream):
    """A faster runtime that holds the weights twice."""

    name = "large"

    def plan(self, path: Path, options: LoadOptions) -> tuple[MemoryTerm, ...]:
        return (*super().plan(path, options), MemoryTerm("weights (repacked)", 500 * MB))


@pytest.mark.slow
def test_the_slower_of_two_runtimes_where_the_faster_does_not_fit(choice: LoadPlan) -> None:
    """The faster one needs 1,034 MB at the least; the other one's text may differ, so what is given up says so."""
    fast = replace(choice, runtime=Large(), slower=choice.runtime, reason="measured")
    for n_mb, name, reason in (
        (1240, "large", "measured"),
        (1040, "large", "measured"),
        (1030, "sized", "measured; only sized fits"),
        (400, "sized", "measured; only sized fits"),
        (60, "sized", "measured; only sized fits"),
    ):
        found = planned(fast, n_mb)
        assert (found.runtime.name, found.reason) == (name, reason)
        if name == "sized":
            assert found.memory.terms == planned(choice, n_mb).memory.terms
            assert found.memory.given_up[0] == "runtime sized in place of large"
    assert not planned(replace(fast, slower=None), 1030).memory.fits
    assert plan_within(of(fast, WISHES), Cap(None)).runtime is fast.runtime
    assert planned(replace(choice, slower=Large()), 700).runtime is choice.runtime


def test_what_was_held_to_make_the_plan_counts(choice: LoadPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was over its cap while it checked the file is told so.

    It is not where free memory is the cap, or where it was over the cap before, as a server may have been.
    """
    monkeypatch.setattr("edgedec.memory.planner.peak_resident_bytes", lambda: None)
    fits = plan_within(of(choice, WISHES), cap := whole(800))
    monkeypatch.setattr("edgedec.memory.planner.peak_resident_bytes", lambda: 800 * MB)
    assert plan_within(of(choice, WISHES), cap) == fits
    assert fits.memory.fits
    monkeypatch.setattr("edgedec.memory.planner.peak_resident_bytes", lambda: 801 * MB)
    earlier = replace(cap, earlier_peak_bytes=801 * MB)
    for other in (replace(cap, name="free"), replace(cap, whole_process=False), earlier):
        assert plan_within(of(choice, WISHES), other).memory.fits
    with pytest.raises(MemoryCapError, match=r"801\.0 MB[\s\S]*planning "):
        plan_within(of(choice, WISHES), cap).memory.require()


class Unknown(NoStream):
    """A runtime that can't say all that it needs."""

    def plan(self, path: Path, options: LoadOptions) -> tuple[MemoryTerm, ...]:
        return tuple(replace(term, partial=True) for term in super().plan(path, options)[:2])


def test_what_is_known_in_part_does_not_fit(choice: LoadPlan) -> None:
    """Whatever the cap, and the refusal says that there is more; without a cap nothing is refused."""
    found = planned(replace(choice, runtime=Unknown()), 9000)
    assert not found.memory.fits
    with pytest.raises(MemoryCapError, match=r"needs more than 5\d\d[\s\S]*and more"):
        found.memory.require()
    plans = all_plans(of(replace(choice, runtime=Unknown()), WISHES), Cap(None))
    assert all(entry.memory.partial and entry.memory.fits for entry in plans)


def test_what_the_first_runtime_left_behind_counts(choice: LoadPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its library stays in the process where the other runtime takes its place."""
    fast = replace(choice, runtime=Large(), slower=choice.runtime)
    for name, n_mb in (("resident_bytes", 75), ("peak_resident_bytes", 80)):
        monkeypatch.setattr(f"edgedec.memory.planner.{name}", lambda n_mb=n_mb: n_mb * MB)
    for cap, base in ((whole(900), 75), (whole(1400), 60)):
        (term,) = (term for term in plan_within(of(fast, WISHES), cap).memory.terms if term.base)
        assert term.n_bytes == base * MB


def test_without_drafts_one_row_is_planned_under_a_cap(choice: LoadPlan) -> None:
    """As nothing else asks for more; what was asked for by name stays."""
    plain = replace(WISHES, drafters={})
    assert planned(choice, 900, plain).options.max_rows == 1
    assert planned(choice, 900, replace(plain, max_rows_pinned=True)).options.max_rows == 16
    assert plan_within(of(choice, plain), Cap(None)).options.max_rows == 16


def test_the_exit_drafter_has_the_rows_that_it_looks_at(choice: LoadPlan) -> None:
    """Eight, to find the layer to leave at."""
    exits = replace(WISHES, drafters={"exit": drafter_factory("exit")}, pinned=True)
    assert planned(choice, 100, exits).options.max_rows == 8


def test_a_runtime_is_told_what_planning_may_take(choice: LoadPlan) -> None:
    """What the cap leaves beside the process or, where it is for models only, beside those."""
    assert plan_within(of(choice, WISHES), whole(900)).options.planning_bytes == 840 * MB
    assert plan_within(of(choice, WISHES), whole(50)).options.planning_bytes == 0
    assert planned(choice, 900).options.planning_bytes == 900 * MB
    assert plan_within(of(choice, WISHES), Cap(900 * MB, 100 * MB)).options.planning_bytes == 800 * MB
    assert plan_within(of(choice, WISHES), Cap(None)).options.planning_bytes is None


def test_a_refusal_names_the_least_that_can_be_done_with(choice: LoadPlan) -> None:
    """The fewest weights that reading as needed goes with are tried before it is said that nothing fits."""
    found = planned(choice, 60)
    assert not found.memory.fits
    assert found.options.resident_bytes == pytest.approx(100 * MB, abs=100_000)
    assert not found.drafters
    needs = found.memory.total_bytes + margin_bytes(200 * MB)
    assert planned(choice, needs / MB).memory.fits
    assert not planned(choice, found.memory.total_bytes / MB - 1).memory.fits


def test_where_the_system_is_short_its_free_memory_is_the_cap(
    choice: LoadPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No --memory, little free: the same order of sacrifice, and the plan says what is free."""
    for module in ("planner", "setting"):
        monkeypatch.setattr(f"edgedec.memory.{module}.available_bytes", lambda: 450 * MB)
    monkeypatch.setattr("edgedec.memory.planner.resident_bytes", lambda: 60 * MB)
    found = plan_within(of(choice, WISHES), Cap(None))
    assert found.memory.cap_name == "free"
    assert found.memory.fits
    assert found.options.resident_bytes is not None


def test_where_held_memory_is_not_told_the_most_that_was_held_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a sandbox without /proc: the plan's first term is the peak, not nothing."""
    monkeypatch.setattr("edgedec_apps.base_memory.resident_bytes", lambda: None)
    monkeypatch.setattr("edgedec_apps.base_memory.peak_resident_bytes", lambda: 70 * MB)
    assert base_bytes() == 70 * MB


@pytest.mark.slow
def test_an_engine_within_a_cap_says_what_it_gave_up(tmp_path: Path) -> None:
    """load(memory=...) makes the context shorter, keeps the text, and counts against the next model."""
    path = tiny_llama(tmp_path / "tiny.gguf", n_ctx_train=4096)
    options: dict[str, Any] = {"runtime": "cpu", "cache_dir": tmp_path / "cache"}
    with edgedec.load(path, **options) as engine:
        text = engine.generate("Hello", max_tokens=16, temperature=0, ignore_end=True).text
    with edgedec.load(path, memory="17MB", **options) as engine:
        assert engine.plan.given_up
        assert engine.plan.total_bytes <= 17 * MB
        assert engine.generate("Hello", max_tokens=16, temperature=0, ignore_end=True).text == text
        with pytest.raises(MemoryCapError, match="other models"):
            edgedec.load(path, memory="17MB", **options)
    with edgedec.load(path, memory="17MB", **options):
        pass
    with edgedec.load(path, **options) as first, edgedec.load(path, memory="40MB", **options) as second:
        terms = {term.name: term.n_bytes for term in second.plan.terms}
        assert terms["other models"] == sum(term.n_bytes for term in first.model.memory(4096, 16) if not term.base)


def test_each_change_reads_as_what_was_done(choice: LoadPlan) -> None:
    """A phrase tells what a thing was changed to, and never calls what is left the thing that was given up."""
    wishes = replace(WISHES, options=replace(WISHES.options, kv_type="auto", max_rows=20))
    first, *changed = all_plans(of(choice, wishes), Cap())
    assert first.memory.given_up == ()
    last = [list(entry.given_up.values())[-1] for entry in changed]
    assert last == [
        *("draft stores cut to 8.0 MB", "draft stores cut to 2.0 MB", "drafts cut to 15 tokens"),
        *("drafts cut to 7 tokens", "KV cache kept as q8_0", "context cut to 2048 tokens"),
        *("context cut to 1024 tokens", "context cut to 512 tokens", "KV cache kept as q8_0/q4_0"),
        *("KV cache kept as gear", "KV cache kept as q4_0"),
        *("common text left out", "drafts cut to 3 tokens", "drafting turned off"),
    ]
