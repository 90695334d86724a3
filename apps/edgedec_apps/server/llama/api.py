"""llama-server's own endpoints: texts to token ids and back, the scales of adapters, and what belongs into a gap."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from starlette.requests import Request

from edgedec.api.engine import Engine
from edgedec.sequence import Generation
from edgedec.tokenizer import Tokenizer
from edgedec_apps.infill import Gap
from edgedec_apps.server.core.answer import Answer, Job, read_named, sse
from edgedec_apps.server.core.bodies import parse_object, read_body
from edgedec_apps.server.core.chat_options import structured_options, with_close
from edgedec_apps.server.core.fields import Fields
from edgedec_apps.server.core.generation import Finished, Piece, Reading, TextRequest
from edgedec_apps.server.core.prompts import encode
from edgedec_apps.server.core.reply import Delivery, Dialect, written
from edgedec_apps.server.core.reports import prompt_progress, report
from edgedec_apps.server.core.service import Service
from edgedec_apps.server.openai.requests import read_decoding, read_lora, read_max_tokens, read_sampling, require_gaps

_TOKEN_BYTES = 64  # of a token in an answer, as an object and as text
_PIECE_BYTES = 400  # of a token with its piece


async def tokenize(request: Request, service: Service) -> Answer:
    """Answer with the token ids of a text, and with their pieces where the request wants them."""
    fields, model = await read_named(request, service)
    text = fields.required_text("content")
    add_special, with_pieces = fields.flag("add_special"), fields.flag("with_pieces")
    parse_special = fields.optional_flag("parse_special") is not False
    fields.end()

    async def compute(job: Job) -> dict[str, Any]:
        tokenizer = job.engine.tokenizer

        def tokens() -> Sequence[Any]:
            ids = tokenizer.encode(text, add_special=add_special, parse_special=parse_special)
            return [_with_piece(tokenizer, token_id) for token_id in ids] if with_pieces else ids

        await job.memory.grow((_PIECE_BYTES if with_pieces else _TOKEN_BYTES) * len(text.encode()))
        with job.queue.preparing():
            return {"tokens": list(await encode(job, [text], tokens))}

    return Answer(service, model, fields, compute)


def _with_piece(tokenizer: Tokenizer, token_id: int) -> dict[str, Any]:
    """Return a token with its text, or with its bytes where they are no text."""
    data = tokenizer.piece(token_id)
    try:
        return {"id": token_id, "piece": data.decode()}
    except UnicodeDecodeError:
        return {"id": token_id, "piece": list(data)}


async def detokenize(request: Request, service: Service) -> Answer:
    """Answer with the text of token ids."""
    fields, model = await read_named(request, service)
    tokens = fields.required("tokens")
    fields.end()

    async def compute(job: Job) -> dict[str, Any]:
        tokenizer = job.engine.tokenizer
        if not isinstance(tokens, list) or not all(
            type(token_id) is int and 0 <= token_id < tokenizer.n_vocab for token_id in tokens
        ):
            raise fields.refusal("tokens", f"must be a list of token ids, 0 to {tokenizer.n_vocab - 1}")
        return {"content": await job.in_thread(tokenizer.decode, tokens)}

    return Answer(service, model, fields, compute)


_SCALES = "the body"


async def adapters(request: Request, service: Service) -> Answer:
    """Answer with the adapters of the model that the query names, else of the server's first one."""
    served = await service.find(request.query_params.get("model"))

    async def compute(job: Job) -> list[dict[str, Any]]:
        return adapter_documents(job.engine)

    return Answer(service, served, Fields({}), compute)


async def set_scales(request: Request, service: Service) -> Answer:
    """Set the adapters' scales for requests that name none. The body is a list; the answer lists the adapters."""
    body = await read_body(request, service.settings)
    fields = Fields(parse_object(b'{"%b": %b}' % (_SCALES.encode(), bytes(body))))
    served = await service.find(request.query_params.get("model"))

    async def compute(job: Job) -> list[dict[str, Any]]:
        engine = job.engine
        scales = read_lora(fields, engine, _SCALES)
        if fields.rest():
            raise fields.refusal(_SCALES, "must be one list")
        engine.lora = scales or engine.lora
        return adapter_documents(engine)

    return Answer(service, served, fields, compute)


async def infill(request: Request, service: Service) -> Answer:
    """Write what belongs into a gap."""
    fields, model = await read_named(request, service)

    return written(service, model, fields, lambda job: InfillForm(job, *read_infill(fields, job.engine)))


def read_infill(fields: Fields, engine: Engine) -> tuple[TextRequest, Delivery, bool]:
    """Read the fields of /infill except `model`.

    Returns:
        The text that is wanted, how it is sent, and whether only the prompt is to be read (`n_predict: 0`, with
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
    delivery, decoding = Delivery(fields.flag("stream"), progress=fields.flag("return_progress")), read_decoding(fields)
    fields.end()
    return TextRequest((gap,), options, **decoding), delivery, warms_up


class InfillForm(Dialect):
    """The answers of /infill. Implements reply.Dialect.

    Args:
        texts: The text that it wants.
        delivery: How the answer is sent.
        warms_up: Whether only the prompt was to be read, so that there is no text.
    """

    def __init__(self, job: Job, texts: TextRequest, delivery: Delivery, warms_up: bool) -> None:
        super().__init__(job, texts, delivery)
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


def adapter_documents(engine: Engine) -> list[dict[str, Any]]:
    """Return llama-server's description of a model's adapters; the paths are without their folders."""
    pairs = zip(engine.card.adapters, engine.lora, strict=True)
    return [{"id": number, "path": Path(path).name, "scale": scale} for number, (path, scale) in enumerate(pairs)]
