"""Searching a stub hub: what is asked, what is understood of the answer, and refusals."""

import json
from typing import Any

import pytest
from support.processes.servers import Served, StubServer

from edgedec.errors import OfflineError, PullError, RequestError
from edgedec.load_options import ResolveOptions
from edgedec_models.hubs.search import FoundModel, search_hub

TINY = {
    "id": "someone/tiny-GGUF",
    "downloads": 5,
    "gated": False,
    "gguf": {"total": 1000, "architecture": "llama", "context_length": 2048},
    "tags": ["gguf", "license:mit"],
}
BARE = {"id": "other/bare"}
ODD = {"id": "odd/odd", "downloads": None, "gated": "auto", "gguf": {"total": "many"}, "tags": [3], "more": 1}


def serve(server: StubServer, *found: dict[str, Any]) -> Served:
    """Let the hub answer with these models."""
    return server.add("/api/models", json.dumps(found).encode(), Content_Type="application/json")


def test_the_hub_is_asked_for_gguf_models(server: StubServer) -> None:
    """One request has the words, the filter, the order, the number and the token."""
    serve(server, TINY)
    assert search_hub(["tiny", "llama"], 7, ResolveOptions()) == [
        FoundModel("hf:someone/tiny-GGUF", 1000, "llama", "mit", 5, False)
    ]
    (seen,) = [one for one in server.seen if one.path == "/api/models"]  # huggingface_hub may ask for more beside
    asked = {name: seen.query[name] for name in ("search", "filter", "sort", "limit")}
    assert asked == {"search": ["tiny llama"], "filter": ["gguf"], "sort": ["downloads"], "limit": ["7"]}
    assert seen.headers["Authorization"] == "Bearer hf_test"


def test_what_the_hub_leaves_out_is_unknown(server: StubServer) -> None:
    """Fields that are absent, or of another type, are None; the most downloaded come first."""
    serve(server, BARE, ODD, TINY)
    found = search_hub(["x"], 20, ResolveOptions())
    assert found[0].name == "hf:someone/tiny-GGUF"
    assert found[1:] == [
        FoundModel("hf:other/bare", None, None, None, None, False),
        FoundModel("hf:odd/odd", None, None, None, None, True),
    ]


def test_a_failure_that_passes_is_tried_again(server: StubServer) -> None:
    """A server error is no end; one that stays is a PullError, and so is a page that is no answer."""
    serve(server, TINY).statuses = [503]
    assert len(search_hub(["x"], 20, ResolveOptions())) == 1
    serve(server, TINY).statuses = [403]
    with pytest.raises(PullError, match=r"search for .x.: .* answers 403"):
        search_hub(["x"], 20, ResolveOptions())
    server.add("/api/models", b"<html>Sign in</html>", Content_Type="text/html")
    with pytest.raises(PullError, match=r"search for .x."):
        search_hub(["x"], 20, ResolveOptions())


def test_searches_that_are_refused(server: StubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without words, with a number out of range, and offline, nothing is asked."""
    for words, n_most in (([], 5), ([" "], 5), (["x"], 0), (["x"], 101)):
        with pytest.raises(RequestError):
            search_hub(words, n_most, ResolveOptions())
    with pytest.raises(OfflineError, match="the option offline is set"):
        search_hub(["x"], 5, ResolveOptions(offline=True))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(OfflineError, match="HF_HUB_OFFLINE is set"):
        search_hub(["x"], 5, ResolveOptions())
    assert server.seen == []
