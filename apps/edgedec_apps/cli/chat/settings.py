"""What /set changes in a chat: the options of sampling, the system message, and how answers are shown."""

from collections.abc import Iterator
from typing import Any

from edgedec.errors import RequestError
from edgedec_apps.cli.chat.conversation import Conversation
from edgedec_apps.cli.options import parsed

_SYSTEM, _MARKDOWN = "system", "markdown"
# All but what is for a single prompt (logit_bias, logprobs).
_NAMES = """
max_tokens temperature top_k top_p min_p repetition_penalty frequency_penalty presence_penalty momentum penalty_last_n
seed stop stop_unsure ignore_end
"""
_OPTIONS = _NAMES.split()
_SWITCH = {"on": True, "true": True, "off": False, "false": False}


def setting_names() -> list[str]:
    """Return the names that /set knows, as they are typed."""
    return [_SYSTEM, *(name.replace("_", "-") for name in _OPTIONS), _MARKDOWN]


def settings(conversation: Conversation) -> Iterator[tuple[str, str]]:
    """Yield each name that /set knows, with its value, which may be the model's default."""
    sampling = conversation.engine.requests.sampling(**_given(conversation))
    yield _SYSTEM, conversation.system or "none"
    for name in _OPTIONS:
        yield name.replace("_", "-"), _shown(getattr(sampling, name))
    yield _MARKDOWN, _shown(conversation.markdown)


def set_option(conversation: Conversation, name: str, value: str) -> str:
    """Change what a name stands for, or take the default again where `value` is empty; return a note on it.

    Raises:
        RequestError: There is no such name, or the value is out of range.
    """
    option = name.removeprefix("--").replace("-", "_")
    if option == _SYSTEM:
        conversation.instruct(value or None)
        return f"{_SYSTEM}: {value or 'none'}"
    if option == _MARKDOWN:
        conversation.markdown = _markdown(conversation, value or "on")
        return f"{_MARKDOWN}: {_shown(conversation.markdown)}"
    if option not in _OPTIONS:
        raise RequestError(f"/set knows no {name!r:.100}; known: {', '.join(setting_names())}")
    options = dict(conversation.options)
    options.pop(option, None)
    if value:
        options[option] = _value(option, value)
    sampling = conversation.engine.requests.sampling(**_given(conversation, options))
    conversation.options = options
    return f"{name}: {_shown(getattr(sampling, option))}"


def _given(conversation: Conversation, options: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the options of sampling that are set."""
    chosen = conversation.options if options is None else options
    return {name: value for name, value in chosen.items() if name in _OPTIONS}


def _value(option: str, text: str) -> Any:
    if option == "stop":
        return (text,)
    return _SWITCH.get(text, text) if option == "ignore_end" else parsed(text)


def _markdown(conversation: Conversation, text: str) -> bool:
    if text not in _SWITCH:
        raise RequestError(f"{_MARKDOWN} is {text!r:.100}; it must be on or off")
    if _SWITCH[text] and not conversation.typed:
        raise RequestError("markdown is for a terminal; what goes into a pipe is the text itself")
    return _SWITCH[text]


def _shown(value: Any) -> str:
    """Return a value for a person.

    >>> _shown(None), _shown(0.5), _shown(True), _shown(("a", "b")), _shown(())
    ('none', '0.5', 'on', 'a, b', 'none')
    """
    if value is None or value == ():
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return ", ".join(value) if isinstance(value, tuple) else str(value)
