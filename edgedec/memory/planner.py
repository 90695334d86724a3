"""What to load within a cap: from wishes down an order of sacrifice to the first setting that fits.

What is given up first costs least; docs/architecture.md has the order with its measurements. Nothing that was asked for
by name is given up, and the text stays the same for all but a shorter context, which ends it sooner, and a smaller KV
cache, taken only where `kv_type` is "auto". SpecMemo (2025) asks which speculation still pays under a limit: here its
terms are part of the whole plan.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from importlib import import_module
from pathlib import Path

from edgedec.counted import counted
from edgedec.draft import STORE_BYTES
from edgedec.drafters.self_speculation.exit import EXITS
from edgedec.drafters.suffix.automaton import STATE_BYTES
from edgedec.errors import EdgedecError, RequestError
from edgedec.gguf.file import read_gguf
from edgedec.gguf.formats import header_path
from edgedec.gguf.model_info import describe
from edgedec.gguf.trained_context import trained_context
from edgedec.grammar import LEAST_GRAMMAR_BYTES
from edgedec.loading.draft_model import DRAFT_MODEL_TERMS, draft_model_terms
from edgedec.loading.runtime_choice import Choice
from edgedec.loading.small_model import small_model_terms
from edgedec.memory.system import available_bytes, peak_resident_bytes, resident_bytes, return_free_memory
from edgedec.memory.watch import margin_bytes
from edgedec.memory_plan import OTHER_MODELS, MemoryPlan, MemoryTerm, format_bytes, held_bytes
from edgedec.model import LoadOptions, default_n_ctx
from edgedec.scheduler.drafter_factories import CASCADE, COMMON, EXIT, MODEL, NGRAMS, SUFFIX

AUTO_KV = "auto"
ONE_REQUEST_BYTES = 4_000_000
"""The same where there is one request only: its own text is kept as well."""

REQUESTS = "requests"
"""The term of what a server keeps for requests."""

STORES = "draft stores"
"""The term of what drafters keep between requests: it fills as texts are made."""

_SMALLER_GRAMMARS = (16_000_000, LEAST_GRAMMAR_BYTES)
_SMALLER_STORES = (8_000_000, 2_000_000)
_FEWER_REQUEST_BYTES = (4_000_000, 2_000_000)
_SHORTER_CONTEXTS = (2048, 1024, 512)
_FEWER_ROWS = (16, 8, 4)
_LOSSY = ("q8_0", "gear", "q4_0")
_COMMON_BYTES = 10_000_000
_WITH_STORE = (SUFFIX, *NGRAMS)
_OF_TEXT = (SUFFIX, CASCADE, MODEL)
_STATES_PER_TOKEN = 1.5
_NEEDED = (
    "jinja2.sandbox",
    "edgedec.drafters.suffix.suffix",
    "edgedec.drafters.suffix.corpus",
    "edgedec.decoding.generate",
)
_WORKING_BYTES = 4_000_000
_GRAMMAR_BYTES_PER_TOKEN = 175  # as measured with llguidance: 160 to 168
_CLOSE_BYTES = 100_000  # to the least that streaming takes
_USABLE = 0.9  # of what the system has free
_AMPLE, _AMPLE_MORE = 1.5, 500_000_000  # times a model's file, and bytes: where that is free, nothing is planned


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to load a model.

    Attributes:
        options: The runtime's.
        drafters: Names of the drafters, "model" among them where there is a draft model.
        pinned: Whether they were asked for by name, and are not given up.
        draft_model: The draft model's file, or None.
        store_bytes: Most that each drafter keeps between requests.
        prompt_cache: Whether the KV cache is read from a file or saved to one: it is in memory a second time then, and
            as the file's contents a third time.
        grammar_bytes: What compiled grammars may take, and as much again each text that keeps to one (Grammars); 0
            where no text does. The first one takes the vocabulary a second time, too.
        given_up: What is less than was wished: by kind, a phrase.
        small_model: The file of a model that writes in turn with this one, or None.
        draft_overlap: Whether the draft model drafts while this one verifies, on the CPU.
        keep_rows: Whether the options' max_rows was asked for by name, and is not given up.
        request_bytes: What a server keeps for requests: their bodies, and what is made of them until they are answered.
    """

    options: LoadOptions
    drafters: tuple[str, ...] = ()
    pinned: bool = False
    draft_model: Path | None = None
    store_bytes: int = STORE_BYTES
    prompt_cache: bool = False
    grammar_bytes: int = 0
    given_up: Mapping[str, str] = field(default_factory=dict)
    small_model: Path | None = None
    draft_overlap: bool = False
    keep_rows: bool = False
    request_bytes: int = 0

    def less(self, kind: str, what: str, **options: object) -> "Setting":
        """Return it with other options for the runtime, and a phrase for what is given up, in place of its kind's."""
        changed = replace(self.options, **options)  # type: ignore[arg-type]
        return replace(self, options=changed, given_up={**self.without(kind).given_up, kind: what})

    def without(self, kind: str) -> "Setting":
        """Return it without the phrase of that kind."""
        return replace(self, given_up={name: what for name, what in self.given_up.items() if name != kind})


@dataclass(frozen=True, slots=True)
class Cap:
    """What may be held.

    Attributes:
        n_bytes: How much, or None.
        whole_process: Whether what the process holds besides counts, the interpreter among it; else only the models of
            edgedec, all of them together.
        name: Where it comes from: "allowed", or "free" on this machine.
        base_bytes: What the whole process holds besides; None for base_bytes(), that of one without models.
    """

    n_bytes: int | None = None
    whole_process: bool = True
    name: str = "allowed"
    base_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Planned:
    """A setting, on which runtime, and what it takes under the cap."""

    setting: Setting
    plan: MemoryPlan
    choice: Choice


Rung = Callable[[Setting], Setting | None]
RuntimeTerms = Callable[[LoadOptions], tuple[MemoryTerm, ...]]
Plan = Callable[[Setting], Planned]


def plan_within(choice: Choice, wishes: Setting, cap: Cap) -> Planned:
    """Return what to load: the wishes, or as little less as fits; the smallest setting where even that does not.

    Without a cap it is what was wished, without terms, unless the system is short of memory.

    Raises:
        EdgedecError: As Runtime.plan.
    """
    if cap.n_bytes is None:
        free = free_if_short(choice.path)
        if free is None:
            return Planned(_definite(wishes, choice), MemoryPlan(()), choice)
        return_free_memory()
        held = resident_bytes() or 0  # by other models, too
        cap = Cap(held + free, whole_process=True, name="free", base_bytes=held)
    options = replace(wishes.options, planning_bytes=planning_bytes(cap))
    return with_peak(chosen_of(plan_settings(choice, replace(wishes, options=options), cap)), cap)


def with_peak(planned: Planned, cap: Cap) -> Planned:
    """Return it with what was held to make the plan, where that is over the cap: large headers are checked for it."""
    plan = planned.plan
    if cap.n_bytes is None or not cap.whole_process or cap.name != "allowed":
        return planned
    peak = peak_resident_bytes() or 0
    if peak <= max(cap.n_bytes, plan.total_bytes):
        return planned
    term = MemoryTerm(
        "planning", peak - plan.total_bytes, "held for a while to make this plan, before anything is loaded"
    )
    return replace(planned, plan=replace(plan, terms=(*plan.terms, term)))


def planning_bytes(cap: Cap) -> int | None:
    """Return what making a plan may take beside what the process holds already (LoadOptions.planning_bytes)."""
    if cap.n_bytes is None:
        return None
    room, free = max(0, cap.n_bytes - _beside(cap)), available_bytes()
    return room if free is None else min(room, free)


def _beside(cap: Cap) -> int:
    """Return what is held beside the model that is planned, and counts."""
    if not cap.whole_process:
        return held_bytes()
    return base_bytes() if cap.base_bytes is None else cap.base_bytes


def chosen_of(settings: Sequence[Planned]) -> Planned:
    """Return the first that fits, or else the smallest."""
    smallest = min(settings, key=lambda planned: planned.plan.total_bytes)
    return next((planned for planned in settings if planned.plan.fits), smallest)


def plan_settings(choice: Choice, wishes: Setting, cap: Cap) -> list[Planned]:
    """Return settings with their plans, from the wishes down, each with something more given up.

    The first that fits has back what was given up before in vain. The last one keeps only a part of the weights in
    memory, as much as the cap allows, where the runtime can do that; without a cap it is not there.

    Where two runtimes were compared and the faster one doesn't fit, it is the other. That one's text may differ.

    Raises:
        EdgedecError: As Runtime.plan.
    """
    settings = _settings(choice, wishes, cap)
    if choice.slower is None or chosen_of(settings).plan.fits:
        return settings
    first, second = choice.runtime.name, choice.slower.name
    instead = replace(choice, runtime=choice.slower, slower=None, reason=f"{choice.reason}; only {second} fits")
    if cap.whole_process:  # what the first one left behind, such as its library
        return_free_memory()
        cap = replace(cap, base_bytes=max(_beside(cap), resident_bytes() or 0))
    smaller = _settings(instead, replace(wishes, given_up={"runtime": f"runtime {second} in place of {first}"}), cap)
    return min(settings, smaller, key=lambda found: chosen_of(found).plan.total_bytes)


def plan_wishes(choice: Choice, wishes: Setting, cap: Cap) -> Planned:
    """Return the wishes with their plan, whether that fits or not (raises what Runtime.plan raises)."""
    return _planner(choice, wishes, cap)(_definite(wishes, choice))


def _planner(choice: Choice, wishes: Setting, cap: Cap) -> Plan:
    """Return what plans a setting, and asks the runtime once for each of its options."""
    terms: RuntimeTerms = lru_cache(lambda options: _terms(choice, wishes, options))
    return lambda setting: Planned(setting, _plan_of(terms, setting, cap), choice)


def _settings(choice: Choice, wishes: Setting, cap: Cap) -> list[Planned]:
    definite = _definite(wishes, choice)
    if cap.n_bytes is not None and not (definite.drafters or definite.keep_rows):
        definite = replace(definite, options=replace(definite.options, max_rows=1))
    plan = _planner(choice, wishes, cap)
    settings = [plan(definite)]
    rungs: list[Rung] = []
    for rung in _rungs(choice, wishes):
        setting = _after([*rungs, rung], definite)
        if setting == _after(rungs, definite):
            continue
        try:
            planned = plan(setting)
        except RequestError:  # a KV type that this model's heads don't take
            continue
        rungs.append(rung)
        if planned.plan.fits and not settings[-1].plan.fits:
            planned = _with_back(plan, rungs, definite, planned)
        settings.append(planned)
    if cap.n_bytes is not None and not settings[-1].plan.fits:
        last = settings[-1].setting
        drafting = next((p.setting for p in reversed(settings) if p.setting.drafters), last)
        # The longer a draft, the fewer readings a text takes.
        for setting in (_with_more_rows(definite, drafting), drafting, last):
            if not settings[-1].plan.fits:
                settings += _streamed(plan, setting, cap.n_bytes)
        if not settings[-1].plan.fits:
            settings += _least_streamed(plan, last)
    return settings


def _after(rungs: Sequence[Rung], setting: Setting) -> Setting:
    for rung in rungs:
        setting = rung(setting) or setting
    return setting


def _with_back(plan: Plan, rungs: Sequence[Rung], wishes: Setting, found: Planned) -> Planned:
    """Return the setting without those of the rungs that it fits without, the dearest first."""
    for rung in rungs[-2::-1]:
        fewer = [other for other in rungs if other is not rung]
        planned = plan(_after(fewer, wishes))
        if planned.plan.fits:
            rungs, found = fewer, planned
    return found


def _terms(choice: Choice, wishes: Setting, options: LoadOptions) -> tuple[MemoryTerm, ...]:
    """Return the runtime's terms, and that of the grammars' vocabulary, which depends on the model alone."""
    found = choice.runtime.plan(choice.path, options)
    if not wishes.grammar_bytes:
        return found
    n_vocab = describe(read_gguf(header_path(choice.path))).n_vocab
    n_bytes = n_vocab * _GRAMMAR_BYTES_PER_TOKEN
    return (*found, MemoryTerm("vocabulary of grammars", n_bytes, f"a second vocabulary, {n_vocab} tokens"))


def _plan_of(terms: RuntimeTerms, setting: Setting, cap: Cap) -> MemoryPlan:
    """Return what a setting takes, against the cap."""
    options = replace(setting.options, on_progress=None, cancel=None)
    found = [term for term in terms(options) if not term.base]
    if cap.whole_process:
        found.insert(0, MemoryTerm("interpreter and libraries", _beside(cap), "measured", base=True))
    elif n_held := _beside(cap):
        found.append(MemoryTerm(OTHER_MODELS, n_held, "loaded already"))
    if setting.draft_model is not None:
        found += draft_model_terms(setting.draft_model, options, overlap=setting.draft_overlap)
    if setting.small_model is not None:
        found += small_model_terms(setting.small_model, options)
    found += _drafting_terms(setting, options.n_ctx or 0)
    if setting.grammar_bytes:
        each, n_texts = setting.grammar_bytes, options.n_parallel
        what = f"{format_bytes(each)} to compile them, as much for each text that keeps to one"
        found.append(MemoryTerm("grammars", each * (1 + n_texts), what, grows=True))
    if setting.prompt_cache:
        n_kv = sum(term.n_bytes for term in found if term.name == "KV cache")
        found.append(MemoryTerm("prompt cache", 2 * n_kv, "while it is read or saved", grows=True))
    if options.n_parallel > 1:
        n_rows = sum(term.n_bytes for term in found if term.name == "logits")
        found.append(MemoryTerm("shared forwards", 2 * options.n_parallel * n_rows, "logits of parallel requests"))
    if setting.request_bytes:
        detail = "their bodies and prompts, until they are answered"
        found.append(MemoryTerm(REQUESTS, setting.request_bytes, detail, grows=True))
    found.append(MemoryTerm("working memory", _WORKING_BYTES, "of Python, while text is generated"))
    if cap.n_bytes is not None:
        found.append(
            MemoryTerm(
                "reserve",
                margin_bytes(cap.n_bytes),
                "kept free: drafters shrink near the cap",
                grows=True,
            )
        )
    return MemoryPlan(tuple(found), cap.n_bytes, tuple(setting.given_up.values()), cap.name)


def _drafting_terms(setting: Setting, n_ctx: int) -> Iterator[MemoryTerm]:
    """Yield what the drafters hold, a draft model apart."""
    if COMMON in setting.drafters:
        yield MemoryTerm("common text", _COMMON_BYTES, "for the first drafts")
    if n_bytes := _index_bytes(setting, n_ctx):
        yield MemoryTerm("index of the text", n_bytes, f"for drafts, {counted(n_ctx, 'token')}", grows=True)
    if n_bytes := store_bytes(setting):
        yield MemoryTerm(STORES, n_bytes, "texts kept between requests, where full", grows=True)


def store_bytes(setting: Setting) -> int:
    """Return the most that the drafters keep between requests."""
    return setting.store_bytes * sum(name in _WITH_STORE for name in setting.drafters)


def drafter_bytes(setting: Setting, n_ctx: int) -> int:
    """Return the most that the drafters hold, a draft model apart."""
    return sum(term.n_bytes for term in _drafting_terms(setting, n_ctx))


def _index_bytes(setting: Setting, n_ctx: int) -> int:
    if not any(name in _OF_TEXT for name in setting.drafters):
        return 0
    return int(n_ctx * setting.options.n_parallel * _STATES_PER_TOKEN * STATE_BYTES)


def _definite(wishes: Setting, choice: Choice) -> Setting:
    """Return the wishes with the defaults filled in."""
    options = with_kv_type(wishes.options)
    n_ctx = default_n_ctx(trained_context(choice.path)) if options.n_ctx is None else options.n_ctx
    return replace(wishes, options=replace(options, n_ctx=n_ctx))


def with_kv_type(options: LoadOptions) -> LoadOptions:
    """Return options whose KV type, where it is left open, is what is wished for."""
    return replace(options, kv_type="f16") if options.kv_type == AUTO_KV else options


def free_if_short(path: Path) -> int | None:
    """Return the bytes that the system has free where the model may not fit into them, else None."""
    free = available_bytes()
    parts = read_gguf(path).paths if "-of-" in path.name else [path]  # one that is split says so
    n_model = sum(part.stat().st_size for part in parts)
    return int(free * _USABLE) if free is not None and _AMPLE * n_model + _AMPLE_MORE > free else None


@lru_cache(maxsize=1)
def base_bytes() -> int:
    """Return what the process holds besides models, when all that a generation needs is imported.

    Measured by the first call, which should come before a model's file is looked into: what that leaves behind is used
    again when the model is loaded. Where the system does not tell what is held now, the most that was held counts.
    """
    for name in _NEEDED:
        with suppress(ImportError):
            import_module(name)
    return_free_memory()
    return resident_bytes() or peak_resident_bytes() or 0


def _rungs(choice: Choice, wishes: Setting) -> Iterator[Rung]:
    lossy = wishes.options.kv_type == AUTO_KV
    for n_bytes in _SMALLER_GRAMMARS:
        yield partial(_with_grammars, n_bytes)
    if choice.runtime.name == "llamacpp":
        yield _not_repacked
    if not wishes.pinned:
        yield _without_draft_model
    for n_bytes in _SMALLER_STORES:
        yield partial(_with_stores, n_bytes)
    for n_bytes in _FEWER_REQUEST_BYTES:
        yield partial(_with_requests, n_bytes)
    *first, fewest = _FEWER_ROWS
    for n_rows in first:
        yield partial(_with_rows, n_rows)
    if lossy:
        yield partial(_with_kv, _LOSSY[0])
    for n_ctx in _SHORTER_CONTEXTS if wishes.options.n_ctx is None else ():
        yield partial(_with_context, n_ctx)
    for kv_type in _LOSSY[1:] if lossy else ():
        yield partial(_with_kv, kv_type)
    if not wishes.pinned:
        yield _without_common
    yield partial(_with_rows, fewest)
    if not wishes.pinned:
        yield _without_drafting


def _with_grammars(n_bytes: int, setting: Setting) -> Setting | None:
    if setting.grammar_bytes <= n_bytes:
        return None
    return replace(setting.less("grammars", f"grammars of at most {format_bytes(n_bytes)}"), grammar_bytes=n_bytes)


def _not_repacked(setting: Setting) -> Setting | None:
    if not setting.options.repack:
        return None
    return setting.less("weights", "weights not rearranged", repack=False)


def _without_draft_model(setting: Setting) -> Setting | None:
    if setting.draft_model is None:
        return None
    names = tuple(name for name in setting.drafters if name not in (MODEL, CASCADE))
    return replace(setting.less("draft model", "draft model left out"), draft_model=None, drafters=names)


def without_draft_model(planned: Planned) -> Planned:
    """Return it without a draft model that is not loaded after all, as it can't pay."""
    setting, plan = planned.setting, planned.plan
    names = tuple(name for name in setting.drafters if name not in (MODEL, CASCADE))
    terms = tuple(term for term in plan.terms if not term.name.startswith(DRAFT_MODEL_TERMS))
    setting = replace(setting, draft_model=None, drafters=names)
    return replace(planned, setting=setting, plan=replace(plan, terms=terms))


def _with_stores(n_bytes: int, setting: Setting) -> Setting | None:
    if not _has_store(setting) or setting.store_bytes <= n_bytes:
        return None
    less = setting.less("store", f"draft stores cut to {format_bytes(n_bytes)}")
    return replace(less, store_bytes=n_bytes)


def _with_requests(n_bytes: int, setting: Setting) -> Setting | None:
    if setting.request_bytes <= n_bytes:
        return None
    less = setting.less("requests", f"{format_bytes(n_bytes)} for all requests together")
    return replace(less, request_bytes=n_bytes)


def _with_kv(kv_type: str, setting: Setting) -> Setting:
    return setting.less("kv", f"KV cache kept as {kv_type}", kv_type=kv_type)


def _with_context(n_ctx: int, setting: Setting) -> Setting | None:
    if n_ctx >= (setting.options.n_ctx or 0):
        return None
    return setting.less("context", f"context cut to {n_ctx} tokens", n_ctx=n_ctx)


def _with_rows(n_rows: int, setting: Setting) -> Setting | None:
    if not setting.drafters or setting.keep_rows or n_rows >= setting.options.max_rows:
        return None
    if EXIT in setting.drafters and n_rows < EXITS:  # it looks at as many rows to find its exit
        return None
    return setting.less("rows", f"drafts cut to {n_rows - 1} tokens", max_rows=n_rows)


def _without_common(setting: Setting) -> Setting | None:
    if COMMON not in setting.drafters:
        return None
    names = tuple(name for name in setting.drafters if name != COMMON)
    return replace(setting.less("common", "common text left out"), drafters=names)


def _without_drafting(setting: Setting) -> Setting | None:
    if not setting.drafters:
        return None
    n_rows = setting.options.max_rows if setting.keep_rows else 1
    return replace(setting.without("rows").less("drafting", "drafting turned off", max_rows=n_rows), drafters=())


def _with_more_rows(wishes: Setting, setting: Setting) -> Setting:
    """Return the setting with the rows that were wished for, but no more than the first step down leaves."""
    more = replace(setting.without("rows"), options=replace(setting.options, max_rows=wishes.options.max_rows))
    return _with_rows(_FEWER_ROWS[0], more) or more


def _has_store(setting: Setting) -> bool:
    return any(name in _WITH_STORE for name in setting.drafters)


def _streamed(plan: Plan, setting: Setting, cap_bytes: int) -> list[Planned]:
    """Return the setting in which the weights stay in memory as far as the cap allows, if the runtime can do that."""
    whole = plan(setting).plan
    n_resident = _weight_bytes(whole)
    over = whole.total_bytes - cap_bytes
    if over <= 0:
        return []
    found: list[Planned] = []
    for _ in range(3):  # as reading ahead takes memory of its own
        n_resident -= over
        if n_resident < 0:
            break
        less = setting.less("weights", "weights read from storage as needed", resident_bytes=n_resident)
        try:
            found = [plan(less)]
        except EdgedecError:  # it can't, or not with so little
            break
        over = found[0].plan.total_bytes - cap_bytes
        if over <= 0:
            break
    return found


def _least_streamed(plan: Plan, setting: Setting) -> list[Planned]:
    """Return the setting in which the fewest weights stay in memory that the runtime can do with, if it can stream."""
    least, most = 0, _weight_bytes(plan(setting).plan)
    found: list[Planned] = []
    while most - least > _CLOSE_BYTES:
        middle = (least + most) // 2
        less = setting.less("weights", "weights read from storage as needed", resident_bytes=middle)
        try:
            found, most = [plan(less)], middle
        except EdgedecError:
            least = middle
    return found


def _weight_bytes(plan: MemoryPlan) -> int:
    return sum(term.n_bytes for term in plan.terms if term.name.startswith("weights"))
