"""Loading a draft model beside its target, and what it adds to the target's memory plan."""

from dataclasses import replace
from pathlib import Path

from edgedec.drafters.draft_model.alignment import encode_aligned
from edgedec.drafters.draft_model.model import ROWS, WINDOW, DraftModel
from edgedec.drafters.draft_model.overlapped import OverlappedModel
from edgedec.drafters.draft_model.universal import UniversalDraftModel
from edgedec.errors import EdgedecError, RequestError, UnsupportedModelError
from edgedec.loading.runtime_choice import choose_runtime
from edgedec.memory_plan import MemoryTerm
from edgedec.model import LoadOptions, Model

DRAFT_MODEL_TERMS = "draft model: "
"""How the names of a draft model's terms in a memory plan begin."""

_SAMPLED = 4096  # tokens of two vocabularies that are compared
_PROBE = "The quick (brown) fox_jumps,\n  über 12,345 lazy dogs."


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
