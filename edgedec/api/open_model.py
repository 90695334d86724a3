"""An open model: what it was loaded from and holds, and how it ends."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edgedec.api.requests import Requests, adapter_scales
from edgedec.callers import checks_methods
from edgedec.closeable import Closeable
from edgedec.control_tokens import SaidTemplate
from edgedec.decoding.grammars import Grammars
from edgedec.decoding.session_pool import SessionPool, SessionSlot
from edgedec.memory_plan import MemoryPlan, format_bytes
from edgedec.model import Model, Session
from edgedec.model_card import ModelCard
from edgedec.pictures import PictureReader
from edgedec.runtime import processes_of
from edgedec.tokenizer import Tokenizer


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
        scales: Those of the model's adapters, for requests that name none.
        grammar_bytes: Most bytes that compiled grammars take.
        held_bytes: Bytes that count against the caps of models loaded later.
        gpu_held_bytes: The same of the device that holds most.
        pictures: Reads pictures for the model, or None.
    """

    model: Model
    slots: Sequence[SessionSlot]
    template: SaidTemplate | None
    plan: MemoryPlan
    path: Path
    companion: Model | None
    scales: tuple[float, ...]
    grammar_bytes: int
    held_bytes: int
    gpu_held_bytes: int
    pictures: PictureReader | None = None


@checks_methods
class OpenModel(Closeable):
    """A model with its sessions, and what is kept beside them until close().

    Attributes:
        model: The runtime's model, for forwards without sampling.
        card: The facts of the model.
        tokenizer: The model's tokenizer.
        path: The model's file.
        plan: The memory plan that the model was loaded under; without terms where nothing was planned.
        held_bytes: Bytes that count against the caps of models loaded later; 0 once the engine is closed.
        gpu_held_bytes: The same of the device that holds most.
        pool: The sessions that requests are generated on, each with what a generation on it must know.
        requests: Makes the requests of texts, for generations of one's own.
    """

    def __init__(self, parts: EngineParts) -> None:
        self.model = parts.model
        self.card: ModelCard = parts.model.card
        self.tokenizer: Tokenizer = parts.model.tokenizer
        self.plan = parts.plan
        self.held_bytes, self.gpu_held_bytes = parts.held_bytes, parts.gpu_held_bytes
        self.path = parts.path
        self._companion, self._template = parts.companion, parts.template
        self._pictures = parts.pictures
        self.pool = SessionPool(parts.slots)
        self._slot = parts.slots[0]
        self._grammars = Grammars(self.tokenizer, parts.grammar_bytes, self.card.fingerprint)
        self.requests = Requests(self.model, self._slot, self._grammars, parts.scales)

    def __repr__(self) -> str:
        held = format_bytes(self.held_bytes) if self.held_bytes else "closed"
        return f"<Engine {self.path.stem}: {self.card.runtime}, {self.n_ctx} tokens of context, {held}>"

    @property
    def processes(self) -> tuple[int, ...]:
        """The further processes that run its models now, whose memory counts as this process's; mostly none."""
        return processes_of(self.model, self._companion, self._pictures)

    @property
    def lora(self) -> tuple[float, ...]:
        """The scale of each adapter (ModelCard.adapters) in requests that name none; it may be set at any time."""
        return self.requests.scales

    @lora.setter
    def lora(self, scales: Sequence[float]) -> None:
        self.requests.scales = adapter_scales(scales, len(self.card.adapters))

    @property
    def n_ctx(self) -> int:
        """Tokens of the context of a generation."""
        return self._slot.session.n_ctx

    @property
    def n_prompt_max(self) -> int:
        """Most tokens of a prompt: one fewer than a text may have, or as many where the model writes none.

        A text may have as many as the context, unless that slides.
        """
        return self.requests.n_prompt_max

    def forget(self) -> None:
        """Forget what the drafters keep between requests, and what was measured of their acceptance.

        So a trained head that rests, because it accepted too little, drafts again.
        """
        if self._slot.drafting is not None:
            with self.pool.all() as slots:
                for slot in slots:
                    if slot.drafting is not None:
                        slot.drafting.forget()

    def session(self, n_ctx: int | None = None) -> Session:
        """Open a session of `n_ctx` tokens, the engine's by default, for forwards without sampling; you close it."""
        session = self._slot.session.model.session(self.n_ctx if n_ctx is None else n_ctx)
        if any(self.lora):
            session.adapt(self.lora)
        return session

    def save_draft_store(self) -> None:
        """Write the file of load(draft_store=...) now, as close() does, if there is something new to write.

        Raises:
            StorageError, ModelFormatError: The file can't be written, or is another model's by now; close() then
                does not try again.
        """
        if self._slot.drafting is not None:
            with self.pool.all():
                self._slot.drafting.save()

    def close(self) -> None:
        """End all streams, paused ones too, and free the model; calling it again does nothing.

        A stream that is ended raises StopIteration at its next token; its finish_reason is "cancelled". If close() is
        called from within a stream (by on_progress or a drafter), the model is freed after that stream's step.

        Raises:
            StorageError, ModelFormatError: The model is freed, but the draft store could not be written.
        """
        for slot in self.pool.slots:
            slot.closing = True
            slot.session.cancel()
        if os.getpid() != self._slot.pid:  # in a forked child
            self._close_models()
            return
        streams = [stream for slot in self.pool.slots if (stream := slot.stream and slot.stream())]
        for stream in streams:
            stream.cancel()  # all of them, before the first is waited for
        if any(stream.close_soon(self.close) for stream in streams):
            return
        for stream in streams:
            stream.close()
        with self.pool.all():
            self._close_models()

    def _close_models(self) -> None:
        self.held_bytes = self.gpu_held_bytes = 0
        drafting = self._slot.drafting
        for slot in self.pool.slots:
            if slot.drafting is not None:
                slot.drafting.close()
        if self._companion is not None:
            self._companion.close()
        if self._pictures is not None:
            self._pictures.close()
        self.model.close()
        if drafting is not None and os.getpid() == self._slot.pid:
            drafting.save()
