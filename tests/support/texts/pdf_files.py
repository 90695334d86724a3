"""Small PDFs with known texts."""

import zlib


def pdf_of(*pages: str, more: bytes = b"") -> bytes:
    """Return a PDF with a page for each text, whose lines are drawn one below the other; "" is a page without text.

    `more` is a stream of the last page, which follows its text, as it stands in the file: compressed with zlib.
    """
    contents = [_drawing(text) for text in pages]
    n = len(pages)
    kids = " ".join(f"{4 + 2 * i} 0 R" for i in range(n))
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {n} >>".encode(),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for i, content in enumerate(contents):
        stream = f"{5 + 2 * i} 0 R" if not more or i < n - 1 else f"[{5 + 2 * i} 0 R {4 + 2 * n} 0 R]"
        objects += [
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 595 842] /Contents {stream} "
            "/Resources << /Font << /F1 3 0 R >> >> >>".encode(),
            b"<< /Length %d >>\nstream\n%s\nendstream" % (len(content), content),
        ]
    if more:
        objects.append(b"<< /Length %d /Filter /FlateDecode >>\nstream\n%s\nendstream" % (len(more), more))
    return _file(objects)


def swelling(n_bytes: int) -> bytes:
    """Return a PDF of a few kilobytes whose page is a stream of so many bytes when decompressed."""
    squeezed = zlib.compressobj(9)
    chunk = b" " * 1_000_000
    data = b"".join(squeezed.compress(chunk) for _ in range(n_bytes // len(chunk))) + squeezed.flush()
    return pdf_of("Hello", more=data)


def _drawing(text: str) -> bytes:
    lines = [line.replace("\\", r"\\").replace("(", r"\(").replace(")", r"\)") for line in text.splitlines()]
    shown = " ".join(f"({line}) Tj 0 -14 Td" for line in lines)
    return f"BT /F1 12 Tf 72 720 Td {shown} ET".encode("latin-1")


def _file(objects: list[bytes]) -> bytes:
    data = b"%PDF-1.4\n"
    places = []
    for number, content in enumerate(objects, 1):
        places.append(len(data))
        data += b"%d 0 obj\n%s\nendobj\n" % (number, content)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    n = len(objects) + 1
    trailer = b"trailer\n<< /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % (n, len(data))
    return data + b"xref\n0 %d\n0000000000 65535 f \n%s" % (n, table) + trailer
