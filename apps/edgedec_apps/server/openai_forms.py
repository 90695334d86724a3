"""Answers in OpenAI's forms: chat completions and text completions, whole and as server-sent events."""

import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from edgedec.sequence import Generation, TokenOutput
from edgedec.tokenizer import Tokenizer
from edgedec_apps.server.errors import problem_of
from edgedec_apps.server.generation import Finished, Piece
from edgedec_apps.server.logprobs import chat_entries, completion_logprobs
from edgedec_apps.server.reply import sse
from edgedec_apps.server.requests import Wanted
from edgedec_apps.server.timings import explanations, timings
from edgedec_apps.server.tools import Splitter
from edgedec_apps.tool_calls import ToolCall


@dataclass(frozen=True, slots=True)
class Frame:
    """What answers of both kinds have.

    Attributes:
        prefix: How its id begins.
        model: The model's name.
        wanted: How it is to be sent.
        tokenizer: The model's.
        n: Texts for each prompt.
    """

    prefix: str
    model: str
    wanted: Wanted
    tokenizer: Tokenizer
    n: int = 1
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def document(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """Return an object with its head: an answer, or a part of one."""
        head = {"id": f"{self.prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model}
        return head | {"choices": choices}

    def part(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> bytes:
        """Return a part of a stream."""
        counts = {"usage": None} if self.wanted.usage else {}
        return sse(self.document(kind, choices) | counts | more)

    def live(self, piece: Piece) -> dict[str, Any]:
        """Return the counts so far, where every part is to have them."""
        if not self.wanted.live:
            return {}
        done = piece.counts
        counts = {"predicted_n": done.n_generated, "draft_n": done.n_drafted, "draft_n_accepted": done.n_accepted}
        return {"timings": counts}

    def end(self, kind: str, generations: list[Generation]) -> Iterator[bytes]:
        """Yield the counts, where asked for, and the end of the stream."""
        if self.wanted.usage:
            yield sse(self.document(kind, []) | {"usage": usage(generations, self.n)})
        yield sse("[DONE]")

    def whole(
        self, kind: str, choices: list[dict[str, Any]], generations: Sequence[Generation], queued_s: float
    ) -> dict[str, Any]:
        """Return an answer in one piece."""
        counts = {"usage": usage(generations, self.n)}
        return self.document(kind, choices) | counts | self.told(generations, queued_s)

    def told(self, generations: Sequence[Generation], queued_s: float) -> dict[str, Any]:
        """Return times and explanations."""
        return {"timings": timings(generations), "edgedec": explanations(generations, queued_s)}


class ChatForm:
    """The answers of /v1/chat/completions. Implements reply.Dialect."""

    media_type = "text/event-stream"
    _PART = "chat.completion.chunk"

    def __init__(self, frame: Frame, tool_names: frozenset[str] | None = None) -> None:
        self._frame = frame
        self._splitter = Splitter(tool_names)
        self._begun: set[int] = set()
        self.streams = frame.wanted.stream

    def piece(self, piece: Piece) -> Iterator[bytes]:
        """Yield the role before the first token of a text, then what the token adds."""
        yield from self._begin(piece.index)
        entries = self._logprobs([piece.output])
        n_before = self._splitter.count(piece.index)
        text, calls = self._splitter.feed(piece.index, piece.output.text)
        if text or entries or calls:
            yield self._part(piece.index, _delta(text, calls, n_before), entries, **self._frame.live(piece))

    def finished(self, finished: Finished, queued_s: float) -> Iterator[bytes]:
        """Yield how a text ended and what there is to tell of it."""
        generation = finished.generation
        yield from self._begin(finished.index)
        n_before = self._splitter.count(finished.index)
        text, calls = self._splitter.finish(finished.index)
        if text or calls:
            yield self._part(finished.index, _delta(text, calls, n_before))
        reason = _reason(generation, self._splitter.count(finished.index))
        yield self._part(finished.index, {}, reason=reason, **self._frame.told([generation], queued_s))

    def end(self, generations: list[Generation]) -> Iterator[bytes]:
        """Yield the counts, where asked for, and the end of the stream."""
        return self._frame.end(self._PART, generations)

    def failed(self, error: BaseException) -> bytes:
        """Return an error as the last event."""
        return sse(problem_of(error).openai())

    def whole(self, generations: list[Generation], queued_s: float) -> dict[str, Any]:
        """Return the answer in one piece."""
        choices = [self._choice(index, generation) for index, generation in enumerate(generations)]
        return self._frame.whole("chat.completion", choices, generations, queued_s)

    def _begin(self, index: int) -> Iterator[bytes]:
        if index not in self._begun:
            self._begun.add(index)
            yield self._part(index, {"role": "assistant", "content": ""})

    def _choice(self, index: int, generation: Generation) -> dict[str, Any]:
        text, calls = self._splitter.whole(generation.text)
        message: dict[str, Any] = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
        if calls:
            message["tool_calls"] = [call.as_dict() for call in calls]
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(generation.outputs),
            "finish_reason": _reason(generation, len(calls)),
        }

    def _part(
        self, index: int, delta: dict[str, Any], logprobs: Any = None, reason: str | None = None, **more: Any
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return self._frame.part(self._PART, [choice], **more)

    def _logprobs(self, outputs: Sequence[TokenOutput]) -> dict[str, Any] | None:
        if not self._frame.wanted.logprobs:
            return None
        entries = chat_entries(outputs, self._frame.tokenizer)
        return {"content": entries, "refusal": None} if entries else None


def _delta(text: str, calls: Sequence[ToolCall], n_before: int) -> dict[str, Any]:
    """Return what a part adds to a message that has had `n_before` calls."""
    delta: dict[str, Any] = {"content": text} if text or not calls else {}
    if calls:
        delta["tool_calls"] = [{"index": n_before + i} | call.as_dict() for i, call in enumerate(calls)]
    return delta


def _reason(generation: Generation, n_calls: int) -> str:
    return "tool_calls" if n_calls and generation.finish_reason == "stop" else generation.finish_reason


class CompletionForm:
    """The answers of /v1/completions. Implements reply.Dialect.

    `prompts` are put before the texts where the prompt is to be echoed.
    """

    media_type = "text/event-stream"
    _KIND = "text_completion"

    def __init__(self, frame: Frame, prompts: Sequence[str]) -> None:
        self._frame = frame
        self._prompts = prompts
        self._lengths: dict[int, int] = {}
        self.streams = frame.wanted.stream

    def piece(self, piece: Piece) -> Iterator[bytes]:
        """Yield what a token adds, the prompt before the first one where it is echoed."""
        text = piece.output.text
        if piece.index not in self._lengths:
            text = self._echo(piece.index) + text
        offset = self._lengths.get(piece.index, 0)
        self._lengths[piece.index] = offset + len(text)
        logprobs = self._logprobs([piece.output], offset)
        if text or logprobs:
            yield self._part(piece.index, text, logprobs, **self._frame.live(piece))

    def finished(self, finished: Finished, queued_s: float) -> Iterator[bytes]:
        """Yield how a text ended and what there is to tell of it."""
        text = "" if finished.index in self._lengths else self._echo(finished.index)
        told = self._frame.told([finished.generation], queued_s)
        yield self._part(finished.index, text, reason=finished.generation.finish_reason, **told)

    def end(self, generations: list[Generation]) -> Iterator[bytes]:
        """Yield the counts, where asked for, and the end of the stream."""
        return self._frame.end(self._KIND, generations)

    def failed(self, error: BaseException) -> bytes:
        """Return an error as the last event."""
        return sse(problem_of(error).openai())

    def whole(self, generations: list[Generation], queued_s: float) -> dict[str, Any]:
        """Return the answer in one piece."""
        choices = [
            {
                "index": index,
                "text": self._echo(index) + generation.text,
                "logprobs": self._logprobs(generation.outputs, 0),
                "finish_reason": generation.finish_reason,
            }
            for index, generation in enumerate(generations)
        ]
        return self._frame.whole(self._KIND, choices, generations, queued_s)

    def _echo(self, index: int) -> str:
        return self._prompts[index // self._frame.n] if self._frame.wanted.echo else ""

    def _part(self, index: int, text: str, logprobs: Any = None, reason: str | None = None, **more: Any) -> bytes:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        return self._frame.part(self._KIND, [choice], **more)

    def _logprobs(self, outputs: Sequence[TokenOutput], offset: int) -> dict[str, Any] | None:
        return completion_logprobs(outputs, self._frame.tokenizer, offset) if self._frame.wanted.logprobs else None


def usage(generations: Sequence[Generation], n: int) -> dict[str, Any]:
    """Return OpenAI's counts of tokens; the n texts of one prompt count it once."""
    n_prompt = sum(generation.stats.n_prompt_tokens for generation in generations[::n])
    n_text = sum(generation.stats.n_generated_tokens for generation in generations)
    n_cached = sum(generation.stats.n_reused_tokens for generation in generations[::n])
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_text,
        "total_tokens": n_prompt + n_text,
        "prompt_tokens_details": {"cached_tokens": n_cached},
    }
