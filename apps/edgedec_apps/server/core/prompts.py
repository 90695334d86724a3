"""From the prompts of a request to token ids: chats go through the model's template, texts are encoded unchanged."""

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from edgedec.api.engine import Engine
from edgedec.decoding.prompt_length import require_may_fit
from edgedec.errors import RequestError
from edgedec.progress import CancelToken
from edgedec.thought_marks import Thoughts, thoughts_of
from edgedec_apps.infill import Gap, gap_ids
from edgedec_apps.reply_marks import Mark, marks_of, opened_mark, thinking_mark
from edgedec_apps.server.core.answer import Job
from edgedec_apps.server.core.chat_options import BUDGET
from edgedec_apps.server.core.errors import ApiError
from edgedec_apps.server.core.generation import Encoded, Prompt, TextRequest
from edgedec_apps.server.core.messages import with_fetched

if TYPE_CHECKING:
    from edgedec_runtimes.pictures.reader import MarkedPicture

_TOKENIZER_BYTES = 96  # for each byte of the longest word, as measured
_WORD = re.compile(r"\s+|\S+")


async def read_prompts(job: Job, request: TextRequest) -> list[Encoded]:
    """Return the token ids of each prompt: a chat goes through the model's template, a text is encoded unchanged.

    Pictures are counted, and fetched where a message has only their address; no pixel is decoded.

    Threads do this work before the request leaves the queue, so that a client that disconnects blocks nobody for long.

    Raises:
        EdgedecError: As Engine.stream.
        ApiError: There is no memory for the tokenizer's work, or a chat has nothing but the message to continue.
    """
    return [await _read_prompt(job, prompt, request) for prompt in request.prompts]


async def _read_prompt(job: Job, prompt: Prompt, request: TextRequest) -> Encoded:
    engine = job.engine
    if isinstance(prompt, tuple):
        return Encoded(prompt)
    if isinstance(prompt, Gap):
        gap, n_most = prompt, engine.requests.n_prompt_max
        return Encoded(await encode(job, gap.texts, lambda: gap_ids(engine.tokenizer, gap, n_most)))
    if isinstance(prompt, list):
        prompt = await with_fetched(prompt, job.service.settings.image_hosts, job.memory, job.cancel)
    text, opened, pictures, thoughts = await job.in_thread(_as_text, engine, prompt, request, job.cancel)
    if isinstance(prompt, str):
        return Encoded(await encode(job, [text], lambda: engine.prompt_ids(text)))
    token_ids = await encode(job, [text], lambda: engine.requests.rendered_ids(text, pictures))
    return Encoded(token_ids, opened, pictures, thoughts)


async def encode(job: Job, texts: Sequence[str], to_ids: Callable[[], Sequence[Any]]) -> tuple[Any, ...]:
    """Return what `to_ids`, which encodes these texts, returns in a thread, with the memory that it takes meanwhile.

    Raises:
        ApiError: There is no memory for that.
        EdgedecError: As `to_ids`.
    """
    async with job.memory.more(await tokenizer_bytes(texts)):
        return tuple(await job.in_thread(to_ids))


async def tokenizer_bytes(texts: Sequence[str]) -> int:
    """Return the bytes of memory that a tokenizer takes at the most while it encodes texts one after another."""
    return _TOKENIZER_BYTES * await asyncio.to_thread(lambda: max(map(_longest_word_bytes, texts), default=0))


def _longest_word_bytes(text: str) -> int:
    """Return the most bytes of a part of a text that a tokenizer may treat as one word."""
    return max((len(word[0]) for word in _WORD.finditer(text)), default=0) * (1 if text.isascii() else 3)


def _as_text(
    engine: Engine, prompt: Prompt, request: TextRequest, cancel: CancelToken
) -> "tuple[str, str, tuple[MarkedPicture, ...], Thoughts | None]":
    """Return the text of a prompt to encode (of no gap), the mark that ends it, its pictures, and what may be thought.

    Raises:
        PromptTooLongError: The text certainly does not fit the context.
    """
    opened, thoughts = "", None
    pictures: tuple[MarkedPicture, ...] = ()
    if isinstance(prompt, str):
        text = prompt
    else:
        assert isinstance(prompt, list)
        messages, begun = _split_begun(prompt)
        marked, pictures = _marked(engine, messages)
        template = engine.requests.require_template()
        variables = {name: x for name, x in request.variables.items() if name != BUDGET or name in template.variables}
        text = engine.requests.render(marked, tools=request.tools or None, cancel=cancel, variables=variables)
        marks = marks_of(template.source, engine.tokenizer)
        opened = opened_mark(text, marks)
        if begun is not None:
            begun = template.said(begun, trust_messages=request.variables.get("trust_messages"))
            text, opened = continued(text, begun, opened, thinking_mark(marks, template.source))
        if begun is None or opened:
            thoughts = thoughts_of(template.source, text, request.variables.get(BUDGET))
    require_may_fit(engine.tokenizer, text, engine.requests.n_prompt_max, engine.card.n_ctx_train)
    return text, opened, pictures, thoughts


def _marked(
    engine: Engine, messages: list[dict[str, Any]]
) -> "tuple[Sequence[Mapping[str, Any]], tuple[MarkedPicture, ...]]":
    """Return what Requests.mark_pictures does; its errors name the server's options."""
    try:
        return engine.requests.mark_pictures(messages)
    except ApiError:
        raise
    except RequestError as error:
        raise ApiError(
            error.naming({"projector": "--method pictures:projector"}), code="invalid_image", param="messages"
        ) from error


def _split_begun(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """Return a chat without its last message, and that message, where it is an answer that is to be continued."""
    last = messages[-1]
    if last["role"] != "assistant" or last.get("tool_calls"):
        return messages, None
    if len(messages) == 1:
        raise ApiError("messages has only the answer to continue; give the message that it answers", param="messages")
    return messages[:-1], last


def continued(prompt: str, begun: dict[str, Any], opened: str, mark: Mark) -> tuple[str, str]:
    """Return the prompt of a chat with the beginning of its answer, and the mark that the answer stands behind.

    What is thought stands before the answer. Where the prompt itself begins to think, an answer ends that first, unless
    the answer has marks of its own.

    Args:
        prompt: The prompt of the chat.
        begun: The message with the beginning of the answer.
        opened: The mark with which the prompt ends; empty for none.
        mark: The mark of what the model thinks.
    """
    content = begun["content"]
    answer = content if isinstance(content, str) else "".join(part["text"] for part in content)
    thought = begun.get("reasoning_content", "")
    (first, *_), (close, *_) = mark.opens, mark.closes
    before, between, alone = mark.written
    in_thought = bool(opened) and not mark.head_ends
    if answer.lstrip().startswith(first):
        return (
            prompt.rstrip().removesuffix(first) if in_thought else prompt
        ) + answer, "" if close in answer else before.strip()
    if not thought and (not in_thought or close in answer):
        return prompt + alone + answer, ""
    head = prompt.rstrip() + before.removeprefix(first) if in_thought else prompt + before
    return (head + thought + between + answer, "") if answer else (head + thought, before.strip())
