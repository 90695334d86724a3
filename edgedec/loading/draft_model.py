"""Loading a draft model beside its target."""

from dataclasses import replace
from pathlib import Path

from edgedec.drafters.draft_model.alignment import encode_aligned
from edgedec.drafters.draft_model.model import ROWS, WINDOW, DraftModel
from edgedec.drafters.draft_model.overlapped import OverlappedModel
from edgedec.drafters.draft_model.universal import UniversalDraftModel
from edgedec.errors import RequestError, UnsupportedModelError
from edgedec.loading.second_model import PROBE, load_second_model, same_tokenizer
from edgedec.model import LoadOptions, Model


def open_draft_model(
    path: Path, target: Model, options: LoadOptions, *, overlap: bool = False
) -> DraftModel | UniversalDraftModel:
    """Load a draft model. Where its tokenizer is not the target's, it drafts text instead of tokens.

    Args:
        path: The draft model's file.
        target: The model that verifies the drafts.
        options: The target's options.
        overlap: Run the draft model on the CPU, and let it go on drafting while the target verifies.

    Raises:
        UnsupportedModelError: The tokenizers differ, and one of them can't encode text.
        RequestError: With `overlap`: the tokenizers differ.
        EdgedecError: As choose_runtime and Runtime.load.
    """
    model = load_second_model(path, draft_model_options(options, overlap=overlap))
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


def draft_model_options(options: LoadOptions, *, overlap: bool = False) -> LoadOptions:
    """Return the options to load a draft model with, from those of its target."""
    smaller = replace(options, n_ctx=WINDOW, n_parallel=1, max_rows=ROWS, resident_bytes=None)
    return replace(smaller, device=None, n_gpu_layers=0) if overlap else smaller


def _require_encoding(model: Model, path: Path) -> None:
    """Raise UnsupportedModelError unless the tokenizer turns a text into tokens that spell the same text."""
    if encode_aligned(model.tokenizer, PROBE.encode()) is None:
        name = model.card.name or model.card.architecture
        raise UnsupportedModelError(
            f"{path}: its tokenizer is not the target's, and the tokenizer of {name!r} does not encode a text as "
            "tokens that spell the same text, which drafting across tokenizers needs; choose a draft model of the "
            "target's family"
        )
