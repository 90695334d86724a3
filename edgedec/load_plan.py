"""The plan of a load: which file is loaded on which runtime, with which context, drafters and memory, and why.

A plan begins as a file and the runtime that was chosen for it (edgedec.loading.runtime_choice). It gets what the
options of load ask for (edgedec.api.plan), gives something up where memory is short (edgedec.memory.planner), and is
then loaded (edgedec.api.load) or printed (`edgedec plan`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from edgedec.companion import Companion
from edgedec.drafter import STORE_BYTES, DrafterFactory
from edgedec.load_options import LoadOptions
from edgedec.memory_plan import MemoryPlan
from edgedec.model import Model
from edgedec.pictures import PictureReader
from edgedec.runtime import Runtime

LossyChange = Callable[[Model, Path | None], Model]
"""(the loaded model, the cache folder) -> the model that takes its place, and closes it."""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """How a model is loaded.

    Attributes:
        path: The model's file.
        runtime: The runtime that loads it.
        reason: A sentence that says why the runtime was chosen; empty where no runtimes were compared.
        slower: The runtime that would be preferred but for its speed; it may need less memory.
        header: The file's header, where it has one. While a plan is referenced, read_gguf returns this object to
            whatever plans and loads the model, and parses nothing again.
        options: The runtime's options: context, type of the KV cache, rows, split among devices, a draft head.
        memory: What all of this takes, under which cap; without terms where nothing had to be planned.
        given_up: What was given up to fit: for each kind of sacrifice, the phrase that describes it.
        notes: Sentences for the statistics of every text.
        drafters: The drafters' factories by name, before load has opened them.
        pinned: Whether the caller named the drafters. Named drafters are not given up.
        draft_model: The file of the draft model, where one drafts; or None.
        draft_overlap: Whether the draft model drafts on the CPU while the target verifies.
        store_bytes: Most bytes that each drafter with a store keeps between requests.
        max_rows_pinned: Whether the caller set `options.max_rows`. What the caller set is not given up.
        companion: The method that writes with a further model, or None.
        companion_path: The file of that model, or None.
        change: Makes a lossy model of the loaded one, where layers are left out; else None.
        pictures: Reads pictures for the model; None where no pictures are read.
        pictures_pinned: Whether the caller named the encoder of pictures. A named encoder is not given up.
        grammar_bytes: Most bytes that compiled grammars take, and that each text takes whose tokens a grammar limits;
            0 where no grammar is used. The first grammar also takes a second copy of the vocabulary.
        request_bytes: Bytes that a server keeps for requests, from their bodies to their answers.
        n_texts: Texts of one prompt that a request writes at the same time.
        slides: Whether the context slides. Its length decides then what the model sees of a text, so free memory does
            not make it longer.
        fewer_layers: Whether as many layers as fit are put on devices, instead of all that are wished for.
    """

    path: Path
    runtime: Runtime
    reason: str = ""
    slower: Runtime | None = None
    header: object = field(default=None, repr=False, compare=False)
    options: LoadOptions = field(default_factory=LoadOptions)
    memory: MemoryPlan = field(default_factory=lambda: MemoryPlan(()))
    given_up: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    drafters: Mapping[str, DrafterFactory] = field(default_factory=dict)
    pinned: bool = False
    draft_model: Path | None = None
    draft_overlap: bool = False
    store_bytes: int = STORE_BYTES
    max_rows_pinned: bool = False
    companion: Companion | None = None
    companion_path: Path | None = None
    change: LossyChange | None = None
    pictures: PictureReader | None = None
    pictures_pinned: bool = False
    grammar_bytes: int = 0
    request_bytes: int = 0
    n_texts: int = 1
    slides: bool = False
    fewer_layers: bool = False

    def with_options(self, **options: Any) -> "LoadPlan":
        """Return the plan with other values of fields of the runtime's options."""
        return replace(self, options=replace(self.options, **options))

    def less(self, kind: str, phrase: str, **fields: Any) -> "LoadPlan":
        """Return the plan with a sacrifice of this kind; its phrase replaces an earlier one of the same kind.

        Args:
            kind: The kind of sacrifice, a key of `given_up`.
            phrase: What is given up, in words for a person.
            **fields: Fields of the plan that change.
        """
        return replace(self, given_up={**self.given_up_without(kind), kind: phrase}, **fields)

    def given_up_without(self, kind: str) -> dict[str, str]:
        """Return `given_up` without the sacrifice of that kind."""
        return {name: phrase for name, phrase in self.given_up.items() if name != kind}
