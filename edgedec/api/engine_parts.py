"""What an engine is made of."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edgedec.chat import ChatTemplate
from edgedec.decoding.session_pool import SessionSlot
from edgedec.memory_plan import MemoryPlan
from edgedec.model import Model


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What an engine is made of.

    Attributes:
        model: The runtime's model.
        slots: The sessions of the requests that are generated at the same time.
        template: The chat template, or None.
        plan: The memory plan that the model was loaded under; without terms where nothing was planned.
        path: The model's file.
        companion: A further model that writes with this one, or None.
        grammar_bytes: Most bytes that compiled grammars take.
        held_bytes: Bytes that count against the caps of models loaded later.
        gpu_held_bytes: The same of the device that holds most.
    """

    model: Model
    slots: Sequence[SessionSlot]
    template: ChatTemplate | None
    plan: MemoryPlan
    path: Path
    companion: Model | None
    grammar_bytes: int
    held_bytes: int
    gpu_held_bytes: int
