"""Files of the web chat that are longer than the context: `POST /page/passages` returns what of them is to be read."""

from typing import Any

from starlette.requests import Request

from edgedec_apps.documents.asking import Asking
from edgedec_apps.documents.files import Document
from edgedec_apps.documents.pdf_text import PAGE_BREAK
from edgedec_apps.server.core.answer import Answer, Job, read_named
from edgedec_apps.server.core.fields import Fields
from edgedec_apps.server.core.messages import read_messages
from edgedec_apps.server.core.prompts import tokenizer_bytes
from edgedec_apps.server.core.service import Service

_CHARACTER_BYTES = 16  # of what a search holds of a text: passages, and prompts of them


async def passages(request: Request, service: Service) -> Answer:
    """Return "content", the message about files with the passages that match it best, and "note", which says so.

    Both are null where the files fit the context whole, behind the earlier `messages`.

    Raises:
        ApiError: The request is malformed (400).
        PromptTooLongError: The files are too long, and nothing in them matches the question.
    """
    fields, named = await read_named(request, service)
    earlier = fields.each("messages")
    before = read_messages(earlier) if earlier else []
    documents = [_document(file) for file in fields.each("files")]
    question = fields.text("question") or None
    fields.end()

    async def compute(job: Job) -> dict[str, Any]:
        engine, texts = job.engine, [document.text for document in documents]
        asking = Asking(engine, before=before, n_answer=engine.n_ctx // 2, named=True)  # half is for what follows
        n_bytes = await tokenizer_bytes([*texts, question or ""]) + _CHARACTER_BYTES * sum(map(len, texts))
        async with job.memory.more(n_bytes):
            content, found = await job.in_thread(asking.about, documents, question)
        if found is None:
            return {"content": None, "note": None}
        return {"content": content, "note": found.line(", ".join(each.name for each in documents), engine.n_ctx)}

    return Answer(service, named, fields, compute)


def _document(file: Fields) -> Document:
    name, text = file.text("name") or "file", file.text("text") or ""
    file.end()
    return Document(name, text, is_paged=PAGE_BREAK in text)
