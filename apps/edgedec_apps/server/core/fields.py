"""The fields of a request's JSON object: each is read once, with its type, and those that are left are refused."""

import math
from collections.abc import Mapping
from typing import Any

from edgedec.errors import RequestError
from edgedec.sampling import SamplingParams
from edgedec.tokenizer import Tokenizer
from edgedec_apps.server.core.errors import ApiError

IGNORED_HEADER = "x-edgedec-ignored"
"""The header of an answer that names the fields that were ignored."""
_MOST_SHOWN = 80
_MOST_NAMED = 32
_MOST_BIASED = 1000  # characters of a text whose tokens get a bias


class Fields:
    """The fields of a JSON object. A field that is null counts as absent; `where` is the path of the object.

    >>> fields = Fields({"n": 2, "stream": True, "sream": 1})
    >>> fields.whole("n", low=1, high=16), fields.flag("stream"), fields.text("user")
    (2, True, None)
    >>> fields.end()
    Traceback (most recent call last):
    edgedec_apps.server.core.errors.ApiError: the field 'sream' is not known here; leave it out
    """

    def __init__(self, values: Mapping[str, Any], where: str = "", ignored: list[str] | None = None) -> None:
        self._values = dict(values)
        self._where = where
        self._aliases: dict[str, str] = {}  # by the name of a field, that under which the request has it
        self._ignored: list[str] = [] if ignored is None else ignored  # shared with the objects in this one

    @property
    def headers(self) -> dict[str, str]:
        """The header that names the fields that were ignored, here and in objects within; empty where none were."""
        names = list(dict.fromkeys(self._ignored))
        if len(names) > _MOST_NAMED:
            names[_MOST_NAMED:] = [f"and {len(names) - _MOST_NAMED} more"]
        return {IGNORED_HEADER: ", ".join(names)} if names else {}

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
        value = self.text(name)
        if value is None:
            raise self.refusal(name, "is missing; give it")
        return value

    def skip(self, *names: str) -> None:
        """Accept and ignore fields that have no effect."""
        for name in names:
            self.take(name)

    def ignore(self, *names: str) -> None:
        """Accept and ignore fields that would have an effect elsewhere; those that have a value are named in a header.

        A value that stands for nothing (null, false, an empty text, list or object) is not worth telling.
        """
        for name in names:
            if self.take(name) not in (None, False, "", [], {}):
                self.note_ignored(name)

    def note_ignored(self, name: str, what: str = "") -> None:
        """Name a field among those that were ignored; `what` says which part or value of the field."""
        shown = self.path(name) + (f" ({what})" if what else "")
        self._ignored.append("".join(c for c in shown if c.isascii() and c.isprintable() and c != ",")[:_MOST_SHOWN])

    def only(self, name: str, *allowed: Any) -> None:
        """Accept a field that may only have some values (ApiError for others)."""
        value = self.take(name)
        if value is not None and not any(value == each and type(value) is type(each) for each in allowed):
            values = " or ".join(repr(each) for each in allowed)
            raise self.refusal(name, f"is {value!r:.100}; leave it out, or give {values}")

    def unsupported(self, name: str, why: str) -> None:
        """Raise ApiError for a known field that is not supported, unless the field is absent or empty."""
        value = self.take(name)
        if value is not None and value is not False and value != "" and value != [] and value != {}:
            raise self.refusal(name, f"is not supported: {why}")

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
        return Fields(value or {}, f"{self._where}{name}.", self._ignored)

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
        value: int | None = self._typed(name, int, "a whole number")
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

    def objects(self, name: str) -> list[dict[str, Any]]:
        """Return a list of objects; an empty one where the field is absent."""
        value = self._typed(name, list, "a list of objects") or []
        if not all(isinstance(item, dict) for item in value):
            raise self.refusal(name, f"is {value!r:.100}; it must be a list of objects")
        return list(value)

    def refusal(self, name: str, what: str) -> ApiError:
        """Return the error that a field `what`, such as "is missing; give it"."""
        return ApiError(f"{self.path(name)} {what}", param=self.path(name))

    def refused(self, error: RequestError, option: str, name: str) -> ApiError:
        """Return an error about an option as one about the field that holds its value."""
        return ApiError(error.naming({option: self.path(name)}), param=self.path(name))

    def path(self, name: str) -> str:
        """Return the path of a field from the top of the request, such as "options.num_ctx"."""
        return f"{self._where}{self._aliases.get(name, name)}"

    def end_except(self, *names: str) -> None:
        """Accept and ignore fields that have no effect, and raise ApiError where there are others."""
        self.skip(*names)
        self.end()

    def end(self) -> None:
        """Raise ApiError where a field was not read."""
        left = [name for name, value in self._values.items() if value is not None]
        if left:
            name = f"{self._where}{left[0]}"
            raise ApiError(f"the field {name!r} is not known here; leave it out", param=name, code="unknown_parameter")

    def _typed(self, name: str, kinds: type | tuple[type, ...], expected: str) -> Any:
        value = self.take(name)
        if value is None or (isinstance(value, kinds) and (kinds is bool or not isinstance(value, bool))):
            return value
        raise self.refusal(name, f"is {value!r:.100}; it must be {expected}")


def checked(fields: Fields, options: Mapping[str, Any], names: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the sampling options that are not None.

    Args:
        fields: The object of the request that has them.
        options: Values by the name of the option.
        names: The fields' names by the name of the option, where they differ.

    Raises:
        ApiError: A value is out of range; the message names the field.
    """
    given = {option: value for option, value in options.items() if value is not None}
    for option, value in given.items():
        try:
            SamplingParams(**{option: value})
        except RequestError as error:
            raise fields.refused(error, option, (names or {}).get(option, option)) from error
    return given


def logit_bias(fields: Fields, name: str, tokenizer: Tokenizer) -> dict[int, float] | None:
    """Return logit biases by token id; None where the field is absent.

    The field is OpenAI's object, whose keys are token ids, or llama-server's list of [token id or text, bias], where a
    text stands for each of its tokens, and false rules a token out.
    """
    given = fields.take(name)
    if given is None:
        return None
    pairs = list(given.items()) if isinstance(given, dict) else given
    if not isinstance(pairs, list) or not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
        raise fields.refusal(name, f"is {given!r:.100}; it must be an object of token ids and numbers")
    biases: dict[int, float] = {}
    for key, bias in pairs:
        value = -math.inf if bias is False and isinstance(given, list) else bias
        if isinstance(value, bool) or not isinstance(value, int | float) or not (-100 <= value <= 100 or bias is False):
            raise fields.refusal(name, f"gives {bias!r:.40} to token {key!r:.40}; it must be a number from -100 to 100")
        biases |= dict.fromkeys(_biased(fields, name, key, tokenizer, by_text=isinstance(given, list)), float(value))
    return biases


def _biased(fields: Fields, name: str, key: Any, tokenizer: Tokenizer, *, by_text: bool) -> tuple[int, ...]:
    """Return the token ids that a key of logit_bias stands for."""
    if by_text and isinstance(key, str) and 0 < len(key) <= _MOST_BIASED:
        return tuple(tokenizer.encode(key, add_special=False))
    digits = str(key) if type(key) is int else key
    known = isinstance(digits, str) and digits.isascii() and digits.isdigit() and len(digits) < 12
    if not known or int(digits) >= tokenizer.n_vocab:
        raise fields.refusal(name, f"names {key!r:.40}; it must be a token id, 0 to {tokenizer.n_vocab - 1}")
    return (int(digits),)
