"""Reads the text of a PDF, as a process of its own.

    python -m edgedec_apps.documents.pdf_text BYTES SECONDS CHARACTERS < FILE

A PDF can be made to take any time and memory to read (it is a program of sorts). So edgedec reads none itself: it
starts this process, which holds at most BYTES of memory where the system can limit that, and ends it when it takes too
long. Where edgedec is killed meanwhile, the system ends this process after so many SECONDS of computing. Behind so many
CHARACTERS, the rest of the text is left out. Standard output gets one JSON object: "text", "n_pages" and "cut", or
"error". This file imports little.
"""

import io
import json
import logging
import sys
from typing import Any

from edgedec_apps.limits import limit

PAGE_BREAK = "\f"
"""What stands between two pages of a text."""


def main() -> None:
    """Read a PDF from standard input, and write what it says to standard output."""
    n_bytes, seconds, most = map(int, sys.argv[1:])
    limit(seconds, DATA=n_bytes)
    logging.disable()  # pypdf warns of every small damage that it can read past
    try:
        document = text_of(sys.stdin.buffer.read(), most)
    except MemoryError:
        document = {"error": "it takes too much memory to read"}
    except Exception as error:  # pypdf raises many kinds of exceptions for damaged files
        document = {"error": f"it is no PDF, or damaged ({type(error).__name__}: {error})"[:500]}
    json.dump(document, sys.stdout)


def text_of(data: bytes, most: int) -> dict[str, Any]:
    """Return "text", the pages of a PDF with PAGE_BREAK between them, "n_pages", and "cut".

    Behind `most` characters text is missing, and "cut" is true. Where the pages have no text, or need a password, the
    result has only "error", which says so.

    Raises:
        Exception: The PDF is damaged, in one of many ways.
    """
    import pypdf

    reader = pypdf.PdfReader(io.BytesIO(data))
    if reader.is_encrypted and not reader.decrypt(""):
        return {"error": "it is protected by a password"}
    pages: list[str] = []
    n_characters = 0
    for page in reader.pages:
        text = page.extract_text().replace(PAGE_BREAK, "\n").strip()
        pages.append(text[: most - n_characters])
        n_characters += len(text)
        if n_characters > most:
            break
    whole = PAGE_BREAK.join(pages)
    if not any(pages):
        return {"error": "its pages have no text; they may be scanned pictures, which a model of texts can't read"}
    clean = whole.encode("utf-8", "replace").decode()  # broken fonts give halves of surrogate pairs
    return {"text": clean, "n_pages": len(reader.pages), "cut": n_characters > most}


if __name__ == "__main__":
    main()
