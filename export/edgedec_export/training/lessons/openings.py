"""How the prompts begin that a target writes itself: kinds of messages and topics, drawn by number.

A model that answers chats was trained on whole chats. Given the chat's prefix up to the user's message, it writes a
message (Magpie, arXiv:2406.08464); given the message's first words, too, it writes a message of that kind.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random


@dataclass(frozen=True, slots=True)
class Opening:
    """The beginning of a user's message.

    Attributes:
        kind: The kind of prompt, by which acceptance is reported.
        text: The message's first words; may be empty.
        is_whole: Whether `text` is the whole message, which the target does not continue.
    """

    kind: str
    text: str
    is_whole: bool = False


def opening_of(number: int, seed: int, openings: tuple[Opening, ...] = ()) -> Opening:
    """Return the opening of prompt `number`: first the user's own prompts, then drawn ones.

    Args:
        number: Counts the prompts, from 0.
        seed: Another seed draws other openings.
        openings: The user's own prompts.

    >>> opening_of(5, 0) == opening_of(5, 0)
    True
    """
    if number < len(openings):
        return openings[number]
    by_kind, topics = _openings(), _lines("topics.txt")
    draw = Random(f"{seed} {number}")  # a hash of the text, the same on every machine
    kind = draw.choice(sorted(by_kind))
    return Opening(kind, draw.choice(by_kind[kind]).replace("{topic}", draw.choice(topics)))


@cache
def _openings() -> dict[str, list[str]]:
    """Return the texts of openings.txt by kind."""
    by_kind: dict[str, list[str]] = {}
    for line in _lines("openings.txt"):
        kind, _, text = line.partition("|")
        by_kind.setdefault(kind, []).append(text.replace("\\n", "\n"))
    return by_kind


@cache
def _lines(name: str) -> list[str]:
    return Path(__file__).with_name(name).read_text(encoding="utf-8").splitlines()
