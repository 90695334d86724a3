"""Made tasks whose answer is a JSON object: extraction from a message, and calls of tools.

Like those of made_tasks, each task is made from a seed. `said_wrong` is what anyone could check who does not know the
answer: the keys, the types, and that what was extracted stands in the message.
"""

import json
import re
from collections.abc import Mapping
from datetime import date, timedelta
from random import Random
from typing import Any

from made_tasks import MadeTask

OBJECT = r"(?s)\{.*\}"
"""The regular expression of an answer, for votes."""
_NAMES = ("Mara Lindt", "Ivo Berg", "Nadia Rossi", "Tomas Vale", "Lena Holm", "Omar Saad")
_ITEMS = ("oak chairs", "desk lamps", "garden hoses", "wool blankets", "steel bowls", "wall clocks")
_CITIES = ("Utrecht", "Graz", "Porto", "Gdansk", "Lyon", "Turku")
_DATE, _TIME = r"\d{4}-\d\d-\d\d", r"\d\d:\d\d"
_KEYS: Mapping[str, str | type] = {
    "customer": str,
    "item": str,
    "quantity": int,
    "total": int,
    "city": str,
    "date": _DATE,
}
_TOOLS: Mapping[str, Mapping[str, str | type]] = {
    "book_room": {"room": int, "date": _DATE, "start": _TIME, "minutes": int},
    "set_heating": {"floor": "ground|first|attic", "degrees": int, "until": _TIME},
    "order_parts": {"part": str, "count": int, "deliver_by": _DATE},
}
"""By tool, its arguments: a type, or the pattern of a text."""


def json_tasks(kind: str, n: int, seed: int = 0) -> list[MadeTask]:
    """Return n tasks of the kind "extraction" or "tools"; task i of a seed is the same whatever n is."""
    make = {"extraction": _extraction, "tools": _tools}[kind]
    return [_made(kind, f"{kind}-{seed}-{i}", *make(Random(f"{kind} {seed} {i}"))) for i in range(n)]


def _made(kind: str, id: str, prompt: str, answer: Mapping[str, Any]) -> MadeTask:
    return MadeTask(id, kind, prompt, json.dumps(answer, sort_keys=True))


def _day(rng: Random) -> date:
    return date(2024, 1, 1) + timedelta(days=rng.randrange(700))


def _said(day: date) -> str:
    return f"{day.day} {day:%B %Y}"


def _extraction(rng: Random) -> tuple[str, dict[str, Any]]:
    """Make a message about an order, with an older order beside it."""
    (name, other), (item, old) = rng.sample(_NAMES, 2), rng.sample(_ITEMS, 2)
    city, day, n, each = rng.choice(_CITIES), _day(rng), rng.randint(2, 40), rng.randint(3, 60)
    sentences = [
        f"{name} has ordered {n} {item} at {each} euros each, {n * each} euros in all, on {_said(day)}.",
        f"They go to {city}.",
        f"The {rng.randint(2, 9)} {old} that {other} sent back last year are still in the cellar.",
    ]
    if rng.random() < 0.5:
        sentences.insert(0, sentences.pop())
    prompt = (
        "Read the message and answer with one JSON object about the new order, without explanations. Its keys: "
        '"customer", "item" (as the message says it), "quantity" (a number), "total" (a number, in euros), "city", '
        f'"date" (as YYYY-MM-DD).\n\nMessage: {" ".join(sentences)}'
    )
    return prompt, {
        "customer": name,
        "item": item,
        "quantity": n,
        "total": n * each,
        "city": city,
        "date": day.isoformat(),
    }


def _tools(rng: Random) -> tuple[str, dict[str, Any]]:
    """Make a request that one of three tools serves."""
    day, hour, half = _day(rng), rng.randint(1, 6), rng.random() < 0.5
    said_time = f"half past {hour} in the afternoon" if half else f"{hour} in the afternoon"
    time = f"{hour + 12}:{30 if half else 0:02}"
    name = rng.choice(list(_TOOLS))
    if name == "book_room":
        room, hours = rng.randint(1, 30), rng.randint(2, 4)
        asked = f"I need room {room} on {_said(day)}, from {said_time}, for {hours} hours."
        arguments: dict[str, Any] = {"room": room, "date": day.isoformat(), "start": time, "minutes": 60 * hours}
    elif name == "set_heating":
        floor, degrees = rng.choice(["ground", "first", "attic"]), rng.randint(15, 24)
        asked = f"Keep the {floor} floor at {degrees} degrees until {said_time}, please."
        arguments = {"floor": floor, "degrees": degrees, "until": time}
    else:
        part, n = rng.choice(["bolt M6", "hinge 40", "valve B2"]), rng.randint(2, 12)
        asked = f"We are out of {part}: get us {n} dozen by {_said(day)}."
        arguments = {"part": part, "count": 12 * n, "deliver_by": day.isoformat()}
    tools = {tool: {key: _type_said(kind) for key, kind in keys.items()} for tool, keys in _TOOLS.items()}
    prompt = (
        "You can call one of these tools. The list has their arguments.\n"
        + "\n".join(f"{tool}: {json.dumps(keys)}" for tool, keys in tools.items())
        + '\n\nAnswer with one JSON object, {"name": TOOL, "arguments": {...}}, without explanations.\n\n'
        + f"Request: {asked}"
    )
    return prompt, {"name": name, "arguments": arguments}


def _type_said(kind: str | type) -> str:
    named = {_DATE: "a date, YYYY-MM-DD", _TIME: "a time, HH:MM of 24 hours", int: "a whole number", str: "a text"}
    return named.get(kind, f"one of {str(kind).split('|')}")


def schema_of(kind: str) -> dict[str, Any]:
    """Return the JSON schema that a caller would give, which knows keys and types."""
    if kind == "extraction":
        return _object(_type_schemas(_KEYS))
    calls = [
        _object({"name": {"const": tool}, "arguments": _object(_type_schemas(keys))}) for tool, keys in _TOOLS.items()
    ]
    return {"anyOf": calls}


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def _type_schemas(keys: Mapping[str, str | type]) -> dict[str, Any]:
    return {
        key: {"type": "string", "pattern": f"^({kind})$"}
        if isinstance(kind, str)
        else {"type": "integer" if kind is int else "string"}
        for key, kind in keys.items()
    }


def object_of(text: str) -> dict[str, Any] | None:
    """Return the JSON object that a text holds, from its first brace to its last; None where there is none.

    >>> object_of('So: {"a": {"b": 1}}.'), object_of("{1}")
    ({'a': {'b': 1}}, None)
    """
    found = re.search(OBJECT, text)
    try:
        value = json.loads(found[0]) if found else None
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def is_right_object(task: MadeTask, text: str) -> bool:
    """Return whether a text holds the object that a task asks for."""
    return object_of(text) == object_of(task.answer)


def said_wrong(task: MadeTask, text: str) -> list[str]:
    """Return a sentence for each thing that is wrong in an answer as far as it shows without the right answer."""
    found = object_of(text)
    if found is None:
        return ["The answer has no JSON object."]
    if task.kind == "extraction":
        message = task.prompt.partition("Message: ")[2]
        missing = [
            f'The message does not say {found[key]!r}, which "{key}" is.'
            for key, kind in _KEYS.items()
            if kind in (str, int) and key in found and str(found[key]) not in message
        ]
        return _wrong(found, _KEYS) + missing
    name, arguments = found.get("name"), found.get("arguments")
    if not isinstance(name, str) or name not in _TOOLS:
        return [f'"name" is {json.dumps(name)}; it must be one of {", ".join(_TOOLS)}.']
    if not isinstance(arguments, dict):
        return ['"arguments" is missing; it must be an object.']
    return _wrong(arguments, _TOOLS[name])


def _wrong(found: Mapping[str, Any], keys: Mapping[str, str | type]) -> list[str]:
    """Return a sentence for each key that is missing, too many, or of another type."""
    wrong = [f'The key "{key}" is missing.' for key in keys if key not in found]
    wrong += [f'There is no key "{key}".' for key in found if key not in keys]
    return wrong + [
        f'"{key}" is {json.dumps(found[key])}; it must be {_type_said(kind)}.'
        for key, kind in keys.items()
        if key in found and not _fits(found[key], kind)
    ]


def _fits(value: object, kind: str | type) -> bool:
    """Return whether a value has a type, or is a text that a pattern matches."""
    if isinstance(kind, str):
        return isinstance(value, str) and re.fullmatch(kind, value) is not None
    return type(value) is kind
