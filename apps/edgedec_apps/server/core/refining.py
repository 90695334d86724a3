"""Requests whose answer is written, checked and written again: by a check that the operator named when it started.

A request names a check, and never a command.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from edgedec_apps.refine import MOST_TEXTS, MOST_TOKENS, RefineBy
from edgedec_apps.server.core.fields import Fields
from edgedec_apps.server.core.generation import TextRequest

MOST_TOGETHER = 16


def read_refine(fields: Fields, checks: Mapping[str, Sequence[str]]) -> RefineBy | None:
    """Return how the field `refine` wants an answer to be refined; None where it is absent.

    Raises:
        ApiError: The check is unknown, or a number is out of range.
    """
    if not fields.has("refine"):
        return None
    wanted = fields.object("refine")
    name = wanted.required_text("check")
    if name not in checks:
        known = (
            f"it must be one of {', '.join(checks)}" if checks else "the server was started without checks (--check)"
        )
        raise wanted.refusal("check", f"is {name!r:.60}; {known}")
    n = wanted.whole("n", low=1, high=MOST_TOGETHER) or 4
    texts, tokens = wanted.whole("texts", low=1, high=MOST_TEXTS), wanted.whole("tokens", low=1, high=MOST_TOKENS)
    seconds = wanted.number("seconds")
    if seconds is not None and not 0 < seconds <= 1e6:
        raise wanted.refusal("seconds", f"is {seconds:g}; it must be above 0")
    wanted.end()
    return RefineBy(check=checks[name], n=n, texts=texts, tokens=tokens, seconds=seconds)


def with_refine(fields: Fields, request: TextRequest, how: RefineBy | None, *, streams: bool) -> TextRequest:
    """Return a chat's request with how it is refined (ApiError where another field of it excludes that)."""
    if how is None:
        return request
    (messages,) = request.prompts
    assert isinstance(messages, list)
    others = {
        "stream": streams,
        "n": request.n > 1,
        "tools": request.tools,
        "chat_template_kwargs or reasoning_effort": request.variables,
        "a last message of the assistant": messages[-1]["role"] == "assistant",
    }
    for name, given in others.items():
        if given:
            raise fields.refusal("refine", f"and {name} exclude each other; leave one out")
    return replace(request, refine=how)
