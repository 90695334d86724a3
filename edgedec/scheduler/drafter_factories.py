"""From the names of drafters to what makes them; loading a draft model."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from edgedec import plugins
from edgedec.cost_curve import CostCurve
from edgedec.draft import DrafterFactory
from edgedec.drafters.draft_model.alignment import encode_aligned
from edgedec.drafters.draft_model.cascade import CascadeModel
from edgedec.drafters.draft_model.model import ROWS, WINDOW, DraftModel
from edgedec.drafters.draft_model.overlapped import OverlappedModel
from edgedec.drafters.draft_model.universal import UniversalDraftModel
from edgedec.errors import EdgedecError, RequestError, UnsupportedModelError
from edgedec.layer_skip.layer_sets import TunedSet
from edgedec.loading.runtime_choice import choose_runtime
from edgedec.memory_plan import MemoryTerm
from edgedec.model import LoadOptions, Model
from edgedec.scheduler.drafter_record import best_length
from edgedec.scheduler.plugin_guard import guarded

SUFFIX, COMMON, MODEL, CASCADE, SKIP, EXIT = "suffix", "common", "model", "cascade", "skip", "exit"
NGRAMS = ("recycling", "trigram", "stand")
AUTO = (SUFFIX, COMMON)
DRAFT_MODEL_TERMS = "draft model: "
"""How the names of a draft model's terms in a memory plan begin."""
SKIP_GAIN = 1.03
"""What drafting with a tuned set of layers must promise before `auto` takes it."""

_SAMPLED = 4096  # tokens of two vocabularies that are compared
_PROBE = "The quick (brown) fox_jumps,\n  über 12,345 lazy dogs."


def drafter_factories(
    draft: str | DrafterFactory | None, *, with_model: bool
) -> tuple[dict[str, DrafterFactory], bool]:
    """Return the factories by name, the draft model's still to be filled in, and whether they are pinned.

    Raises:
        PluginError: A drafter has no such name, or does not import.
        RequestError: The draft model is asked for, and none is given.
    """
    if draft is None or draft == "off":
        return {}, False
    if not isinstance(draft, str):
        return {getattr(draft, "__name__", "custom"): guarded(draft)}, True
    names = [*AUTO, *([MODEL] if with_model else [])] if draft == "auto" else draft.split("+")
    for name in names:
        if name in (MODEL, CASCADE) and not with_model:
            raise RequestError(f"the drafter {name!r} needs a draft model; give one (--draft-model, draft_model=...)")
    return {name: _factory(name) for name in names}, draft != "auto"


def with_draft_model(
    factories: Mapping[str, DrafterFactory], source: DraftModel | UniversalDraftModel, *, pinned: bool
) -> dict[str, DrafterFactory]:
    """Return the factories with the draft model's in their places; a cascade drafts the same in less time.

    Raises:
        RequestError: A cascade is asked for, and the draft model's tokenizer is not the target's.
    """
    filled = dict(factories)
    if CASCADE in filled:
        if not isinstance(source, DraftModel):
            raise RequestError("the drafter 'cascade' needs a draft model with the target's tokenizer; use 'model'")
        filled[CASCADE] = CascadeModel(source)
    if MODEL in filled:
        if isinstance(source, DraftModel) and not isinstance(source, OverlappedModel) and not pinned:
            del filled[MODEL]
            filled[CASCADE] = CascadeModel(source)
        else:
            filled[MODEL] = source
    return filled


def used_draft_model(path: Path | None, drafters: Collection[str]) -> tuple[Path | None, tuple[str, ...]]:
    """Return the draft model where one of these drafters uses it, and what to tell where none does.

    >>> used_draft_model(Path("small.gguf"), ["suffix"])
    (None, ('the draft model small.gguf is not loaded: it is for the drafters model and cascade, found suffix',))
    """
    if path is None or MODEL in drafters or CASCADE in drafters:
        return path, ()
    found = f"it is for the drafters {MODEL} and {CASCADE}, found {' + '.join(drafters) or 'none'}"
    return None, (f"the draft model {path.name} is not loaded: {found}",)


def require_overlap(drafters: Collection[str]) -> None:
    """Raise RequestError unless a draft model is among these drafters that can go on while the target verifies."""
    if MODEL not in drafters or CASCADE in drafters:
        found = " + ".join(drafters) or "none"
        raise RequestError(
            "draft_overlap takes a draft model (--draft-model, draft_model=...) and the drafters 'auto' or 'model', "
            f"found the drafters {found}; give them, or leave draft_overlap out"
        )


def promised_gain(tuned: TunedSet, curve: CostCurve, n_max: int) -> float:
    """Return how many times as fast as plain decoding drafts with a tuned set would be by the measured curve.

    0 where nothing was measured, or no draft can be verified.

    >>> from edgedec.model import LayerSet
    >>> tuned = TunedSet(LayerSet.of(4, [0, 3]), 0.5, 0.5, 0.8, 2000)
    >>> round(promised_gain(tuned, CostCurve({1: 0.10, 2: 0.11}), 1), 3)
    1.125
    """
    whole_s = curve.seconds(1)
    if whole_s is None or n_max < 1:
        return 0.0
    cost = curve.up_to(n_max + 1).__getitem__
    return best_length(tuned.agreement, tuned.cost * whole_s, cost, n_max, 1 / whole_s)[1]


def _factory(name: str) -> DrafterFactory:
    factory: DrafterFactory = plugins.load_plugin(plugins.DRAFTERS, name)
    return factory if plugins.is_own(plugins.DRAFTERS, name) else guarded(factory)


def open_draft_model(
    path: Path, target: Model, options: LoadOptions, *, overlap: bool = False
) -> DraftModel | UniversalDraftModel:
    """Load a draft model beside its target; it drafts through the text where its tokenizer is another one.

    With `overlap` it goes on while the target verifies, on the CPU, wherever the target is.

    Raises:
        UnsupportedModelError: One of two different tokenizers can't encode text.
        RequestError: It is to overlap, and its tokenizer is not the target's.
        EdgedecError: As Runtime.load.
    """
    smaller = _draft_options(options, overlap=overlap)
    model = choose_runtime(path, "auto", smaller).runtime.load(path, smaller)
    try:
        if same_tokenizer(model, target):
            return OverlappedModel(model) if overlap else DraftModel(model)
        if overlap:
            raise RequestError(
                f"{path}: its tokenizer is not the target's, which draft_overlap needs; choose a draft model of the "
                "target's family, or leave draft_overlap out"
            )
        for loaded in (model, target):
            _require_encoding(loaded, path)
        return UniversalDraftModel(model)
    except BaseException:
        model.close()
        raise


def draft_model_terms(path: Path, options: LoadOptions, *, overlap: bool = False) -> list[MemoryTerm]:
    """Return what a draft model adds to its target's memory plan (raises what Runtime.plan raises)."""
    smaller = replace(_draft_options(options, overlap=overlap), on_progress=None)
    terms = choose_runtime(path, "auto", smaller).runtime.plan(path, smaller)
    return [replace(term, name=f"{DRAFT_MODEL_TERMS}{term.name}") for term in terms if not term.base]


def _draft_options(options: LoadOptions, *, overlap: bool) -> LoadOptions:
    smaller = replace(options, n_ctx=WINDOW, n_parallel=1, max_rows=ROWS, resident_bytes=None)
    return replace(smaller, device=None, n_gpu_layers=0) if overlap else smaller


def same_tokenizer(model: Model, target: Model) -> bool:
    """Return whether the tokens of both vocabularies are the same text, and a text becomes the same tokens."""
    ours, theirs = model.tokenizer, target.tokenizer
    n_both = min(model.card.n_vocab, target.card.n_vocab, ours.n_vocab, theirs.n_vocab)
    ids = range(0, n_both, max(1, n_both // _SAMPLED))
    n_different = sum(ours.piece(i) != theirs.piece(i) for i in ids)
    if n_different > len(ids) // 100:
        return False
    try:
        return ours.encode(_PROBE, add_special=False) == theirs.encode(_PROBE, add_special=False)
    except EdgedecError:
        return True  # no text needs encoding where the tokens are the same


def _require_encoding(model: Model, path: Path) -> None:
    """Raise UnsupportedModelError unless the tokenizer makes a text tokens, and those the text."""
    if encode_aligned(model.tokenizer, _PROBE.encode()) is None:
        name = model.card.name or model.card.architecture
        raise UnsupportedModelError(
            f"{path}: its tokenizer is not the target's, and the tokenizer of {name!r} does not make text tokens that "
            "spell it again, which drafting through the text takes; choose a draft model of the target's family"
        )
