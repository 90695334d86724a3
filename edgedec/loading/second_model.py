"""Models that are loaded beside another one: a draft model, and the companion that a method writes with."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from edgedec import plugins
from edgedec.companion import Companion
from edgedec.errors import EdgedecError, UnsupportedModelError
from edgedec.gguf.file import read_header_of
from edgedec.gguf.model_info import describe
from edgedec.load_options import LoadOptions, known_to
from edgedec.loading.runtime_choice import choose_runtime
from edgedec.memory_plan import HasDevices, MemoryTerm
from edgedec.model import Model
from edgedec.runtime import Runtime
from edgedec.sessions.cost_probe import cost_curve

if TYPE_CHECKING:
    from edgedec.drafters.draft_model.model import DraftSource

_TIMING_S = 0.5  # what timing a draft model may take
_SAMPLED = 4096  # tokens of two vocabularies that are compared
PROBE = "The quick (brown) fox_jumps,\n  über 12,345 lazy dogs."


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A draft model that was loaded, for the plug-ins that are ways to draft with it.

    A way is called with this. It returns the factory of its drafters (edgedec.drafters.draft_model.model.DraftSource);
    None where it is not the way for these models; and raises an EdgedecError where they can't draft as was asked.

    Attributes:
        model: The draft model, which is closed if a way raises.
        path: Its file, for messages.
        target: The model that verifies the drafts.
        same_tokenizer: Whether the tokens of both stand for the same texts, as same_tokenizer() says.
        overlap: Whether the draft model is to draft while the target verifies.
        most: Most texts that are drafted for at a time; None for any number.
    """

    model: Model
    path: Path
    target: Model
    same_tokenizer: bool
    overlap: bool = False
    most: int | None = None


def open_draft_model(
    path: Path, target: Model, options: LoadOptions, *, overlap: bool = False, most: int | None = None
) -> "DraftSource":
    """Load a draft model; the first plug-in (edgedec.plugins.DRAFT_MODELS) that takes it says how it drafts.

    `options` are the target's, all else is as in LoadedDraft; a draft model that overlaps runs on the CPU.

    Raises:
        UnsupportedModelError, RequestError: The two models can't draft that way.
        EdgedecError: As choose_runtime and Runtime.load.
    """
    from edgedec.drafters.draft_model.model import DraftModel

    model = _load(path, draft_model_options(options, overlap=overlap))
    try:
        loaded = LoadedDraft(model, path, target, same_tokenizer(model, target), overlap, most)
        source: DraftSource | None = plugins.first_made(plugins.DRAFT_MODELS, loaded)
        return DraftModel(model, most) if source is None else source
    except BaseException:
        model.close()
        raise


def draft_token_s(source: "DraftSource", options: LoadOptions) -> float | None:
    """Return the seconds that a draft model takes for a token, from the cache or measured now; None where that fails.

    Measuring empties the draft model's first session. `options` are what draft_model_options returned.
    """
    return cost_curve(source.source.texts[0].session, options, _TIMING_S, most_rows=2).seconds(1)


def draft_model_options(options: LoadOptions, *, overlap: bool = False) -> LoadOptions:
    """Return the options to load a draft model with, from those of its target."""
    from edgedec.drafters.draft_model.model import ROWS, WINDOW

    smaller = replace(_of_this_machine(options), n_ctx=WINDOW, max_rows=ROWS, resident_bytes=None, draft_head=None)
    return replace(smaller, device=None, n_gpu_layers=0, layer_split=None) if overlap else smaller


def open_companion(path: Path, target: Model, options: LoadOptions, method: Companion) -> Model:
    """Load the further model that a method writes with, with the options of the target.

    Raises:
        UnsupportedModelError: The models' vocabularies differ.
        EdgedecError: As choose_runtime and Runtime.load.
    """
    model = _load(path, companion_options(options))
    n_small, n_large = model.card.n_vocab, target.card.n_vocab
    if n_small == n_large and same_tokenizer(model, target):
        return model
    model.close()
    raise UnsupportedModelError(
        f"{path}: its vocabulary of {n_small} tokens is not the large model's of {n_large}, and for {method.what} "
        f"both must have the same; choose a {method.role} of the large one's family"
    )


def pair_options(options: LoadOptions) -> LoadOptions:
    """Return the options for a target that writes with a companion: nothing is drafted, and requests take turns."""
    return replace(options, max_rows=1, n_parallel=1, draft_head=None, prompt_cache_bytes=0)


def companion_options(options: LoadOptions) -> LoadOptions:
    """Return the options for the companion of a target, from the target's."""
    return replace(_of_this_machine(pair_options(options)), resident_bytes=None, layer_split=None)


def _of_this_machine(options: LoadOptions) -> LoadOptions:
    """Return the options of a second model, which is on this machine, from those of a target with its adapters.

    A number of layers is then one of the target's, on all machines together, and says nothing of another model.
    """
    options = replace(options, adapters=(), prompt_cache_bytes=0)
    if not options.machines:
        return options
    counts = options.n_gpu_layers is not None and options.n_gpu_layers > 0
    return replace(options, machines=(), n_gpu_layers=None if counts else options.n_gpu_layers)


def second_model_terms(path: Path, options: LoadOptions, name: str) -> tuple[MemoryTerm, ...]:
    """Return what a second model adds to a memory plan; its terms' names begin with "`name`: ".

    Raises:
        EdgedecError: As choose_runtime and Runtime.plan.
    """
    runtime, options = _runtime(path, replace(options, on_progress=None))
    terms = runtime.plan(path, options)
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


def _load(path: Path, options: LoadOptions) -> Model:
    runtime, options = _runtime(path, options)
    return runtime.load(path, options)


def _runtime(path: Path, options: LoadOptions) -> tuple[Runtime, LoadOptions]:
    """Return the runtime of a second model, and its options: all its layers lie where the target's last ones do.

    Where these are on another machine, the second model's layers are on the host.
    """
    runtime_options = options.runtime_options  # the target's: the second model's runtime may be another one
    choice = choose_runtime(path, "auto", replace(options, runtime_options={}))
    options = replace(options, runtime_options=known_to(choice.runtime, runtime_options))
    if options.layer_split is None:
        return choice.runtime, options
    if not isinstance(choice.runtime, HasDevices):
        return choice.runtime, replace(options, layer_split=None)
    devices = [device.name for device in choice.runtime.devices(replace(options, layer_split=None))]
    n_layers = describe(read_header_of(path)).n_layer + 1
    split = tuple((name, n_layers) for name, _ in options.layer_split[-1:] if name in devices)
    return choice.runtime, replace(options, layer_split=split)
