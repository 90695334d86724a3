"""Reads the text of a PDF, as a process of its own: `python -m edgedec_apps.server.page.pdf_text BYTES` < FILE.

A PDF can be made to take any time and memory to read (it is a program of sorts). So the server reads none itself: it
starts this process, which holds at most BYTES of memory where the system can limit that, and ends it when it takes too
long. Where the server is killed meanwhile, the system ends this process after MOST_CPU_S. Standard output gets one JSON
object: "text", "n_pages" and "cut", or "error". This file imports little.
"""

import io
import json
import logging
import sys
from typing import Any

from edgedec_apps.limits import limit

MOST_CHARACTERS = 1_000_000
"""Characters after which the rest of a text is left out."""
MOST_CPU_S = 60
"""Seconds of computing after which the system ends this process; the server waits less long."""


def main() -> None:
    """Read a PDF from standard input, and write what it says to standard output."""
    limit(MOST_CPU_S, DATA=int(sys.argv[1]))
    logging.disable()  # pypdf warns of every small damage that it can read past
    try:
        found = text_of(sys.stdin.buffer.read())
    except MemoryError:
        found = {"error": "it takes too much memory to read"}
    except Exception as error:  # pypdf raises many kinds of exceptions for damaged files
        found = {"error": f"it is no PDF, or damaged ({type(error).__name__}: {error})"[:500]}
    json.dump(found, sys.stdout)


def text_of(data: bytes) -> dict[str, Any]:
    """Return "text", the text of a PDF with an empty line between pages, "n_pages", and "cut", whether text is missing.

    Where the pages have no text, or need a password, the result has only "error", which says so.

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
        text = page.extract_text().strip()
        pages.append(text[: MOST_CHARACTERS - n_characters])
        n_characters += len(text)
        if n_characters > MOST_CHARACTERS:
            break
    whole = "\n\n".join(page for page in pages if page)
    if not whole:
        return {"error": "its pages have no text; they may be scanned pictures, which a model of texts can't read"}
    clean = whole.encode("utf-8", "replace").decode()  # broken fonts give halves of surrogate pairs
    return {"text": clean, "n_pages": len(reader.pages), "cut": n_characters > MOST_CHARACTERS}


if __name__ == "__main__":
    main()
