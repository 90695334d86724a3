"""The small model of a pair that writes in turn (edgedec.sessions.model_switching): loading it, and what that takes."""

from dataclasses import replace
from pathlib import Path

from edgedec.draft import DrafterFactory
from edgedec.errors import RequestError, UnsupportedModelError
from edgedec.loading.draft_model import same_tokenizer
from edgedec.loading.runtime_choice import choose_runtime
from edgedec.memory_plan import MemoryTerm
from edgedec.model import LoadOptions, Model


def open_small_model(path: Path, large: Model, options: LoadOptions) -> Model:
    """Load the small model beside the large one.

    Raises:
        UnsupportedModelError: Their vocabularies differ.
        EdgedecError: As Runtime.load.
    """
    smaller = _small_options(options)
    model = choose_runtime(path, "auto", smaller).runtime.load(path, smaller)
    n_small, n_large = model.card.n_vocab, large.card.n_vocab
    if n_small == n_large and same_tokenizer(model, large):
        return model
    model.close()
    raise UnsupportedModelError(
        f"{path}: its vocabulary of {n_small} tokens is not the large model's of {n_large}, and two models that write "
        "in turn read each other's tokens; choose a small model of the large one's family"
    )


def small_model_terms(path: Path, options: LoadOptions) -> list[MemoryTerm]:
    """Return what the small model adds to the large one's memory plan (raises what Runtime.plan raises)."""
    smaller = replace(_small_options(options), on_progress=None)
    terms = choose_runtime(path, "auto", smaller).runtime.plan(path, smaller)
    return [replace(term, name=f"small model: {term.name}") for term in terms if not term.base]


def for_pair(options: LoadOptions) -> LoadOptions:
    """Return the options for the large model of a pair: nothing is drafted, and requests take turns."""
    return replace(options, max_rows=1, n_parallel=1)


def require_alone(
    draft: str | DrafterFactory | None, draft_model: Path | None, *, slide: bool, prompt_cache: bool
) -> None:
    """Raise RequestError where something is asked for that two models that write in turn don't do."""
    refused = {
        "a draft model (--draft-model, draft_model=...)": draft_model is not None,
        f"the drafter {draft!r} (--draft, draft=...)": draft not in ("auto", "off", None),
        "a context that slides (--slide, slide=True)": slide,
        "a prompt cache (--prompt-cache)": prompt_cache,
    }
    for what, asked in refused.items():
        if asked:
            raise RequestError(f"two models that write in turn don't go together with {what}: leave out one of them")


def _small_options(options: LoadOptions) -> LoadOptions:
    return replace(for_pair(options), resident_bytes=None)
