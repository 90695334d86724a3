"""Which tool servers a file names, and what it says of one that is malformed."""

import json
from pathlib import Path
from typing import Any

import pytest

from edgedec.errors import RequestError, StorageError
from edgedec_apps.tools.configuration import Address, Program, configured, read_servers


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
