"""A hundred malformed requests with pictures through four interfaces: each a 4xx with its reason; the server lives."""

import copy
import io
import random
import struct
import zlib
from base64 import b64encode
from typing import Any

import pytest
from support.models.seeing_model import data_url, picture
from support.processes.running_server import Running, places

pytestmark = pytest.mark.slow


def png(width: int, height: int, data: bytes = b"") -> bytes:
    """Return a PNG whose header says this size, with these bytes in place of its pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


def hostile_files() -> list[bytes]:
    """Return files that are no pictures that a model can take."""
    from PIL import Image

    tiff = io.BytesIO()
    Image.new("RGB", (8, 8)).save(tiff, "TIFF")
    good = picture()
    return [
        png(60_000, 60_000),
        png(1, 100_000),
        png(0, 5),
        png(30_000, 2, bytes(10)),
        png(2**31 - 1, 2**31 - 1),
        good[: len(good) // 2],
        good[:24],
        b"GIF89a",
        b"RIFF\xff\xff\xff\xffWEBP",
        b"\xff\xd8\xff\xe0" + bytes(50),
        b"BM" + bytes(60),
        b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>",
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n",
        b"%PDF-1.4",
        tiff.getvalue(),
        b"ftypheic" * 8,
        b"x",
        random.Random(1).randbytes(4000),
    ]


def urls() -> list[Any]:
    """Return what may be given as the address of a picture, and is none."""
    files = [f"data:image/png;base64,{b64encode(data).decode()}" for data in hostile_files()]
    texts = [
        *("file:///etc/passwd", "http://127.0.0.1/", "https://127.0.0.1/", "ftp://x"),
        "https://169.254.169.254/latest",
    ]
    odd = ["data:", "data:,", "data:image/png;base64", f"{data_url()[:-9]}\u0000", "data:image/png;base64,\U0001f600"]
    return [*files, *texts, *odd, 5, True, [], {}, [data_url()], {"url": {}}]


def body_of(interface: str, url: Any) -> dict[str, Any]:
    """Return a request about a picture, in the form of an interface."""
    base64 = url.partition(",")[2] if isinstance(url, str) and url.startswith("data:") else url
    text = {"type": "text", "text": "x"}
    if interface == "/v1/chat/completions":
        return {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}, text]}]}
    if interface == "/v1/responses":
        return {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]}
    if interface == "/v1/messages":
        source = {"type": "base64", "media_type": "image/png", "data": base64}
        return {"messages": [{"role": "user", "content": [{"type": "image", "source": source}, text]}]}
    return {"model": "seeing", "stream": False, "messages": [{"role": "user", "content": "x", "images": [base64]}]}


SHORT: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"max_tokens": 2},
    "/v1/responses": {"max_output_tokens": 2},
    "/v1/messages": {"max_tokens": 2},
    "/api/chat": {"options": {"num_predict": 2}},
}


@pytest.mark.parametrize("path", SHORT)
def test_hostile_pictures(seeing: Running, path: str) -> None:
    """Bombs, halves, other formats, other schemes and other types: refused with a sentence in the interface's form."""
    for url in urls():
        answer = seeing.client.post(path, json=body_of(path, url) | SHORT[path])
        assert 400 <= answer.status_code < 500, (url if not isinstance(url, str) else url[:200], answer.text)
        error = answer.json()["error"]
        message = error if isinstance(error, str) else error["message"]
        assert len(message) > 20, answer.text
        assert "Traceback" not in message
    good = seeing.client.post(path, json=body_of(path, data_url()) | SHORT[path])
    assert good.status_code == 200, good.text


@pytest.mark.parametrize("path", SHORT)
def test_wrong_values_around_a_picture(seeing: Running, path: str) -> None:
    """Whatever stands in place of a picture, of its part or of what is around: an answer, or a 4xx with its reason."""
    body = body_of(path, data_url()) | SHORT[path] | {"model": "seeing"}
    name = "input" if "input" in body else "messages"
    values: tuple[Any, ...] = (None, 5, "x", [], [None], {}, {"type": []})
    for place in range(len(places(body[name]))):
        for value in values:
            changed = copy.deepcopy(body)
            container, key = places(changed[name])[place]
            container[key] = copy.deepcopy(value)
            answer = seeing.client.post(path, json=changed)
            assert answer.status_code < 500, (changed[name], answer.text)
            assert answer.status_code == 200 or len(answer.text) > 30, answer.text
