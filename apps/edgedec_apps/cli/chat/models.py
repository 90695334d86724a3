"""Models in a chat: what /show says of the one that answers, and what /model does to have another one answer."""

from collections.abc import Iterator

from edgedec.errors import EdgedecError
from edgedec.memory_plan import format_bytes
from edgedec_apps.cli.chat.conversation import Conversation
from edgedec_apps.cli.interrupts import TerminatedError
from edgedec_apps.cli.reports.memory_report import planned_range
from edgedec_apps.cli.shown.explain import SAMPLED, sampling_line
from edgedec_apps.cli.shown.terminal import say


def switch(conversation: Conversation, name: str) -> None:
    """Let the model of this name answer from now on; the messages and the settings stay.

    What its header tells is looked at before the present model is closed. Where the new one can't be loaded, the
    present one is loaded again.

    Raises:
        EdgedecError: There is no such model, it has no chat template, or it can't be loaded; or Ctrl-C stopped it.
    """
    conversation.check(name)
    conversation.engine.close()
    try:
        conversation.engine = conversation.open(name)
    except TerminatedError:
        raise
    except EdgedecError:
        say(f"edgedec: {conversation.model} answers again")
        conversation.engine = conversation.open(conversation.model)
        raise
    conversation.model, conversation.last = name, None


def facts(conversation: Conversation) -> Iterator[tuple[str, str]]:
    """Yield what a person may ask of a chat, name and value: its model, its messages, and its settings."""
    engine, options = conversation.engine, conversation.options
    card, plan = engine.card, engine.plan
    trained = f", trained for {card.n_ctx_train}" if card.n_ctx_train else ""
    others = [f"{name} {value}" for name, value in options.items() if name not in SAMPLED and value is not False]
    yield "model", conversation.model
    yield "architecture", f"{card.architecture}, {card.n_layer} layers of width {card.n_embd}, {card.n_vocab} tokens"
    yield "runtime", card.runtime
    yield "context", f"{engine.n_ctx} tokens{trained}"
    yield "memory", planned_range(plan) if plan.terms else format_bytes(engine.held_bytes)
    yield "messages", str(len(conversation.messages))
    yield "files", f"{len(conversation.attached)} before the next message"
    yield "pictures", f"{len(conversation.pictures)} before the next message"
    yield "sampling", sampling_line(engine, options).removeprefix("sampling: ")
    yield "other settings", ", ".join(others) or "none"
    yield "system", conversation.system or "none"
