"""hf: names against a stub hub: choice of a file, tokens, shards, resuming, refusals, no network, searches."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.processes.servers import Served, StubServer, add_repository, catalogue_entry, model_bytes, sha256

from edgedec.errors import ModelNotFoundError, OfflineError, PullError, RequestError
from edgedec.load_options import ResolveOptions
from edgedec_models.cache import list_models, remove_model
from edgedec_models.hubs.hub_spec import HubSpec, choose, is_safe, parse_hub
from edgedec_models.hubs.search import FoundModel, search_hub
from edgedec_models.resolve import pull, resolve

Q4, Q8 = model_bytes(90_000, seed=4), model_bytes(120_000, seed=8)
REPO = {"README.md": b"# Tiny", "tiny-Q4_K_M.gguf": Q4, "tiny-Q8_0.gguf": Q8, "mmproj-tiny-F16.gguf": model_bytes(99)}
PARTS = [f"q8/a-Q8_0-0000{i}-of-00002.gguf" for i in (1, 2)]


@pytest.fixture
def hub(server: StubServer) -> StubServer:
    """Return a hub that has the repository."""
    add_repository(server, "someone/tiny-GGUF", REPO)
    return server


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("hf:a/b", HubSpec("a", "b")),
        ("hf:a/b.c-GGUF:q4_0", HubSpec("a", "b.c-GGUF", "q4_0")),
        ("hf:a/b:dir/x.gguf@v1.0", HubSpec("a", "b", "dir/x.gguf", "v1.0")),
        ("hf:a/b@refs/pr/1", HubSpec("a", "b", "", "refs/pr/1")),
    ],
)
def test_hub_names_are_taken_apart(name: str, spec: HubSpec) -> None:
    """A name is parsed into owner, repository, quantization or file, and revision."""
    assert parse_hub(name) == spec


@pytest.mark.parametrize("name", ["hf:", "hf:a", "hf:../b", "hf:a/..", "hf:a/b@..", "hf:a/b/c", "hf:a/b:", "hf:a /b"])
def test_other_hub_names_are_refused(name: str) -> None:
    """A name of another form is refused, the error says the form, and it never becomes a path."""
    with pytest.raises(ModelNotFoundError, match="write hf:OWNER/REPO"):
        resolve(name, ResolveOptions())


@pytest.mark.parametrize(
    ("files", "what", "chosen"),
    [
        (["a-Q8_0.gguf", "a-Q4_0.gguf", "a-Q4_K_M.gguf"], "", ["a-Q4_K_M.gguf"]),
        (["a-Q8_0.gguf", "a-Q4_0.gguf"], "", ["a-Q4_0.gguf"]),
        (["a-Q8_0.gguf", "a-F16.gguf"], "", ["a-Q8_0.gguf"]),
        (["model.gguf", "mmproj-f16.gguf", "imatrix.gguf", "x.json"], "", ["model.gguf"]),
        (["a.q4_k_m.gguf", "a.q4_k_s.gguf"], "Q4_K_M", ["a.q4_k_m.gguf"]),
        (["a-IQ4_K_M.gguf", "a-Q4_K_M.gguf"], "q4_k_m", ["a-Q4_K_M.gguf"]),
        (["a-Q4_K.gguf", "a-Q4_K_M.gguf"], "Q4_K", ["a-Q4_K.gguf"]),
        (["Q4_K_M-extra-F16.gguf", "a-Q4_K_M.gguf"], "Q4_K_M", ["a-Q4_K_M.gguf"]),
        (PARTS[::-1], "q8_0", PARTS),
        (["a-q4-00001-of-00002.gguf", "a-q4-00002-of-00002.gguf", "a-q4.gguf"], "q4", ["a-q4.gguf"]),
        (["dir/a.gguf", "b.gguf"], "a.gguf", ["dir/a.gguf"]),
        (["dir/a.gguf", "a.gguf"], "a.gguf", ["a.gguf"]),
    ],
)
def test_choice_of_a_file(files: list[str], what: str, chosen: list[str]) -> None:
    """The given quantization is chosen, in any case; without one Q4_K_M, Q4_0 or Q8_0, else the only file.

    A projector is never chosen.
    """
    assert choose(files, HubSpec("a", "b", what)) == tuple(chosen)


@pytest.mark.parametrize(
    ("files", "what", "words"),
    [
        (["a-Q5_K.gguf", "a-Q6_K.gguf"], "", r"nothing fits a default.*\n  hf:a/b:a-Q5_K\.gguf\n  hf:a/b:a-Q6_K\.gguf"),
        (["a-Q5_K.gguf"], "Q4_0", r"nothing fits Q4_0; name one of:\n  hf:a/b:a-Q5_K\.gguf"),
        (["a-Q4_0.gguf", "b-Q4_0.gguf"], "Q4_0", r"2 files fit Q4_0; name one of:\n  hf:a/b:a-Q4_0"),
        (["model.safetensors", "config.json"], "", r"no GGUF model .*\.json, \.safetensors.*-GGUF"),
        (["a-Q4_0-00001-of-00002.gguf"], "", "no GGUF model"),
        ([], "", "no files"),
    ],
)
def test_no_choice_lists_what_there_is(files: list[str], what: str, words: str) -> None:
    """If no file or several files fit, the error lists names that would work."""
    with pytest.raises(ModelNotFoundError, match=words):
        choose(files, HubSpec("a", "b", what))


@pytest.mark.parametrize(
    "file", ["../x.gguf", "/x.gguf", "a/../../x.gguf", "a\\x.gguf", "C:x.gguf", "a//x.gguf", "a/nul/x.gguf", "Con.gguf"]
)
def test_file_names_that_lead_elsewhere_are_ignored(file: str) -> None:
    """File names of a hub cannot lead out of its folder in the cache, nor to a device of Windows."""
    assert not is_safe(file)


@pytest.mark.slow
def test_default_is_fetched_and_kept(hub: StubServer, root: Path) -> None:
    """The default quantization is stored below hf/ with its record; the token is sent, and the hub is asked once.

    The repository's picture encoder comes along.
    """
    path = resolve("hf:someone/tiny-GGUF", ResolveOptions())
    assert path == root / "models" / "hf" / "someone" / "tiny-GGUF" / "main" / "tiny-Q4_K_M.gguf"
    assert path.read_bytes() == Q4
    assert [seen.headers["Authorization"] for seen in hub.seen] == ["Bearer hf_test"] * 3
    assert (
        json.loads(path.with_name(path.name + ".json").read_text())["source"] == "hf:someone/tiny-GGUF:tiny-Q4_K_M.gguf"
    )
    for name in ("hf:someone/tiny-GGUF", "hf:someone/tiny-GGUF:q4_k_m", "hf:someone/tiny-GGUF:tiny-Q4_K_M.gguf"):
        assert resolve(name, ResolveOptions(offline=True)) == path
    assert len(hub.seen) == 3


def test_other_quantization_is_another_file(hub: StubServer) -> None:
    """A stored quantization does not stand for another one."""
    assert pull("hf:someone/tiny-GGUF:Q8_0", ResolveOptions()).read_bytes() == Q8
    with pytest.raises(OfflineError, match=r"hf:someone/tiny-GGUF: it is not in the cache .* http://127\.0\.0\.1"):
        resolve("hf:someone/tiny-GGUF", ResolveOptions(offline=True))
    assert pull("hf:someone/tiny-GGUF", ResolveOptions()).read_bytes() == Q4


def test_revision_is_kept_apart(hub: StubServer) -> None:
    """A branch or tag has a folder of its own."""
    add_repository(hub, "someone/tiny-GGUF", {"tiny-Q4_K_M.gguf": Q8}, revision="v2")
    assert pull("hf:someone/tiny-GGUF", ResolveOptions()).parent.name == "main"
    path = pull("hf:someone/tiny-GGUF@v2", ResolveOptions())
    assert path.parent.name == "v2"
    assert path.read_bytes() == Q8


@pytest.mark.slow
def test_a_reference_of_the_catalogue_is_its_repository(
    hub: StubServer, root: Path, catalogue: Callable[[str], None]
) -> None:
    """A short name fetches, finds, checks again and removes the file that its hf: name stands for."""
    lines = ['name = "short"', 'licence = "MIT"', 'architecture = "llama"', 'note = "A test"', "n_params = 1000"]
    source = ["[[model.source]]", 'kind = "hub"', 'hub = "hf:someone/tiny-GGUF:Q8_0"']
    catalogue("\n".join(["[[model]]", *lines, *source]))
    with pytest.raises(OfflineError, match="hf:someone/tiny-GGUF:Q8_0: it is not in the cache"):
        resolve("short", ResolveOptions(offline=True))
    path = pull("short", ResolveOptions())
    assert path == root / "models" / "hf" / "someone" / "tiny-GGUF" / "main" / "tiny-Q8_0.gguf"
    assert path.read_bytes() == Q8
    n_seen = len(hub.seen)
    assert resolve("short", ResolveOptions(offline=True)) == resolve("short", ResolveOptions()) == path
    assert len(hub.seen) == n_seen
    add_repository(hub, "someone/tiny-GGUF", {"tiny-Q8_0.gguf": Q4})
    assert pull("short", ResolveOptions(), force=True).read_bytes() == Q4
    (listed,) = list_models()
    assert (listed.name, listed.address, listed.path) == ("short", "hf:someone/tiny-GGUF:tiny-Q8_0.gguf", path)
    own = root / "models" / "short.gguf"
    own.write_bytes(Q8)
    assert resolve("short", ResolveOptions()) == own
    assert {model.name for model in list_models()} == {"short", "hf:someone/tiny-GGUF:tiny-Q8_0.gguf"}
    own.unlink()
    assert remove_model("short") >= len(Q4)
    assert not path.exists()


def test_all_shards_are_fetched(server: StubServer) -> None:
    """All shards of a split model are fetched, and the path of the first one is returned."""
    shards = {f"q8/big-Q8_0-0000{i}-of-00003.gguf": model_bytes(10_000, seed=i) for i in (1, 2, 3)}
    add_repository(server, "someone/big", shards)
    path = pull("hf:someone/big:Q8_0", ResolveOptions())
    assert path.name == "big-Q8_0-00001-of-00003.gguf"
    assert [file.read_bytes() for file in sorted(path.parent.glob("*.gguf"))] == list(shards.values())
    path.with_name("big-Q8_0-00002-of-00003.gguf").unlink()
    with pytest.raises(OfflineError):
        resolve("hf:someone/big:Q8_0", ResolveOptions(offline=True))


@pytest.mark.parametrize(
    ("served", "words", "left"),
    [
        ({"data": model_bytes(len(Q4), seed=99)}, f"where {sha256(Q4)} was expected", []),
        ({"token": "Bearer hf_another"}, r"answers 401 .* HF_TOKEN", []),
    ],
)
def test_what_the_hub_does_not_send_is_refused(
    hub: StubServer, root: Path, served: dict[str, Any], words: str, left: list[Path]
) -> None:
    """A file that differs from what the hub lists is deleted; the error for a refused one mentions the token."""
    for each in hub.served.values():
        if each.data == Q4:
            vars(each).update(served)
    with pytest.raises(PullError, match=words):
        pull("hf:someone/tiny-GGUF", ResolveOptions())
    assert [*root.rglob("*.gguf*")] == left


def test_file_without_checksum_is_fetched(server: StubServer) -> None:
    """A small file, without a SHA-256 on the hub, is fetched, and its own SHA-256 recorded."""
    add_repository(server, "someone/tiny-GGUF", REPO, lfs=False)
    path = pull("hf:someone/tiny-GGUF", ResolveOptions())
    assert json.loads(path.with_name(path.name + ".json").read_text())["sha256"] == sha256(Q4)


def test_force_follows_the_repository(hub: StubServer) -> None:
    """A file that changed on the hub is kept until it is pulled with force."""
    path = pull("hf:someone/tiny-GGUF", ResolveOptions())
    add_repository(hub, "someone/tiny-GGUF", {"tiny-Q4_K_M.gguf": Q8})
    assert pull("hf:someone/tiny-GGUF", ResolveOptions()).read_bytes() == Q4
    assert pull("hf:someone/tiny-GGUF", ResolveOptions(), force=True) == path
    assert path.read_bytes() == Q8
    with pytest.raises(OfflineError, match="verifying it again needs"):
        pull("hf:someone/tiny-GGUF", ResolveOptions(offline=True), force=True)


@pytest.mark.parametrize(
    ("status", "code", "kind", "words"),
    [
        (404, "RepoNotFound", ModelNotFoundError, r"no such repository \(404\), or hides it: .*HF_TOKEN"),
        (401, "RepoNotFound", ModelNotFoundError, r"no such repository \(401\), or hides it: .*HF_TOKEN"),
        (403, "GatedRepo", PullError, r"gated \(403\): .*accept its terms .*HF_TOKEN"),
        (404, "RevisionNotFound", ModelNotFoundError, "no such branch, tag or commit"),
        (403, "", PullError, "access is refused; .*HF_TOKEN"),
    ],
)
def test_refusals_of_the_hub_are_explained(
    server: StubServer, status: int, code: str, kind: type[Exception], words: str
) -> None:
    """Absent, hidden, gated and refused repositories have different errors, which mention the token."""
    served = server.add(
        "/api/models/someone/tiny-GGUF/revision/main", b"{}", **({"X_Error_Code": code} if code else {})
    )
    served.statuses = [status]
    with pytest.raises(kind, match=words):
        pull("hf:someone/tiny-GGUF", ResolveOptions())
    assert len(server.seen) == 1


def test_token_stays_with_the_hub(hub: StubServer) -> None:
    """The token is not sent to another host after a redirect."""
    with StubServer() as storage:
        storage.add("/blob", Q4)
        for path, served in hub.served.items():
            if path.endswith("tiny-Q4_K_M.gguf"):
                served.headers["Location"], served.statuses = f"{storage.root}/blob", [302]
        assert pull("hf:someone/tiny-GGUF", ResolveOptions()).read_bytes() == Q4
        assert ["Authorization" in seen.headers for seen in storage.seen] == [False]


def test_unreachable_hub_is_a_pull_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub that does not answer is tried a few times, and then reported."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(PullError, match=r"http://127\.0\.0\.1:9 cannot be reached: .*tried 4 times"):
        pull("hf:someone/tiny-GGUF", ResolveOptions())


def test_catalogue_entry_from_a_hub(hub: StubServer, catalogue: Callable[[str], None], root: Path) -> None:
    """A catalogue entry may name a file of a hub, which is stored under the entry's name."""
    entry = catalogue_entry(Q4, {"kind": "hub", "hub": "hf:someone/tiny-GGUF:tiny-Q4_K_M.gguf"})
    catalogue(entry)
    assert resolve("tiny", ResolveOptions()) == root / "models" / "tiny.gguf"
    catalogue(entry.replace(":tiny-Q4_K_M.gguf", ""))
    with pytest.raises(RequestError, match="expected the name of a file"):
        resolve("other", ResolveOptions())


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
