"""Answers in ollama's forms, of /api/chat and /api/generate: in one piece or as lines of JSON."""

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

from edgedec.exact_json import exact_float
from edgedec.sequence import Generation, TokenOutput
from edgedec.tokenizer import Tokenizer
from edgedec_apps.replies import Parts
from edgedec_apps.server.core.errors import problem_of
from edgedec_apps.server.core.generation import Begun, Finished, Piece
from edgedec_apps.server.core.parts import Splitter
from edgedec_apps.server.core.reply import Dialect
from edgedec_apps.server.core.reports import chat_entries, decoding_s, explanations, finish_reason, timings
from edgedec_apps.server.core.sender import json_line
from edgedec_apps.server.ollama.requests import OllamaDelivery

Kind = Literal["chat", "generate"]


class OllamaForm(Dialect):
    """The answers of both addresses. Implements reply.Dialect.

    Args:
        kind: Which of the two.
        model: The model's name.
        delivery: How the answer is sent.
        tokenizer: The model's tokenizer.
        splitter: Splits the text into its parts.
        load_s: Seconds that the request waited until the model was loaded.
    """

    media_type = "application/x-ndjson"

    def __init__(
        self,
        kind: Kind,
        model: str,
        delivery: OllamaDelivery,
        tokenizer: Tokenizer,
        splitter: Splitter | None,
        load_s: float = 0.0,
    ) -> None:
        super().__init__(streams=delivery.stream, splitter=splitter)
        self._kind = kind
        self._load_s = load_s
        self._model = model
        self._delivery = delivery
        self._tokenizer = tokenizer

    def begun(self, begun: Begun) -> Iterable[bytes]:
        """Return nothing, as NDJSON has no comments."""
        return ()

    def quiet(self) -> bytes:
        """Return a part that adds nothing to the text: clients fail on an empty line."""
        return json_line(self._document(Parts(), done=False))

    def piece(self, piece: Piece) -> Iterator[bytes]:
        """Yield what a token adds to the text."""
        logprobs = self._logprobs([piece.output])
        parts = self.splitter.feed(piece.index, piece.output)
        if parts or logprobs:
            yield json_line(self._document(parts, done=False) | logprobs)

    def finished(self, finished: Finished, queued_s: float) -> Iterator[bytes]:
        """Yield the rest of the text with the counts and times."""
        rest = self.splitter.finish(finished.index)
        yield json_line(self._document(rest, done=True) | self._report(finished.generation, queued_s))

    def failed(self, error: BaseException) -> bytes:
        """Return an error as the last line."""
        return json_line(problem_of(error).ollama())

    def whole(self, generations: list[Generation], queued_s: float) -> dict[str, Any]:
        """Return the answer in one piece; without a text that the model is loaded."""
        if not generations:
            return empty_answer(self._kind, self._model, "load")
        (generation,) = generations
        document = self._document(self.splitter.whole(0, generation), done=True)
        return document | self._logprobs(generation.outputs) | self._report(generation, queued_s)

    def _document(self, parts: Parts, *, done: bool) -> dict[str, Any]:
        return _document(self._kind, self._model, parts, done=done)

    def _report(self, generation: Generation, queued_s: float) -> dict[str, Any]:
        stats = generation.stats
        return {
            "done_reason": finish_reason(generation),
            "total_duration": _ns(self._load_s + queued_s + stats.total_s),
            "load_duration": _ns(self._load_s),
            "prompt_eval_count": stats.n_prompt_tokens,
            "prompt_eval_duration": _ns(stats.prefill_s),
            "eval_count": stats.n_generated_tokens,
            "eval_duration": _ns(decoding_s(stats)),
            "timings": timings([generation]),
            "edgedec": explanations([generation], queued_s),
        }

    def _logprobs(self, outputs: Sequence[TokenOutput]) -> dict[str, Any]:
        if not self._delivery.logprobs:
            return {}
        entries = chat_entries(outputs, self._tokenizer)
        return {"logprobs": entries} if entries else {}


def empty_answer(kind: Kind, model: str, reason: str) -> dict[str, Any]:
    """Return the answer to a request without a text, whose `reason` is that the model was loaded or unloaded."""
    return _document(kind, model, Parts(), done=True) | {"done_reason": reason}


def _document(kind: Kind, model: str, parts: Parts, *, done: bool) -> dict[str, Any]:
    head = {"model": model, "created_at": timestamp(time.time()), "done": done}
    thinking = {"thinking": parts.thinking} if parts.thinking else {}
    if kind == "generate":
        return head | {"response": parts.text} | thinking
    message: dict[str, Any] = {"role": "assistant", "content": parts.text} | thinking
    if parts.calls:
        message["tool_calls"] = [
            {"function": {"name": call.name, "arguments": json.loads(call.arguments, parse_float=exact_float)}}
            for call in parts.calls
        ]
    return head | {"message": message}


def timestamp(seconds: float) -> str:
    """Return a time, in seconds since 1970, in the form that ollama uses."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _ns(seconds: float) -> int:
    return round(1e9 * seconds)
