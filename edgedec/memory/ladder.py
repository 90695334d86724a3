"""The ladder of a memory plan: what is given up, and in which order, until a model fits under a cap.

What costs the user least is given up first; docs/memory.md shows the order with its measurements. Nothing that was
asked for by name is given up. The text stays the same, with two exceptions: a shorter context ends a text sooner, and a
smaller type of the KV cache, which is taken only where `kv_type` is "auto", may change the text.

SpecMemo (2025) asks which speculation still pays under a memory limit; the ladder answers that for the whole model.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from edgedec.drafter import STORE_BYTES
from edgedec.errors import counted
from edgedec.grammar import LEAST_GRAMMAR_BYTES
from edgedec.load_options import LoadOptions, Sacrifice, own_options, read_options
from edgedec.memory_plan import format_bytes
from edgedec.scheduler.drafter_factories import CASCADE, COMMON, HEAD, MODEL

_GRAMMAR_BYTES = (16_000_000, LEAST_GRAMMAR_BYTES)
_STORE_BYTES = (8_000_000, 2_000_000)
_REQUEST_BYTES = (4_000_000, 2_000_000)
_CONTEXTS = (4096, 2048, 1024, 512)  # the first is given up before anything else
_ROWS = (16, 8, 4)
_KV_TYPES = ("q8_0", "gear", "q4_0")


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to load a model.

    Attributes:
        options: The runtime's options.
        drafters: Names of the drafters, "model" or "cascade" among them where a draft model drafts.
        pinned: Whether the drafters were asked for by name; they are not given up then.
        draft_model: The draft model's file, or None.
        store_bytes: Most bytes that each drafter with a store keeps between requests.
        prompt_cache: Whether the KV cache is read from a file or saved to one. While that happens, memory holds the KV
            cache a second time and the contents of the file besides.
        grammar_bytes: Most bytes that compiled grammars take, and that each text takes whose tokens a grammar limits;
            0 where no grammar is used. The first grammar also takes a second copy of the vocabulary.
        given_up: What was given up to fit: for each kind of sacrifice, the phrase that describes it.
        companion: The file of a further model that writes with this one, or None.
        companion_role: What that model is called.
        draft_overlap: Whether the draft model drafts on the CPU while the target verifies.
        max_rows_pinned: Whether `options.max_rows` was asked for by name; it is not given up then.
        request_bytes: Bytes that a server keeps for requests, from their bodies to their answers.
        n_texts: Texts of one prompt that a request writes at the same time.
        fewer_layers: Whether as many layers as fit are put on devices, instead of all that are wished for.
        learned_bytes: Most bytes of the user's own files that the drafters may read from; 0 for none.
        slides: Whether the context slides. Its length decides then what the model sees of a text, so free memory does
            not make it longer.
        stores: Names of drafters that keep a store between requests.
        least_rows: The fewest rows of a forward that the drafters can do with.
    """

    options: LoadOptions
    drafters: tuple[str, ...] = ()
    pinned: bool = False
    draft_model: Path | None = None
    store_bytes: int = STORE_BYTES
    prompt_cache: bool = False
    grammar_bytes: int = 0
    given_up: Mapping[str, str] = field(default_factory=dict)
    companion: Path | None = None
    companion_role: str = ""
    draft_overlap: bool = False
    max_rows_pinned: bool = False
    request_bytes: int = 0
    n_texts: int = 1
    fewer_layers: bool = False
    learned_bytes: int = 0
    slides: bool = False
    stores: tuple[str, ...] = ()
    least_rows: int = 1

    @property
    def n_stores(self) -> int:
        """How many of the drafters keep a store between requests."""
        return sum(name in self.stores for name in self.drafters)

    def less(self, kind: str, phrase: str, options: Mapping[str, Any] | None = None, **fields: Any) -> "Setting":
        """Return the setting with a sacrifice of this kind; its phrase replaces an earlier one of the same kind.

        Args:
            kind: The kind of sacrifice, a key of `given_up`.
            phrase: What is given up, in words for a person.
            options: Fields of the runtime's options that change.
            **fields: Fields of the setting that change.
        """
        given_up = {**self.given_up_without(kind), kind: phrase}
        return replace(self, options=replace(self.options, **options or {}), given_up=given_up, **fields)

    def given_up_without(self, kind: str) -> dict[str, str]:
        """Return `given_up` without the sacrifice of that kind."""
        return {name: phrase for name, phrase in self.given_up.items() if name != kind}

    def drafters_without(self, *names: str) -> tuple[str, ...]:
        """Return the names of the drafters that are not among `names`."""
        return tuple(name for name in self.drafters if name not in names)


Rung = Callable[[Setting], Setting]
"""A step down the ladder: gives something up, or returns the setting unchanged where there is nothing to give up."""


def rungs(wishes: Setting, runtime: object, *, with_devices: bool = False) -> Sequence[Rung]:
    """Return the steps down from these wishes on a runtime, in their order (docs/memory.md)."""
    kind = own_options(runtime)
    sacrifices: tuple[Sacrifice, ...] = getattr(kind, "sacrifices", ())
    free_layers = with_devices and wishes.options.n_gpu_layers in (None, -1)
    kv_types = _KV_TYPES if wishes.options.kv_type == "auto" else ()
    lengths = _CONTEXTS if wishes.options.n_ctx is None else ()
    return (
        *(partial(_with_context, n_ctx) for n_ctx in lengths[:1]),
        *_cuts("grammars", "grammar_bytes", "grammars of at most {}", _GRAMMAR_BYTES),
        *(partial(_without_option, kind, one) for one in sacrifices if with_devices or not one.with_devices),
        _without_draft_model,
        *_cuts("store", "store_bytes", "draft stores cut to {}", _STORE_BYTES if wishes.n_stores else ()),
        *_cuts("requests", "request_bytes", "{} for all requests together", _REQUEST_BYTES),
        *(partial(_with_rows, n_rows) for n_rows in _ROWS[:-1]),
        *([_with_fewer_layers] if free_layers else []),
        _without_head,
        *(partial(_with_kv, kv_type) for kv_type in kv_types[:1]),
        *(partial(_with_context, n_ctx) for n_ctx in lengths[1:]),
        *(partial(_with_kv, kv_type) for kv_type in kv_types[1:]),
        _without_learned,
        _without_common,
        partial(_with_rows, _ROWS[-1]),
        _without_drafting,
    )


def with_layers(setting: Setting, split: tuple[tuple[str, int], ...], n_layers: int) -> Setting:
    """Return the setting with this split of its `n_layers` layers; what is left on the host is among what is given up.

    A split that was asked for by its number of layers gives nothing up.
    """
    setting = replace(setting, options=replace(setting.options, layer_split=split))
    if not setting.fewer_layers:
        return setting
    where = " and ".join(f"{n} on {name}" for name, n in split) or "none on a GPU"
    return replace(setting, given_up={**setting.given_up, "layers": f"of {counted(n_layers, 'layer')} {where}"})


def with_streamed_weights(setting: Setting, resident_bytes: int) -> Setting:
    """Return the setting that keeps so many bytes of the weights in memory and reads the others in each forward."""
    return setting.less("weights", "weights read from storage as needed", {"resident_bytes": resident_bytes})


def with_more_rows(setting: Setting, wishes: Setting) -> Setting:
    """Return the setting with the rows that were wished for, or with those that the ladder's first step leaves."""
    options = replace(setting.options, max_rows=wishes.options.max_rows)
    return _with_rows(_ROWS[0], replace(setting, options=options, given_up=setting.given_up_without("rows")))


def _cuts(kind: str, name: str, phrase: str, sizes: Sequence[int]) -> list[Rung]:
    """Return the steps that cut a field of the setting, which counts bytes, to each of these sizes."""
    return [partial(_cut, kind, name, phrase, n_bytes) for n_bytes in sizes]


def _cut(kind: str, name: str, phrase: str, n_bytes: int, setting: Setting) -> Setting:
    if getattr(setting, name) <= n_bytes:
        return setting
    fields: dict[str, Any] = {name: n_bytes}
    return setting.less(kind, phrase.format(format_bytes(n_bytes)), **fields)


def _with_fewer_layers(setting: Setting) -> Setting:
    return setting.less("layers", "fewer layers on devices", fewer_layers=True)


def _without_option(kind: type[Any], sacrifice: Sacrifice, setting: Setting) -> Setting:
    given = setting.options.runtime_options
    if getattr(read_options(kind, given, "it"), sacrifice.name) == sacrifice.value:
        return setting
    changed = {"runtime_options": {**given, sacrifice.name: sacrifice.value}}
    return setting.less(sacrifice.kind, sacrifice.phrase, changed)


def _without_draft_model(setting: Setting) -> Setting:
    if setting.pinned or setting.draft_model is None:
        return setting
    drafters = setting.drafters_without(MODEL, CASCADE)
    return setting.less("draft model", "draft model left out", draft_model=None, drafters=drafters)


def _without_head(setting: Setting) -> Setting:
    if setting.pinned or HEAD not in setting.drafters:
        return setting
    return setting.less(HEAD, "draft head left out", {"draft_head": None}, drafters=setting.drafters_without(HEAD))


def _with_kv(kv_type: str, setting: Setting) -> Setting:
    return setting.less("kv", f"KV cache kept as {kv_type}", {"kv_type": kv_type})


def _with_context(n_ctx: int, setting: Setting) -> Setting:
    if n_ctx >= (setting.options.n_ctx or 0):
        return setting
    return setting.less("context", f"context cut to {n_ctx} tokens", {"n_ctx": n_ctx})


def _with_rows(n_rows: int, setting: Setting) -> Setting:
    if not setting.drafters or setting.max_rows_pinned or not setting.least_rows <= n_rows < setting.options.max_rows:
        return setting
    return setting.less("rows", f"drafts cut to {n_rows - 1} tokens", {"max_rows": n_rows})


def _without_learned(setting: Setting) -> Setting:
    if setting.pinned or not setting.learned_bytes:
        return setting
    return setting.less("learned", "your learned files left out", learned_bytes=0)


def _without_common(setting: Setting) -> Setting:
    if setting.pinned or COMMON not in setting.drafters:
        return setting
    return setting.less("common", "common text left out", drafters=setting.drafters_without(COMMON))


def _without_drafting(setting: Setting) -> Setting:
    if setting.pinned or not setting.drafters:
        return setting
    n_rows = setting.options.max_rows if setting.max_rows_pinned else 1
    setting = replace(setting, given_up=setting.given_up_without("rows"))
    options = {"max_rows": n_rows, "draft_head": None}
    return setting.less("drafting", "drafting turned off", options, drafters=(), learned_bytes=0)
