"""Requests whose answer is written, checked and written again: by a check that the operator named when it started.

A request names a check, and never a command.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from edgedec.api.engine import Engine
from edgedec.progress import CancelToken
from edgedec_apps.refine import MOST_TEXTS, RefineBy, refined
from edgedec_apps.server.core.errors import ApiError
from edgedec_apps.server.core.fields import Fields
from edgedec_apps.server.core.generation import Encoded, Event, Finished, TextRequest

MOST_TOGETHER = 16


def read_refine(fields: Fields, checks: Mapping[str, Sequence[str]]) -> RefineBy | None:
    """Return how the field `refine` wants an answer to be refined; None where it is absent.

    Raises:
        ApiError: The check is unknown, or a number is out of range.
    """
    if not fields.has("refine"):
        fields.skip("refine")
        return None
    wanted = fields.object("refine")
    name = wanted.required_text("check")
    if name not in checks:
        known = (
            f"it must be one of {', '.join(checks)}" if checks else "the server was started without checks (--check)"
        )
        raise wanted.refusal("check", f"is {name!r:.60}; {known}")
    n = wanted.whole("n", low=1, high=MOST_TOGETHER) or 4
    texts, tokens = wanted.whole("texts", low=1, high=MOST_TEXTS), wanted.whole("tokens", low=1)
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


def refined_events(
    engine: Engine, request: TextRequest, prompt: Encoded, how: RefineBy, cancel: CancelToken
) -> Iterator[Event]:
    """Refine the answer to a chat and finish the best text; its reasons name every text and what the check said.

    Raises:
        ApiError: The chat has pictures.
        EdgedecError: As edgedec_apps.refine.refined.
    """
    (messages,) = request.prompts
    assert isinstance(messages, list)
    if prompt.pictures:
        raise ApiError("refine and pictures exclude each other; leave one out", param="refine")
    options = {**request.options, "reuse": request.reuse, "draft": request.draft, "verify": request.verify}
    found = refined(engine, messages, how, cancel=cancel, **options)
    stats = found.generation.stats
    stats.add_reason(f"refined: text {found.place + 1} of {len(found.texts)}: {found.why}")
    stats.explanation += found.lines()
    yield Finished(0, found.generation)
