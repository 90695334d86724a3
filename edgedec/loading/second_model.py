"""Models that are loaded beside another one: the draft model, and the small model that writes in turn."""

from dataclasses import replace
from pathlib import Path

from edgedec.errors import EdgedecError
from edgedec.loading.runtime_choice import choose_runtime
from edgedec.memory_plan import MemoryTerm
from edgedec.model import LoadOptions, Model

_SAMPLED = 4096  # tokens of two vocabularies that are compared
PROBE = "The quick (brown) fox_jumps,\n  über 12,345 lazy dogs."
"""A text of many kinds of characters, by which two tokenizers are compared."""


def load_second_model(path: Path, options: LoadOptions) -> Model:
    """Load a model on the best runtime that takes it (raises what choose_runtime and Runtime.load raise)."""
    return choose_runtime(path, "auto", options).runtime.load(path, options)


def second_model_terms(path: Path, options: LoadOptions, name: str) -> tuple[MemoryTerm, ...]:
    """Return what a second model adds to a memory plan; its terms' names begin with "`name`: ".

    Raises:
        EdgedecError: As choose_runtime and Runtime.plan.
    """
    options = replace(options, on_progress=None)
    terms = choose_runtime(path, "auto", options).runtime.plan(path, options)
    return tuple(replace(term, name=f"{name}: {term.name}") for term in terms if not term.base)


def same_tokenizer(model: Model, target: Model) -> bool:
    """Return whether the tokens of both models stand for the same texts, and a text becomes the same tokens.

    Of large vocabularies some 4,096 tokens are compared, of which 1 % may differ.
    """
    ours, theirs = model.tokenizer, target.tokenizer
    n_both = min(model.card.n_vocab, target.card.n_vocab, ours.n_vocab, theirs.n_vocab)
    ids = range(0, n_both, max(1, n_both // _SAMPLED))
    n_different = sum(ours.piece(i) != theirs.piece(i) for i in ids)
    if n_different > len(ids) // 100:
        return False
    try:
        return ours.encode(PROBE, add_special=False) == theirs.encode(PROBE, add_special=False)
    except EdgedecError:
        return True  # one of them can't encode text; where the tokens are the same, no text needs to be encoded
