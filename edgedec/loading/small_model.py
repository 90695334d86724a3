"""Loading the small model of a pair that writes in turn (edgedec.sessions.model_switching)."""

from dataclasses import replace
from pathlib import Path

from edgedec.draft import DrafterFactory
from edgedec.errors import RequestError, UnsupportedModelError
from edgedec.loading.second_model import load_second_model, same_tokenizer
from edgedec.model import LoadOptions, Model


def open_small_model(path: Path, large: Model, options: LoadOptions) -> Model:
    """Load the small model of a pair, with the options of the large one.

    Raises:
        UnsupportedModelError: The models' vocabularies differ.
        EdgedecError: As choose_runtime and Runtime.load.
    """
    model = load_second_model(path, small_model_options(options))
    n_small, n_large = model.card.n_vocab, large.card.n_vocab
    if n_small == n_large and same_tokenizer(model, large):
        return model
    model.close()
    raise UnsupportedModelError(
        f"{path}: its vocabulary of {n_small} tokens is not the large model's of {n_large}, and two models that write "
        "in turn read each other's tokens; choose a small model of the large one's family"
    )


def pair_options(options: LoadOptions) -> LoadOptions:
    """Return the options for the large model of a pair: nothing is drafted, and requests take turns."""
    return replace(options, max_rows=1, n_parallel=1)


def small_model_options(options: LoadOptions) -> LoadOptions:
    """Return the options for the small model of a pair, from those of the large one."""
    return replace(pair_options(options), resident_bytes=None)


def require_alone(
    draft: str | DrafterFactory | None, draft_model: object | None, *, slide: bool, prompt_cache: bool
) -> None:
    """Raise RequestError if another option is given that two models that write in turn can't honour."""
    refused = {
        "a draft model (--draft-model, draft_model=...)": draft_model is not None,
        f"the drafter {draft!r} (--draft, draft=...)": draft not in ("auto", "off", None),
        "a context that slides (--slide, slide=True)": slide,
        "a prompt cache (--prompt-cache)": prompt_cache,
    }
    for option, is_given in refused.items():
        if is_given:
            raise RequestError(f"two models that write in turn don't go together with {option}: leave out one of them")
