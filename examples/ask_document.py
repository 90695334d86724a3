"""A question about a text or a PDF: python ask_document.py MODEL FILE "What does it cost?"

A document that is longer than the context is searched first, and the model reads the passages that match.
"""

import sys
from pathlib import Path

import edgedec
from edgedec_apps.documents.asking import Asking
from edgedec_apps.documents.files import read_document


def main(name: str, file: str, question: str) -> None:
    """Print an answer, and which passages it is from where the document was searched."""
    with edgedec.load(name) as model:
        n_most = min(300, model.n_ctx // 4)
        message, search = Asking(model, n_answer=n_most).about([read_document(Path(file))], question)
        for token in model.chat_stream(message, max_tokens=n_most, temperature=0):
            print(token.text, end="", flush=True)
        print()
        if search is not None:
            print(search.line(file, model.n_ctx), file=sys.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:])
