"""Tool servers that a file names, the names by which a model calls tools, and which run without a question."""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgedec.errors import RequestError, StorageError
from edgedec_apps.cli.chat.tool_calls import argument_rows
from edgedec_apps.tools.configuration import Address, Program, configured, read_servers
from edgedec_apps.tools.offered import MOST_TOOLS, Listed, is_allowed, offered
from edgedec_apps.tools.results import as_result, cut


def listed(*names: str, **given: Any) -> list[Listed]:
    return [Listed(name, given.get("description", ""), given.get("parameters", {})) for name in names]


def test_no_server_takes_the_name_of_anothers_tool() -> None:
    """Where two servers have a tool of one name, neither keeps it, so what was allowed by that name runs nowhere."""
    tools, left_out = offered([("a", listed("read", "x.y")), ("b", listed("read", "z"))])
    assert [(tool.name, tool.server, tool.listed.name) for tool in tools] == [
        ("a_read", "a", "read"),
        ("x_y", "a", "x.y"),
        ("b_read", "b", "read"),
        ("z", "b", "z"),
    ]
    assert not left_out
    assert not any(is_allowed(tool.name, ["read"]) for tool in tools)


LONG = "x" * 60


@pytest.mark.parametrize(
    ("lists", "names"),
    [
        ([("evil", ["read", "files_read"]), ("files", ["read"])], {"evil_read", "evil_files_read", "files_read"}),
        ([("evil", ["files_read"]), ("files", [])], {"evil_files_read"}),  # the other server is down
        ([("evil", ["files.read"]), ("files", ["write"])], {"evil_files_read", "write"}),
        ([("evil", ["fil\u0435s_read", "Files_read"]), ("files", ["x"])], {"fil_s_read", "Files_read", "x"}),
        ([("files", ["read", "own"]), ("files_read", ["read", "x"])], {"files_read", "own", "x"}),
        ([("files", ["x", "read_x"]), ("files_read", ["x"]), ("c", ["read_x"])], {"files_x", "c_read_x"}),
        ([("a.b", ["x"]), ("a_b", ["x"])], set()),
        (
            [("evil", [LONG + "yyyy"]), (LONG + "yyyy", ["x"]), ("c", ["x"])],
            {f"evil_{LONG}"[:64], "c_x", LONG + "yyyy"},
        ),
        ([(LONG, ["abc", "q"]), (LONG + "_abc", ["q"]), ("c", ["abc"])], {LONG + "_q", "c_abc"}),
    ],
)
def test_no_name_begins_with_that_of_another_server(lists: list[tuple[str, list[str]]], names: set[str]) -> None:
    """Whichever server is listed first: what is allowed by the name of a server is a tool of that server."""
    for order in itertools.permutations(lists):
        tools, left_out = offered([(server, listed(*each)) for server, each in order])
        assert {tool.name for tool in tools} == names
        assert len(tools) + len(left_out) == sum(len(each) for _, each in lists)
        for server, _ in lists:
            pattern = f"{f'{server}_'[:64]}*"
            assert all(tool.server == server for tool in tools if is_allowed(tool.name, [pattern]))


def test_tools_that_no_model_can_get_are_left_out() -> None:
    """Names that stay equal, empty names, huge schemas, schemas of any depth, and more tools than are allowed."""
    deep: dict[str, Any] = {}
    for _ in range(10_000):
        deep = {"x": deep}
    many = listed(*(f"t{i}" for i in range(MOST_TOOLS)))
    lists = [("a", listed("p.q", "p_q", "", "\x1b[2J"))]
    lists += [("b", [Listed("big", "", {"x": "y" * 30_000}), Listed("deep", "", deep), Listed("d", "z" * 9_000, {})])]
    tools, left_out = offered([*lists, ("c", many)])
    assert [tool.name for tool in tools[:4]] == ["a_p_q", "__2J", "d", "t0"]
    assert (len(tools), len(tools[2].listed.description)) == (MOST_TOOLS, 2_000)
    assert len(left_out) == 4 + 3
    assert "another one is named a_p_q" in left_out[0]
    assert "at most 128" in left_out[-1]
    while deep:
        deep = deep["x"]  # a deep value that is dropped at once would exhaust the stack


def test_patterns_allow_tools() -> None:
    """A name, or the beginning of names; never a part of one."""
    assert is_allowed("read_file", ["read_*"])
    assert is_allowed("x", ["y", "x"])
    assert not is_allowed("read", ["rea", "ead", "READ"])
    assert not is_allowed("read", [])


def test_arguments_are_shown_with_what_can_not_be_seen() -> None:
    """What controls a terminal or has no width is written as a number; long values are cut in the middle."""
    rows = argument_rows('{"a\\u202e": "x\\u200by\\u001b[2J\\n", "n": [1, {"z": null}]}')
    assert rows == ['a\\u202e: "x\\u200by\\u001b[2J\\n"', 'n: [1, {"z": null}]']
    (long,) = argument_rows('{"code": "%s rm -rf /"}' % ("x" * 9_000))
    assert long.startswith('code: "xxx')
    assert "characters left out]" in long
    assert long.endswith('rm -rf /"')
    assert "left out" not in argument_rows('{"code": "%s"}' % ("x" * 9_000), 10_000)[0]
    many = argument_rows(json.dumps({f"a{i}": i for i in range(50)}))
    assert (len(many), many[-1]) == (21, "and 30 further arguments")


def test_only_texts_of_an_answer_are_given_to_the_model() -> None:
    """Pictures, sounds and bytes are named; texts, links and structured answers are texts."""

    def block(kind: str, **given: Any) -> Any:
        return SimpleNamespace(type=kind, **given)

    def answer(*blocks: Any, structured: Any = None) -> Any:
        return SimpleNamespace(content=list(blocks), structured_content=structured, is_error=False)

    text = block("resource", resource=SimpleNamespace(uri="file:///a", text="A"))
    raw = block("resource", resource=SimpleNamespace(uri="file:///b", blob="AAAA"), mime_type=None)
    link = block("resource_link", name="n", uri="http://c", description=None)
    picture = block("image", mime_type="image/png", data="AAAA")
    found = as_result(answer(block("text", text="one"), text, raw, link, picture))
    assert found.text == (
        "one\n\nfile:///a:\nA\n\n[left out: resource (of no type); only text is read]\n\nn http://c\n\n"
        "[left out: image (image/png); only text is read]"
    )
    assert found.note == "not text, left out: resource (of no type), image (image/png)"
    assert as_result(answer(structured={"a": 1})).text == '{"a": 1}'
    assert as_result(answer()).text == "[the tool answered without a text]"
    long = as_result(answer(block("text", text="x" * 9_000)), 1_000)
    assert len(long.text) < 1_100
    assert long.note == "its answer of 9000 characters was cut to 1000"
    assert cut("abc", 3) == ("abc", 0)


def written(path: Path, servers: Any) -> Path:
    """Write a file of servers and return its path."""
    path.write_text(json.dumps({"mcpServers": servers}), encoding="utf-8")
    return path


def test_programs_and_addresses(tmp_path: Path) -> None:
    """Both kinds, in the file's order; keys of other programs are left alone, and a disabled server is left out."""
    servers = {
        "files": {"command": "npx", "args": ["-y", "x"], "env": {"A": "1"}, "cwd": "/tmp", "autoApprove": ["x"]},
        "off": {"command": "x", "disabled": True},
        "web": {"type": "http", "url": "https://example.org/mcp", "headers": {"authorization": "Bearer secret"}},
        "plain": {"type": "stdio", "command": "x"},
    }
    found = read_servers(written(tmp_path / "mcp.json", servers))
    assert found == (
        Program("files", "npx", ("-y", "x"), {"A": "1"}, "/tmp"),
        Address("web", "https://example.org/mcp", {"authorization": "Bearer secret"}),
        Program("plain", "x"),
    )
    assert "secret" not in repr(found)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (5, "must be an object"),
        ({}, "a command or a url"),
        ({"command": "x", "url": "http://x"}, "a command or a url"),
        ({"command": "x", "type": "http"}, "a command or a url"),
        ({"url": "http://x", "type": "sse"}, "the type 'sse'"),
        ({"command": "x", "args": "y"}, "args that are not a list"),
        ({"command": "x", "args": [1]}, "args that are not a list"),
        ({"command": "x", "env": {"A": 1}}, "env that is not an object of texts"),
        ({"command": "x", "env": []}, None),
        ({"command": "x\0y"}, "zero byte"),
        ({"command": "x", "cwd": 5}, "cwd"),
        ({"url": "file:///etc/passwd"}, "http:// or https://"),
        ({"url": "http://"}, "http:// or https://"),
        ({"url": "http://[x"}, "http:// or https://"),
        ({"url": "http://x:99999"}, "http:// or https://"),
    ],
)
def test_a_malformed_server_is_refused(tmp_path: Path, entry: Any, words: str | None) -> None:
    """With the file, the server's name and what is wrong."""
    path = written(tmp_path / "mcp.json", {"one": entry})
    if words is None:
        assert read_servers(path) == (Program("one", "x"),)
        return
    with pytest.raises(RequestError, match="one") as error:
        read_servers(path)
    assert words in str(error.value)
    assert str(path) in str(error.value)


def test_other_files_are_refused(tmp_path: Path) -> None:
    """What is no JSON, no object of servers, or not there; names with other signs, and too many servers."""
    path = tmp_path / "mcp.json"
    for text in ("{", "[]", '{"servers": {}}', '{"mcpServers": []}', "[" * 100_000):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(RequestError, match="names no tool servers"):
            read_servers(path)
    with pytest.raises(RequestError, match="must be named"):
        read_servers(written(path, {"a\x1b[2J": {"command": "x"}}))
    with pytest.raises(RequestError, match="at most 32"):
        read_servers(written(path, {f"s{i}": {"command": "x"} for i in range(33)}))
    with pytest.raises(StorageError):
        read_servers(tmp_path / "none.json")


def test_the_file_of_the_configuration_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stands for no name where it exists; "off" is for no servers."""
    monkeypatch.setenv("EDGEDEC_CONFIG", str(tmp_path))
    assert configured(None) == ()
    path = written(tmp_path / "mcp.json", {"one": {"command": "x"}})
    assert configured(None) == configured(str(path)) == (Program("one", "x"),)
    assert configured("off") == ()
