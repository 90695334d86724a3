"""The fields of a request's JSON object: each is read once, with its type; a table says what becomes of the others."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from edgedec.errors import RequestError
from edgedec.sampling import SEED_LIMIT, SamplingParams
from edgedec.tokenizer import Tokenizer
from edgedec_apps.server.core.errors import ApiError
from edgedec_apps.server.core.known_fields import AS_TEXT, IDLE, REFUSED, TABLE, asks_for_nothing, name_of

IGNORED_HEADER = "x-edgedec-ignored"
"""The header of an answer that names the fields that were ignored."""
_MOST_SHOWN = 80
_MOST_NAMED = 32
_MOST_BIASED = 1000  # characters of a text whose tokens get a bias


class Fields:
    """The fields of a JSON object. A field that is null counts as absent; `where` is the path of the object.

    >>> fields = Fields({"n": 2.0, "stream": True, "sream": 1})
    >>> fields.whole("n", low=1, high=16), fields.flag("stream"), fields.text("user")
    (2, True, None)
    >>> fields.end()
    >>> fields.headers
    {'x-edgedec-ignored': 'sream'}
    """

    def __init__(
        self, values: Mapping[str, Any], where: str = "", ignored: dict[str, str] | None = None, interface: str = ""
    ) -> None:
        self._values = dict(values)
        self._where = where
        self._interface = interface  # of known_fields.INTERFACES
        self._aliases: dict[str, str] = {}  # by the name of a field, that under which the request has it
        # What is shown of each ignored field, by its name without indices; shared with the objects in this one.
        self._ignored: dict[str, str] = {} if ignored is None else ignored

    @property
    def ignored(self) -> str:
        """The fields that were ignored, here and in objects within, with commas between; empty where none were."""
        return ", ".join(self._ignored.values())

    @property
    def headers(self) -> dict[str, str]:
        """The header that names the fields that were ignored; empty where none were."""
        return {IGNORED_HEADER: self.ignored} if self._ignored else {}

    def inner(self, values: Mapping[str, Any], name: str) -> "Fields":
        """Return the fields of an object within this one."""
        return Fields(values, f"{self.path(name)}.", self._ignored, self._interface)

    def parts(self, name: str, value: Any, expected: str = "a string or a list of objects") -> "list[Fields]":
        """Return the fields of each object of a list that is the value of a field (ApiError where it is no list)."""
        if not isinstance(value, list) or not all(isinstance(part, dict) for part in value):
            raise self.refusal(name, f"is {value!r:.100}; it must be {expected}")
        return [self.inner(part, f"{name}[{i}]") for i, part in enumerate(value)]

    def each(self, name: str) -> "list[Fields]":
        """Return the fields of each object of a list; an empty list where the field is absent."""
        value = self.take(name)
        return [] if value in (None, "") else self.parts(name, value, "a list of objects")

    def take(self, name: str) -> Any:
        """Return a field of any type; None where it is absent."""
        return self._values.pop(name, None)

    def has(self, name: str) -> bool:
        """Return whether a field has a value that is not empty, without reading it."""
        return bool(self._values.get(name))

    def rename(self, alias: str, name: str) -> None:
        """Let a field that has another name elsewhere stand for the field `name` (ApiError where both differ)."""
        value = self.take(alias)
        if value is None:
            return
        if self._values.get(name) not in (None, value):
            raise self.refusal(alias, f"and {self.path(name)} differ; give one of them")
        self._values[name] = value
        self._aliases[name] = alias

    def is_zero(self, name: str) -> bool:
        """Return whether a field is the number 0; then it counts as read."""
        zero = type(self._values.get(name)) is int and self._values[name] == 0
        return zero and self.take(name) == 0

    def rest(self) -> dict[str, Any]:
        """Return all fields that were not read yet, as they are; none are left."""
        rest, self._values = self._values, {}
        return rest

    def take_all(self, names: Sequence[str]) -> dict[str, Any]:
        """Return those of these fields that the request has, in its order."""
        return {name: self.take(name) for name in tuple(self._values) if name in names}

    def peek(self, *names: str) -> dict[str, Any]:
        """Return those of these fields that have a value, without reading them."""
        return {name: self._values[name] for name in names if self._values.get(name) is not None}

    def required(self, name: str) -> Any:
        """Return a field of any type that must be there."""
        value = self.take(name)
        if value is None:
            raise self.refusal(name, "is missing; give it")
        return value

    def required_text(self, name: str) -> str:
        """Return a string field that must be there; it may be empty."""
        return str(self.required(name)) if self._values.get(name) is None else self.text(name) or ""

    def skip(self, *names: str) -> None:
        """Accept and ignore fields that have no effect."""
        for name in names:
            self.take(name)

    def ignore(self, *names: str) -> None:
        """Accept and ignore fields; those whose value asks for something are named in a header."""
        for name in names:
            if not asks_for_nothing(name, self.take(name)):
                self.note_ignored(name)

    def note_ignored(self, name: str, what: str = "") -> None:
        """Name a field among those that were ignored; `what` says which part or value of the field.

        Of the elements of a list that have the same field, the first is named.
        """
        self._note(self.path(name), what)

    def _note(self, path: str, what: str) -> None:
        shown = path + (f" ({what})" if what else "")
        key, shown = (_plain(text)[:_MOST_SHOWN] for text in (name_of(shown), shown))
        if len(self._ignored) >= _MOST_NAMED and key not in self._ignored:
            key, shown = "", "and others"
        self._ignored.setdefault(key, shown)

    def outcome_of(self, kind: Any) -> str | None:
        """Return the outcome in the table for an item of this kind; None for a kind that is not in the table."""
        return TABLE.get((self._interface, f"{name_of(self._where[:-1])}:{kind}"))

    def text_of_kind(self, kind: Any, *texts: str) -> str | None:
        """Return the text of this object, a part of a chat, and end the reading; None for one that is skipped by name.

        Args:
            kind: What the part is.
            texts: The kinds that are texts, beside those that the table passes on as text.

        Raises:
            ApiError: The kind is known to change the text, and can't be read here.
        """
        outcome = self.outcome_of(kind)
        if outcome == REFUSED:
            raise self.refusal("type", f"is {kind!r:.40}, which can't be read here; leave it out, or send its text")
        text: str | None = None
        if kind in texts:
            text = self.text("text") or ""
        elif outcome == AS_TEXT:
            text = "".join([_text_in(self.take(name)) for name in (kind, "text", "content")])
        else:
            self.rest()
            self._note(self._where[:-1], str(kind))
        self.end()
        return text

    def only(self, name: str, *allowed: Any) -> None:
        """Accept a field that may only have some values (ApiError for others)."""
        value = self.take(name)
        if value is not None and not any(value == each and type(value) is type(each) for each in allowed):
            values = " or ".join(repr(each) for each in allowed)
            raise self.refusal(name, f"is {value!r:.100}; leave it out, or give {values}")

    def unsupported(self, name: str, why: str) -> None:
        """Raise ApiError for a known field that is not supported, unless its value asks for nothing."""
        if not asks_for_nothing(name, value := self.take(name)):
            raise self.refusal(name, f"is {value!r:.60}, which is not supported: {why}")

    def flag(self, name: str) -> bool:
        """Return a boolean field; False where it is absent."""
        return bool(self._typed(name, bool, "true or false"))

    def optional_flag(self, name: str) -> bool | None:
        """Return a boolean field; None where it is absent."""
        value: bool | None = self._typed(name, bool, "true or false")
        return value

    def text(self, name: str) -> str | None:
        """Return a string field; None where it is absent."""
        value: str | None = self._typed(name, str, "a string")
        return value

    def object(self, name: str) -> "Fields":
        """Return the fields of an object; of no object where it is absent."""
        value = self._typed(name, dict, "an object")
        return self.inner(value or {}, name)

    def number(self, name: str) -> float | None:
        """Return a number field; None where it is absent."""
        value: float | None = self._typed(name, (int, float), "a number")
        try:
            return value if value is None else float(value)
        except OverflowError:
            raise self.refusal(name, "has too many digits; give a smaller number") from None

    def whole(
        self, name: str, *, low: int | None = None, high: int | None = None, none: int | None = None
    ) -> int | None:
        """Return a whole number from `low` to `high`; None where it is absent, or is the number `none`."""
        value: int | float | None = self._typed(name, (int, float), "a whole number")
        if isinstance(value, float):
            if not value.is_integer():
                raise self.refusal(name, f"is {value!r}; it must be a whole number")
            value = int(value)
        if value is not None and value == none:
            return None
        if value is not None and ((low is not None and value < low) or (high is not None and value > high)):
            bounds = f"at least {low}" if high is None else f"{low} to {high}"
            raise self.refusal(name, f"is {value}; it must be {bounds}")
        return value

    def texts(self, name: str) -> tuple[str, ...] | None:
        """Return a string, or a list of strings, as a tuple; None where the field is absent."""
        value = self.take(name)
        if value is None:
            return None
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise self.refusal(name, f"is {value!r:.100}; it must be a string or a list of strings")
        return tuple(texts)

    def string(self, name: str) -> str | None:
        """Return a field that is a string; a value of another type is left, and so ignored by name."""
        return self.text(name) if isinstance(self._values.get(name), str) else None

    def refusal(self, name: str, what: str) -> ApiError:
        """Return the error that a field `what`, such as "is missing; give it"."""
        return ApiError(f"{self.path(name)} {what}", param=self.path(name))

    def refused(self, error: RequestError, option: str, name: str) -> ApiError:
        """Return an error about an option as one about the field that holds its value."""
        return ApiError(error.naming({option: self.path(name)}), param=self.path(name))

    def path(self, name: str) -> str:
        """Return the path of a field from the top of the request, such as "options.num_ctx"."""
        return f"{self._where}{self._aliases.get(name, name)}"

    def end(self) -> None:
        """Do with the fields that were not read what the table says; those that it does not know are ignored by name.

        Raises:
            ApiError: A field is known to change the text, and what its value asks for can't be done.
        """
        for name, value in self.rest().items():
            full_name = name_of(self.path(name))
            outcome = TABLE.get((self._interface, full_name))
            if outcome == REFUSED:
                self._values[name] = value
                self.unsupported(name, "it would change the text; leave it out")
            elif value is not None and outcome != IDLE and not (outcome and asks_for_nothing(full_name, value)):
                self.note_ignored(name)

    def _typed(self, name: str, kinds: type | tuple[type, ...], expected: str) -> Any:
        value = self.take(name)
        if value == "" and kinds is not str:  # with which forms say that nothing was typed
            return None
        if value is None or (isinstance(value, kinds) and (kinds is bool or not isinstance(value, bool))):
            return value
        raise self.refusal(name, f"is {value!r:.100}; it must be {expected}")


def _plain(text: str) -> str:
    """Return a text as a header may have it, without commas."""
    return "".join(c for c in text if c.isascii() and c.isprintable() and c != ",")


def _text_in(value: Any) -> str:
    """Return a string, or the texts of a list of objects that have one; an empty text for another value."""
    if isinstance(value, str):
        return value
    parts = [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []
    return "\n".join(part["text"] for part in parts if isinstance(part.get("text"), str))


def read_seed(fields: Fields) -> int | None:
    """Return the seed of a request; None where it is absent or -1. Other negative ones stand for their 64 bits."""
    seed = fields.whole("seed", low=-(SEED_LIMIT // 2), high=SEED_LIMIT - 1, none=-1)
    return None if seed is None else seed % SEED_LIMIT


def read_stops(fields: Fields, name: str) -> tuple[str, ...] | None:
    """Return the stop strings of a request, without empty ones; None where there are none."""
    return tuple(filter(None, fields.texts(name) or ())) or None


def checked(fields: Fields, options: Mapping[str, Any], names: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the sampling options that are not None; a top_p of 0 is the most probable token.

    Args:
        fields: The object of the request that has them.
        options: Values by the name of the option.
        names: The fields' names by the name of the option, where they differ.

    Raises:
        ApiError: A value is out of range; the message names the field.
    """
    present = {option: value for option, value in options.items() if value is not None}
    if present.get("top_p") == 0:
        present["temperature"] = present.pop("top_p")
    for option, value in present.items():
        try:
            SamplingParams(**{option: value})
        except RequestError as error:
            raise fields.refused(error, option, (names or {}).get(option, option)) from error
    return present


def logit_bias(fields: Fields, name: str, tokenizer: Tokenizer) -> dict[int, float] | None:
    """Return logit biases by token id; None where the field is absent.

    The field is OpenAI's object, whose keys are token ids, or llama-server's list of [token id or text, bias], where a
    text stands for each of its tokens, and false rules a token out.
    """
    raw = fields.take(name)
    if raw in (None, ""):
        return None
    pairs = list(raw.items()) if isinstance(raw, dict) else raw
    if not isinstance(pairs, list) or not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
        raise fields.refusal(name, f"is {raw!r:.100}; it must be an object of token ids and numbers")
    biases: dict[int, float] = {}
    for key, bias in pairs:
        value = -math.inf if bias is False and isinstance(raw, list) else bias
        if isinstance(value, bool) or not isinstance(value, int | float) or not (-100 <= value <= 100 or bias is False):
            raise fields.refusal(name, f"gives {bias!r:.40} to token {key!r:.40}; it must be a number from -100 to 100")
        biases |= dict.fromkeys(_biased(fields, name, key, tokenizer, by_text=isinstance(raw, list)), float(value))
    return biases


def _biased(fields: Fields, name: str, key: Any, tokenizer: Tokenizer, *, by_text: bool) -> tuple[int, ...]:
    """Return the token ids that a key of logit_bias stands for."""
    if by_text and isinstance(key, str) and 0 < len(key) <= _MOST_BIASED:
        return tuple(tokenizer.encode(key, add_special=False))
    digits = str(key) if type(key) is int else key
    is_id = isinstance(digits, str) and digits.isascii() and digits.isdigit() and len(digits) < 12
    if not is_id or int(digits) >= tokenizer.n_vocab:
        raise fields.refusal(name, f"names {key!r:.40}; it must be a token id, 0 to {tokenizer.n_vocab - 1}")
    return (int(digits),)
