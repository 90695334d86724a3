"""edgedec: the same text, sooner, within the memory you allow.

    import edgedec

    with edgedec.load("model.gguf") as model:
        print(model.generate("The capital of France is", max_tokens=20).text)

Importing this package is cheap: each name below is imported when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgedec.api.engine import Engine
    from edgedec.api.load import load
    from edgedec.api.options import DraftOptions, Lossy
    from edgedec.decoding.generate import TokenStream
    from edgedec.draft import Draft, Verification
    from edgedec.drafter import DraftContext, Drafter, DrafterNeeds
    from edgedec.errors import EdgedecError
    from edgedec.grammar import Grammar
    from edgedec.load_options import LoadOptions
    from edgedec.memory_plan import MemoryPlan, MemoryTerm
    from edgedec.model import Forward, ForwardItem, LayerSet, Model, RowGroup, Session, Span
    from edgedec.progress import CancelToken, Progress
    from edgedec.runtime import Runtime
    from edgedec.sampling import SamplingParams
    from edgedec.sequence import Generation, TokenOutput
    from edgedec.stats import DecodeStats
    from edgedec.tokenizer import Tokenizer

_HOMES = {
    "draft": ("Draft", "Verification"),
    "drafter": ("DraftContext", "Drafter", "DrafterNeeds"),
    "api.engine": ("Engine",),
    "errors": ("EdgedecError",),
    "decoding.generate": ("TokenStream",),
    "grammar": ("Grammar",),
    "api.load": ("load",),
    "api.options": ("DraftOptions", "Lossy"),
    "memory_plan": ("MemoryPlan", "MemoryTerm"),
    "load_options": ("LoadOptions",),
    "model": ("Forward", "ForwardItem", "LayerSet", "Model", "RowGroup", "Session", "Span"),
    "progress": ("CancelToken", "Progress"),
    "runtime": ("Runtime",),
    "sampling": ("SamplingParams",),
    "sequence": ("Generation", "TokenOutput"),
    "stats": ("DecodeStats",),
    "tokenizer": ("Tokenizer",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__version__ = "0.1.0"

__all__ = [
    "CancelToken",
    "DecodeStats",
    "Draft",
    "DraftContext",
    "DraftOptions",
    "Drafter",
    "DrafterNeeds",
    "EdgedecError",
    "Engine",
    "Forward",
    "ForwardItem",
    "Generation",
    "Grammar",
    "LayerSet",
    "LoadOptions",
    "Lossy",
    "MemoryPlan",
    "MemoryTerm",
    "Model",
    "Progress",
    "RowGroup",
    "Runtime",
    "SamplingParams",
    "Session",
    "Span",
    "TokenOutput",
    "TokenStream",
    "Tokenizer",
    "Verification",
    "__version__",
    "load",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'edgedec' has no attribute {name!r}")
    value = getattr(import_module(f"edgedec.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
