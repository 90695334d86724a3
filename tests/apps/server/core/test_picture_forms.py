"""Pictures in the forms of the four interfaces become parts of messages; what is no picture is refused by name."""

from base64 import b64encode
from typing import Any

import pytest

from edgedec_apps.server.anthropic.api import read_messages as read_anthropics
from edgedec_apps.server.core.errors import ApiError
from edgedec_apps.server.core.fetching import MOST_BYTES
from edgedec_apps.server.core.fields import Fields
from edgedec_apps.server.core.messages import RemotePicture, pictures_of, read_messages
from edgedec_apps.server.openai.responses_items import read_input

FILE = b"\x89PNG\r\n and more"
TEXT = b64encode(FILE).decode()
DATA = f"data:image/png;base64,{TEXT}"
IMAGE = {"type": "image", "image": FILE}
AWAY = {"type": "image", "image": RemotePicture("https://img.test/a.png")}


def said(text: str) -> dict[str, str]:
    """Return a part that is a text."""
    return {"type": "text", "text": text}


def read(messages: list[Any]) -> list[dict[str, Any]]:
    """Return the messages of a request of /v1/chat/completions."""
    return read_messages(Fields({"messages": messages}, interface="chat").each("messages"))


def chat(*parts: Any, **further: Any) -> list[dict[str, Any]]:
    """Return the messages of /v1/chat/completions."""
    return read([{"role": "user", "content": list(parts), **further}])


def of_anthropic(*blocks: Any) -> list[dict[str, Any]]:
    """Return the messages of /v1/messages."""
    return read_anthropics(Fields({"messages": [{"role": "user", "content": list(blocks)}]}, interface="messages"))


def of_responses(*parts: Any) -> list[dict[str, Any]]:
    """Return the messages of /v1/responses."""
    return read_input(Fields({"input": [{"role": "user", "content": list(parts)}]}))


def test_openais_chat() -> None:
    """image_url may hold a data: URL, the base64 alone, or an address, in an object or not; the order stays."""
    url = {"type": "image_url", "image_url": {"url": DATA, "detail": "auto"}}
    assert chat(url, said("What?")) == [{"role": "user", "content": [IMAGE, said("What?")]}]
    assert chat(said("This?"), {"type": "image_url", "image_url": TEXT})[0]["content"] == [said("This?"), IMAGE]
    assert chat({"type": "image_url", "image_url": {"url": "https://img.test/a.png"}})[0]["content"] == [AWAY]
    assert chat({"type": "image_url", "image_url": {"url": f"data:;base64,{TEXT}"}})[0]["content"] == [IMAGE]
    assert read([{"role": "tool", "content": [url]}])[0]["content"] == [IMAGE]


def test_ollamas_chat() -> None:
    """`images` come before the text of their message, which may have none."""
    message = {"role": "user", "content": "What?", "images": [TEXT, TEXT]}
    assert read([message])[0]["content"] == [IMAGE, IMAGE, said("What?")]
    assert read([{"role": "user", "images": [TEXT]}])[0]["content"] == [IMAGE, said("")]
    assert read([{"role": "user", "content": "x", "images": []}])[0]["content"] == "x"


def test_responses() -> None:
    """input_image stands among input_text, also in what a function returned."""
    picture = {"type": "input_image", "image_url": DATA, "detail": "low"}
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}, picture]
    assert of_responses(*parts) == [{"role": "user", "content": [said("a\nb"), IMAGE]}]
    assert of_responses(*parts[:2]) == [{"role": "user", "content": "a\nb"}]
    output = {"type": "function_call_output", "call_id": "1", "output": [picture]}
    assert read_input(Fields({"input": [output]})) == [{"role": "tool", "content": [IMAGE], "tool_call_id": "1"}]


def test_anthropics() -> None:
    """Blocks of type image hold base64 or an address; also those of a tool's result."""
    held = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": TEXT}}
    away = {"type": "image", "source": {"type": "url", "url": "https://img.test/a.png"}}
    assert of_anthropic(held, said("a"), said("b"), away) == [{"role": "user", "content": [IMAGE, said("a\nb"), AWAY]}]
    assert of_anthropic(said("a"), said("b")) == [{"role": "user", "content": "a\nb"}]
    result = {"type": "tool_result", "tool_use_id": "1", "content": [said("seen"), held]}
    assert of_anthropic(result) == [{"role": "tool", "content": [said("seen"), IMAGE], "tool_call_id": "1"}]
    assert pictures_of(of_anthropic(result, held)) == [IMAGE, IMAGE]


LONG = "A" * (4 * MOST_BYTES // 3 + 4)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("data:image/png;base64,", "is '';"),
        ("data:image/png;base64,====", "base64"),
        ("data:image/png;base64,x", "no base64"),
        ("data:image/png;base64,äöü", "no base64"),
        (f"data:image/png;base64,{LONG}", r"10 MB of a file"),
        (f"data:image/png,{TEXT}", "must begin with data:image"),
        (f"data:text/html;base64,{TEXT}", "must begin with data:image"),
        ("http://img.test/a.png", "by https from hosts that --image-hosts names"),
        ("file:///etc/passwd", "by https from hosts"),
        ("", "must be a data: URL"),
        (5, "must be a data: URL"),
        (None, "missing|must be a data: URL"),
        ([DATA], "must be a data: URL"),
        ({}, "must be a data: URL|base64|missing"),
    ],
)
def test_what_is_no_picture(url: Any, words: str) -> None:
    """Each interface refuses, by the name of the field, what is neither base64 of a picture nor an address of https."""
    with pytest.raises(ApiError, match=words) as refused:
        chat({"type": "image_url", "image_url": {"url": url}})
    assert refused.value.param == "messages[0].content[0].image_url.url"
    with pytest.raises(ApiError, match=words) as refused:
        of_anthropic({"type": "image", "source": {"type": "url", "url": url}})
    assert refused.value.param == "messages[0].content[0].source.url"
    with pytest.raises(ApiError, match=words) as refused:
        of_responses({"type": "input_image", "image_url": url})
    assert refused.value.param == "input[0].content[0].image_url"


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "user", "content": [{"type": "input_audio"}]}, r"content\[0\].type is 'input_audio', which can't be"),
        ({"role": "user", "content": "x", "images": TEXT[:5]}, r"images\[0\] is no base64"),
        ({"role": "user", "content": "x", "images": [1]}, "list of strings"),
    ],
)
def test_pictures_where_none_may_stand(message: dict[str, Any], words: str) -> None:
    """Sounds are named among what is not taken."""
    with pytest.raises(ApiError, match=words):
        read([message])


@pytest.mark.parametrize(
    ("more", "ignored"),
    [
        ({"content": [said("x"), {"type": "image_url", "image_url": DATA}]}, "messages[0].content[1] (image_url)"),
        ({"content": "x", "images": [TEXT]}, "messages[0].images"),
    ],
)
def test_pictures_of_an_answer_are_skipped(more: dict[str, Any], ignored: str) -> None:
    """A picture in an answer is skipped by name, so that a chat of another model can go on."""
    fields = Fields({"messages": [{"role": "assistant", **more}]}, interface="chat")
    (message,) = read_messages(fields.each("messages"))
    assert message["content"] in ("x", [said("x")])
    assert fields.ignored == ignored


def test_other_sources() -> None:
    """Files that a service would keep are not known here."""
    with pytest.raises(ApiError, match="file_id is 'f', which is not supported"):
        of_responses({"type": "input_image", "file_id": "f"})
    with pytest.raises(ApiError, match=r"source\.type is 'file'"):
        of_anthropic({"type": "image", "source": {"type": "file", "file_id": "f"}})
    with pytest.raises(ApiError, match=r"source\.type is None"):
        of_anthropic({"type": "image"})
