"""llama-server's /infill: what belongs between two texts, in its form."""

from collections.abc import Iterator
from typing import Any

from starlette.requests import Request

from edgedec.api.engine import Engine
from edgedec.sequence import Generation
from edgedec_apps.infill import Gap
from edgedec_apps.server.core.answer import Answer, Job, read_named
from edgedec_apps.server.core.fields import Fields
from edgedec_apps.server.core.generation import Finished, Piece, Reading, TextRequest
from edgedec_apps.server.core.reply import Dialect, written
from edgedec_apps.server.core.sender import sse
from edgedec_apps.server.core.service import Service
from edgedec_apps.server.core.structured import structured_options, with_close
from edgedec_apps.server.llama.fields import prompt_progress
from edgedec_apps.server.openai.forms import report
from edgedec_apps.server.openai.requests import (
    read_max_tokens,
    read_reuse,
    read_sampling,
    read_speculative,
    require_gaps,
)


async def infill(request: Request, service: Service) -> Answer:
    """Write what belongs into a gap."""
    fields, named = await read_named(request, service)

    def read(job: Job) -> tuple[TextRequest, Dialect]:
        tells = fields.flag("return_progress")
        texts, stream, warms_up = read_infill(fields, job.engine)
        return texts, InfillForm(named.name, streams=stream, warms_up=warms_up, tells_reading=tells)

    return written(service, named, fields, read)


def read_infill(fields: Fields, engine: Engine) -> tuple[TextRequest, bool, bool]:
    """Read the fields of /infill except `model`.

    Returns:
        The text that is wanted, whether as a stream, and whether only the prompt is to be read (`n_predict: 0`, with
        which editors prepare a request).

    Raises:
        RequestError: A field is malformed, or asks for what can't be done; the message names it.
    """
    fields.rename("n_predict", "max_tokens")
    require_gaps(fields, "input_prefix", engine)
    files = []
    for file in fields.each("input_extra"):
        files.append((file.text("filename") or "tmp", file.text("text") or ""))
        file.end()
    begun = fields.text("prompt") or ""
    gap = Gap(fields.text("input_prefix") or "", fields.text("input_suffix") or "", begun, tuple(files))
    warms_up = fields.is_zero("max_tokens")
    options = read_sampling(fields, engine) | read_max_tokens(fields, "max_tokens")
    if warms_up:
        options["max_tokens"] = 1
    options |= with_close(fields, structured_options(fields))
    stream, (draft, verify), reuse = fields.flag("stream"), read_speculative(fields), read_reuse(fields)
    fields.end()
    return TextRequest((gap,), options, 1, reuse, draft, verify), stream, warms_up


class InfillForm(Dialect):
    """The answers of /infill. Implements reply.Dialect.

    Args:
        model: The model's name.
        streams: Whether the answer is a stream.
        warms_up: Whether only the prompt was to be read, so that there is no text.
        tells_reading: Whether the stream tells how far the prompt is read.
    """

    def __init__(self, model: str, *, streams: bool, warms_up: bool, tells_reading: bool = False) -> None:
        super().__init__(streams=streams, tells_reading=tells_reading)
        self._model = model
        self._warms_up = warms_up

    def reading(self, reading: Reading) -> Iterator[bytes]:
        """Yield how far the prompt is read."""
        yield sse({"index": 0, "content": "", "tokens": [], "stop": False} | prompt_progress(reading))

    def piece(self, piece: Piece) -> Iterator[bytes]:
        """Yield what a token adds to the text."""
        if piece.output.text and not self._warms_up:
            yield sse({"index": 0, "content": piece.output.text, "tokens": [piece.output.token_id], "stop": False})

    def finished(self, finished: Finished, queued_s: float) -> Iterator[bytes]:
        """Yield why the text ended, and the counts."""
        yield sse(self._document(finished.generation, "", queued_s))

    def whole(self, generations: list[Generation], queued_s: float) -> dict[str, Any]:
        """Return the answer in one piece."""
        (generation,) = generations
        return self._document(generation, generation.text, queued_s)

    def _document(self, generation: Generation, text: str, queued_s: float) -> dict[str, Any]:
        stats = generation.stats
        by_word = generation.stop_string is not None
        ends = {"stop": "word" if by_word else "eos", "length": "limit"}
        return {
            "index": 0,
            "content": "" if self._warms_up else text,
            "stop": True,
            "stop_type": ends.get(generation.finish_reason, "eos"),
            "stopping_word": generation.stop_string or "",
            "model": self._model,
            "tokens_evaluated": stats.n_prompt_tokens,
            "tokens_predicted": 0 if self._warms_up else stats.n_generated_tokens,
            "tokens_cached": stats.n_reused_tokens,
            "truncated": False,
        } | report([generation], queued_s)
