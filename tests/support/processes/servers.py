"""A small HTTP server on 127.0.0.1 that plays a file server, a package index or a model hub, with their failures."""

import hashlib
import io
import json
import re
import threading
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit


@dataclass
class Served:
    """The responses for one path.

    Attributes:
        data: The body.
        headers: Sent with the body (Content-Type, ETag, ...).
        statuses: Sent first, one per request, without the body.
        drops: Numbers of bytes after which the connection is cut, one per request.
        ranges: Whether the server respects Range.
        token: The Authorization that requests must have, where it is given.
        gate: An event to wait for before the body, five minutes at most.
        length: Whether Content-Length is sent; without it the connection ends with the body.
        n_sent: Bytes of bodies that were sent so far.
    """

    data: bytes
    headers: dict[str, str] = field(default_factory=dict)
    statuses: list[int] = field(default_factory=list)
    drops: list[int] = field(default_factory=list)
    ranges: bool = True
    token: str = ""
    gate: threading.Event | None = None
    length: bool = True
    n_sent: int = 0


@dataclass(frozen=True)
class Seen:
    """A request that the server received."""

    path: str
    headers: dict[str, str]
    query: dict[str, list[str]] = field(default_factory=dict)


class StubServer:
    """The server, a context manager. `served` maps paths to responses; `seen` lists all requests in order."""

    def __init__(self) -> None:
        """Take a free port of 127.0.0.1."""
        self.served: dict[str, Served] = {}
        self.seen: list[Seen] = []
        stub = self

        class Handler(_Handler):
            server_stub = stub

        self._server = _Quiet(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=lambda: self._server.serve_forever(poll_interval=0.01))

    def __enter__(self) -> Self:
        """Start serving."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def root(self) -> str:
        """The server's address, without a slash at the end."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def add(self, path: str, data: bytes, **headers: str) -> Served:
        """Serve `data` at `path`; header names are given with underscores."""
        self.served[path] = Served(data, {name.replace("_", "-"): value for name, value in headers.items()})
        return self.served[path]

    def requests_of(self, path: str) -> list[dict[str, str]]:
        """Return the headers of all requests for a path."""
        return [seen.headers for seen in self.seen if seen.path == path]


def catalogue_of(stub: StubServer, folder: Path, name: str, data: bytes, **more: Any) -> Served:
    """Serve a model's file, and write a catalogue of it alone into a folder."""
    facts = {"name": name, "size_bytes": len(data), "sha256": sha256(data), "licence": "MIT", "architecture": "llama"}
    lines = [f"{key} = {json.dumps(value)}" for key, value in (facts | {"note": "n"} | more).items()]
    source = f"[[model.source]]\nkind = 'url'\nurl = '{stub.root}/m.gguf'\n"
    (folder / "catalogue.toml").write_text("\n".join(["[[model]]", *lines, source]))
    return stub.add("/m.gguf", data)


class _Quiet(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing, because clients that hang up are part of the tests."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_stub: StubServer

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""

    def do_HEAD(self) -> None:
        """Answer without a body."""
        self.do_GET()

    def do_GET(self) -> None:
        """Send what `served` has for the path."""
        path, query = unquote(urlsplit(self.path).path), parse_qs(urlsplit(self.path).query)
        self.server_stub.seen.append(Seen(path, {name.title(): value for name, value in self.headers.items()}, query))
        served = self.server_stub.served.get(path)
        if served is None:
            self._end(404, {"X-Error-Code": "RepoNotFound"} if path.startswith("/api/") else {})
        elif served.statuses:
            self._end(served.statuses.pop(0), served.headers)
        elif served.token and self.headers.get("Authorization") != served.token:
            self._end(401, served.headers)
        else:
            if served.gate is not None:
                served.gate.wait(300)
            self._send(served)

    def _send(self, served: Served) -> None:
        begin, status, headers = 0, 200, dict(served.headers)
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        end = len(served.data)
        condition = self.headers.get("If-Range")
        if match and served.ranges and condition in (None, headers.get("ETag"), headers.get("Last-Modified")):
            begin, status = int(match[1]), 206
            if begin >= len(served.data):
                self._end(416, {"Content-Range": f"bytes */{len(served.data)}"})
                return
            end = min(end, int(match[2]) + 1) if match[2] else end
            headers = {"Content-Range": f"bytes {begin}-{end - 1}/{len(served.data)}"} | headers
        body = served.data[begin:end]
        self._head(status, ({"Content-Length": str(len(body))} if served.length else {"Connection": "close"}) | headers)
        if self.command == "HEAD":
            return
        if served.drops:
            body = body[: max(0, served.drops.pop(0) - begin)]
            self.close_connection = True
        for i in range(0, len(body), 1 << 14):
            self.wfile.write(body[i : i + (1 << 14)])
            served.n_sent += len(body[i : i + (1 << 14)])

    def _end(self, status: int, headers: dict[str, str]) -> None:
        self._head(status, {**headers, "Content-Length": "0"})

    def _head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()


def sha256(data: bytes) -> str:
    """Return the SHA-256 as hex."""
    return hashlib.sha256(data).hexdigest()


def model_bytes(n_bytes: int = 200_000, seed: int = 0) -> bytes:
    """Return bytes that begin as a GGUF does and cannot be compressed."""
    body = b"".join(hashlib.sha256(f"{seed} {i}".encode()).digest() for i in range(n_bytes // 32 + 1))
    return (b"GGUF" + body)[:n_bytes]


def files_in(folder: Path) -> list[str]:
    """Return the names of all files below a folder, sorted."""
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def catalogue_entry(data: bytes, source: Mapping[str, object], **fields: object) -> str:
    """Return a catalogue's entry of the model "tiny" with these bytes from a source; a field may be another."""
    known = {"name": "tiny", "size_bytes": len(data), "sha256": sha256(data)}
    known |= {"licence": "MIT", "architecture": "llama", "note": "A test"} | fields
    lines, of_source = ([f"{key} = {json.dumps(value)}" for key, value in each.items()] for each in (known, source))
    return "\n".join(["[[model]]", *lines, "[[model.source]]", *of_source, ""])


def wheel_bytes(members: dict[str, bytes]) -> bytes:
    """Return a zip file with these members."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(zipfile.ZipInfo(name), data)
    return buffer.getvalue()


def add_project(server: StubServer, project: str, wheels: dict[str, bytes], *, as_json: bool = False) -> None:
    """Serve a project of a package index at /simple/, with its wheels by file name."""
    for file, data in wheels.items():
        server.add(f"/files/{file}", data)
    if as_json:
        files = [
            {"filename": file, "url": f"../../files/{file}", "hashes": {"sha256": sha256(data)}, "yanked": False}
            for file, data in wheels.items()
        ]
        page = json.dumps({"meta": {"api-version": "1.1"}, "name": project, "files": files})
        content_type = "application/vnd.pypi.simple.v1+json"
    else:
        links = [
            f'<a href="{server.root}/files/{file}#sha256={sha256(data)}" data-requires-python="&gt;=3.9">{file}</a>'
            for file, data in wheels.items()
        ]
        page = f"<!DOCTYPE html><html><body><h1>Links for {project}</h1>{''.join(links)}</body></html>"
        content_type = "text/html"
    server.add(f"/simple/{project}/", page.encode(), Content_Type=content_type)


def add_repository(
    server: StubServer, repo: str, files: dict[str, bytes], *, revision: str = "main", lfs: bool = True
) -> None:
    """Serve a repository of a hub; without `lfs` its listing has no SHA-256."""
    commit = sha256(f"{repo}@{revision}".encode())[:40]
    siblings: list[dict[str, object]] = []
    for path, data in files.items():
        known = {"lfs": {"size": len(data), "sha256": sha256(data), "pointerSize": 134}} if lfs else {}
        siblings.append({"rfilename": path, "size": len(data), "blobId": "0" * 40, **known})
        for at in (revision, commit):
            headers = {"ETag": f'"{sha256(data)}"', "X_Repo_Commit": commit}
            server.add(f"/{repo}/resolve/{at}/{path}", data, **headers)
    info = {"id": repo, "modelId": repo, "sha": commit, "private": False, "tags": [], "siblings": siblings}
    info |= {"downloads": 0, "likes": 0}
    server.add(f"/api/models/{repo}/revision/{revision}", json.dumps(info).encode(), Content_Type="application/json")
