"""The catalogue at the command line: what fits, what to expect, what runs it; near names; searching a stub hub."""

import json
import re
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from support.processes.command_line import run_here, run_process
from support.processes.servers import StubServer

from edgedec.errors import PluginError, RuntimeAbsentError, RuntimeUnavailableError
from edgedec.plugins import ARCHITECTURES, plugins
from edgedec.runtime import RuntimeReport
from edgedec.storage import probe_cache
from edgedec.storage.cache_files import cache_folder
from edgedec_apps import machine_speed
from edgedec_apps.cli.commands.list import command as list_command
from edgedec_apps.cli.reports.expectations import of_entry
from edgedec_models.catalogue import load_catalogue
from edgedec_runtimes.cpu.tiles import read_rates
from edgedec_runtimes.cpu.tiles.read_rates import memory_rate
from edgedec_runtimes.shared.cpu_count import usable_cores

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
FOUND: dict[str, Any] = {"id": "someone/tiny-GGUF", "downloads": 12345, "gated": "auto", "tags": ["license:mit"]}
FOUND["gguf"] = {"total": 1_000_000_000, "architecture": "llama"}


@pytest.fixture(autouse=True)
def _memory_of_ten_gigabytes_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_rates, "memory_rate", lambda *_: 1e10)


def pulled(*args: str) -> dict[str, dict[str, Any]]:
    """Return what `edgedec list` says of the models that are not here, by name."""
    result = run_here("list", "--json", *args)
    assert result.code == 0, result
    return {entry["name"]: entry for entry in json.loads(result.out)["to_pull"]}


def rows_of(*command: str) -> dict[str, list[str]]:
    """Return the words of each line of a report, by the first of them."""
    return {words[0]: words[1:] for line in run_here(*command).text.splitlines() if (words := line.split())}


def test_the_list_begins_with_what_was_tried() -> None:
    """Models that nobody ran are left out, counted, and shown by --all under words that say so."""
    entries = load_catalogue().values()
    tried, others = ({entry.name for entry in entries if entry.tried is kind} for kind in (True, False))
    short, everything = run_here("list").text, run_here("list", "--all").text
    assert [name for name in others if re.search(rf"(?m)^{re.escape(name)} ", short)] == []
    assert f"{len(others)} more models of the catalogue, not tried: edgedec list --all" in short
    first, _, last = everything.partition("\nto download, not tried:\n")
    assert {line.split()[0] for line in first.splitlines() if line.split()[:1] and line.split()[0] in tried} == tried
    assert {line.split()[0] for line in last.splitlines() if line.split()[:1] and line.split()[0] in others} == others


def test_the_list_says_what_to_expect() -> None:
    """Least memory from parameters and type, highest speed from the bandwidth; a mixture of experts reads a part."""
    entries = pulled()
    found = {name: (each["least_memory_bytes"], each["most_tokens_per_s"]) for name, each in entries.items()}
    assert found["qwen3-4b"] == (4_000_000_000 * 144 // 256, 1e10 / 2_250_000_000)
    assert found["qwen3-0.6b"] == (600_000_000 * 34 // 32, 1e10 / 637_500_000)
    assert found["qwen3-30b-a3b"] == (17_156_250_000, 1e10 / 1_856_250_000)
    assert found["smollm2-135m"] == (98_362_432, 1e10 / 98_362_432)
    assert found["qwen2.5-coder-1.5b"] == (1_117_320_768, 1e10 / 980_097_536)
    rows = rows_of("list", "--all")
    assert rows["qwen3-30b-a3b"] == [
        *("from", "17.2", "GB", "from", "17.2", "GB", "medium,", "up", "to", "5.4/s", "Apache-2.0"),
        *f"{load_catalogue()['qwen3-30b-a3b'].note.partition(': ')[2]}; has a draft head".split(),
    ]
    assert rows["smollm2-135m"][:8] == ["98.4", "MB", "324.0", "MB", "fast,", "up", "to", "102/s"]
    assert entries["lfm2-1.2b"]["draft_head"] is None
    assert entries["qwen3-4b"]["draft_head"] == {
        "name": "qwen3-4b.head",
        "kind": "eagle3",
        "source": "hf:AngelSlim/Qwen3-4B_eagle3",
        "size_bytes": None,
        "fetch_bytes": 436_000_000,
        "n_params": 218_000_000,
        "share_of_a_step": 218 / 4000,
        "license": "AngelSlim model licence",
        "note": "2.08 tokens a step with drafts of 2 (AngelSlim, vLLM); deepseek-ai/dspark_qwen3_4b_block7 "
        "(Apache-2.0) 5.4 on code with drafts of 7 (DeepSpec); RedHatAI/Qwen3-4B-speculator.dflash2 (Apache-2.0), no "
        "figure that we read",
    }


def test_the_list_names_another_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a reference whose architecture the cpu runtime does not have."""
    monkeypatch.setenv("EDGEDEC_CONFIG", str(tmp_path))
    (tmp_path / "catalogue.toml").write_text(
        '[[model]]\nname = "other"\nn_params = 1_000_000_000\nlicence = "MIT"\narchitecture = "mamba"\nnote = "Mamba"\n'
        'drafters = []\n[[model.source]]\nkind = "hub"\nhub = "hf:someone/other-GGUF:Q4_K_M"\n'
    )
    lines = [line for line in run_here("list", "--all").text.splitlines() if "(needs the llamacpp runtime)" in line]
    others = [name for name, entry in load_catalogue().items() if of_entry(entry, None).runtime != "cpu"]
    assert "other" in others
    assert sorted(line.split()[0] for line in lines) == sorted(others)


def test_what_does_not_fit_is_left_out(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the plan of a model that is here, and by the weights of one that is not."""
    monkeypatch.setenv("EDGEDEC_MODELS", str(model.parent))
    monkeypatch.setattr("edgedec_apps.base_memory.resident_bytes", lambda: 60_000_000)  # each command in a new process
    fitting = pulled("--fits", "2GB")
    needed = {name: each["chat_memory_bytes"] or each["least_memory_bytes"] for name, each in pulled().items()}
    assert set(fitting) == {name for name, n_bytes in needed.items() if n_bytes <= 2_000_000_000}
    assert "qwen3-1.7b" in fitting
    assert "qwen3-4b" not in fitting
    (here,) = json.loads(run_here("list", "--json", "--fits", "2GB").out)["models"]
    assert here["name"] == "tiny"
    assert here["memory_bytes"] == json.loads(run_here("info", "tiny", "--json").out)["memory_bytes"]["2048"]
    assert json.loads(run_here("list", "--json", "--fits", "1MB").out)["models"] == []
    assert run_here("list", "--fits", "1MB").text == "no models on this machine yet\n"
    run_here("list", "--fits", "much").failed(40, "900MB")


def test_every_architecture_has_a_runtime() -> None:
    """What our own runtime does not take names the other one, whose library knows the architecture."""
    llama_cpp = pytest.importorskip("llama_cpp")
    library = next(Path(llama_cpp.__file__).parent.glob("lib/libllama*")).read_bytes()
    for entry in load_catalogue().values():
        own = entry.architecture in plugins(ARCHITECTURES)
        assert of_entry(entry, None).runtime == ("cpu" if own else "llamacpp")
        assert own or entry.architecture.encode() + b"\0" in library, entry.name


@pytest.mark.skipif(not PAGE.exists(), reason="the documents are not beside the tests")
def test_the_page_names_the_references() -> None:
    """docs/models.md names each; those of the table before them are the tried ones."""
    first, _, others = PAGE.read_text("utf-8").partition("The other names are references")
    assert set(re.findall(r"(?m)^\| `([^`]+)` ", first)) == {e.name for e in load_catalogue().values() if e.tried}
    named = set(re.findall(r"`([^`\s]+)`", others.partition("The five above")[0]))
    assert named >= {name for name, entry in load_catalogue().items() if entry.reference is not None}


def test_info_tells_of_a_published_head() -> None:
    """Its kind, its size, its licence, whence it comes, what its publisher measured and what it costs."""
    lines = run_here("info", "qwen3-4b").text.splitlines()
    (told,) = [line.removeprefix("draft head").strip() for line in lines if line.startswith("draft head")]
    assert told == (
        "EAGLE-3, about 436.0 MB, AngelSlim model licence, hf:AngelSlim/Qwen3-4B_eagle3, not tried: 2.08 tokens a step "
        "with drafts of 2 (AngelSlim, vLLM); deepseek-ai/dspark_qwen3_4b_block7 (Apache-2.0) 5.4 on code with drafts "
        "of 7 (DeepSpec); RedHatAI/Qwen3-4B-speculator.dflash2 (Apache-2.0), no figure that we read; a drafted token "
        "reads 5 % of what a step reads"
    )
    text = " ".join(run_here("info", "gpt-oss-20b").text.split())
    assert "DFlash, its size is known when it is pulled, as its repository says, hf:z-lab/gpt-oss-20b-DFlash" in text


@pytest.mark.parametrize(
    ("name", "heads"),
    [
        ("lfm2.5-2.6b", ["LiquidAI/LFM2.5-2.6B-DSpark"]),
        ("lfm2.5-8b-a1b", ["LiquidAI/LFM2.5-8B-A1B-DSpark"]),
        *((f"qwen3.5-{n}", [f"z-lab/Qwen3.5-{n.upper()}-DFlash"]) for n in ("4b", "9b", "35b-a3b")),
        ("gpt-oss-20b", ["z-lab/gpt-oss-20b-DFlash"]),
        ("gemma4-12b", ["z-lab/gemma4-12B-it-DFlash", "deepseek-ai/dspark_gemma4_12b_block7"]),
        ("gemma4-26b-a4b", ["z-lab/gemma-4-26B-A4B-it-DFlash"]),
        ("qwen3-4b", ["deepseek-ai/dspark_qwen3_4b_block7", "RedHatAI/Qwen3-4B-speculator.dflash2"]),
        ("qwen3-8b", ["deepseek-ai/dspark_qwen3_8b_block7", "RedHatAI/Qwen3-8B-speculator.dflash2"]),
    ],
)
def test_the_catalogue_names_published_heads(name: str, heads: list[str]) -> None:
    """As none of them was tried here."""
    head = load_catalogue()[name].head
    assert head is not None
    assert head.reference is not None
    assert all(each in f"{head.reference} {head.note}" for each in heads)


def test_info_of_a_reference() -> None:
    """What is not known says so; nothing is downloaded."""
    lines = run_here("info", "lfm2-8b-a1b").text.splitlines()
    facts = dict(line.split(maxsplit=1) for line in lines)
    assert facts["source"] == "hf:LiquidAI/LFM2-8B-A1B-GGUF:Q4_K_M"
    assert facts["parameters"] == "8.30 billion, of which a token reads 1.50 billion"
    assert facts["size"] == "known when it is pulled"
    assert facts["memory"] == "from 4668.8 MB, for the weights alone"
    assert facts["speed"] == "medium, up to 12/s (tokens a second without drafts), as memory is read at 10.0 GB/s here"
    assert (facts["runtime"], facts["draft"]) == ("cpu", "head    none")
    document = json.loads(run_here("info", "lfm2-8b-a1b", "--json").out)
    assert (document["size_bytes"], document["path"]) == (None, None)


@pytest.fixture
def bandwidth(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], float | None]:
    """Return what tells the bandwidth as a new process would."""
    monkeypatch.setattr(read_rates, "memory_rate", memory_rate)

    def told() -> float | None:
        monkeypatch.setattr(read_rates, "_memory_rates", {})
        return machine_speed.memory_bandwidth()

    return told


def test_the_best_reading_of_memory_is_kept(
    bandwidth: Callable[[], float | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first calls measure, and the best of them is what counts; busy moments and damaged readings do not."""
    readings = iter([None, 2e9, 5e9, 3e9, 4e9, 1e9])

    def quietly(_: object) -> tuple[float, bool]:
        reading = next(readings)
        return reading or 9e9, reading is not None

    monkeypatch.setattr(probe_cache, "quietly", quietly)
    assert [bandwidth() for _ in range(8)] == [None, 2e9, *[5e9] * 6]
    some: list[object] = [[5, "x", None, -1, 1e300], "x", {}]
    for damaged in some:
        monkeypatch.setattr(probe_cache, "get", lambda *_, kept=damaged: kept)
        monkeypatch.setattr(probe_cache, "quietly", lambda _: (4.0, True))
        assert bandwidth() == (5.0 if isinstance(damaged, list) else 4.0)


def test_the_bandwidth_is_measured(bandwidth: Callable[[], float | None], monkeypatch: pytest.MonkeyPatch) -> None:
    """By our library, where there is memory for it; readings of less memory than a processor's cache are not kept."""
    monkeypatch.setattr(probe_cache, "quietly", lambda read: (read(), True))
    monkeypatch.setattr(machine_speed, "available_bytes", lambda: 1_000_000)
    assert bandwidth() is None
    assert memory_rate(usable_cores(), 2 << 20, cache_folder()) > 1e8
    assert bandwidth() is None
    monkeypatch.setattr(machine_speed, "available_bytes", lambda: 8 * read_rates.LEAST_KEPT_BYTES)
    assert (measured := bandwidth()) is not None
    assert measured > 1e8
    monkeypatch.setattr(machine_speed, "available_bytes", lambda: 1_000_000)
    assert bandwidth() == measured

    def absent(*_: object) -> float:
        raise RuntimeUnavailableError("not installed")

    monkeypatch.setattr(read_rates, "read_bandwidth", absent)
    monkeypatch.setattr(probe_cache, "get", lambda *_: None)
    assert bandwidth() is None


def test_an_unknown_name_says_how_to_search() -> None:
    """With near names of the catalogue, and the search with its words."""
    run_here("run", "smolm3-3b", "hi").failed(11, "did you mean smollm3-3b", "`edgedec search smolm3 3b`")


def test_the_hub_is_searched() -> None:
    """The catalogue's names first, then what the hub answers; offline the catalogue's only, and an error."""
    with StubServer() as server:
        server.add("/api/models", json.dumps([FOUND]).encode(), Content_Type="application/json")
        env = {"HF_ENDPOINT": server.root, "HF_HUB_OFFLINE": "", "NO_PROXY": "*"}
        result = run_process("search", "smollm3", "--quiet", env=env)  # no progress, which a busy machine would show
        document = json.loads(run_process("search", "smollm3", "3b", "--json", "--limit", "5", env=env).out)
    assert (result.code, result.err) == (0, "")
    first, headings, row = result.text.splitlines()
    assert first == "smollm3-3b: SmolLM3 3B: chat in six languages, thinks on demand (of the catalogue, not tried)"
    assert headings.split()[:2] == ["NAME", "PARAMETERS"]
    cells = ["hf:someone/tiny-GGUF", "1", "B", "from", "562.5", "MB", "12,345", "mit", "cpu,", "after"]
    assert row.split()[: len(cells)] == cells
    assert document["catalogue"] == ["smollm3-3b"]
    assert (document["hub"][0]["name"], document["hub"][0]["gated"]) == ("hf:someone/tiny-GGUF", True)
    asked = [seen.query for seen in server.seen if seen.path == "/api/models"]
    assert [query["limit"] for query in asked] == [["20"], ["5"]], server.seen
    offline = run_here("search", "smollm3")
    assert (offline.code, offline.text.count("\n")) == (21, 1)
    assert "HF_HUB_OFFLINE is set" in offline.err


ENTRY = """
[[model]]
name = "mine"
n_params = 7_000_000
size_bytes = {size}
sha256 = "{sha256}"
licence = "MIT"
architecture = "llama"
note = "Mine: for tests"
drafters = []
[[model.source]]
kind = "url"
url = "https://host/mine.gguf"
"""


@pytest.mark.usefixtures("drafting")
def test_the_reports_agree(model: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Licence, parameters and speed are the same in list and info; the speed is what a run measured."""
    data = model.read_bytes()
    (tmp_path / "catalogue.toml").write_text(ENTRY.format(size=len(data), sha256=sha256(data).hexdigest()))
    monkeypatch.setenv("EDGEDEC_CONFIG", str(tmp_path))
    (cache / "models").mkdir(parents=True)
    (cache / "models" / "mine.gguf").write_bytes(data)
    told = []
    for _ in range(2):
        (listed,) = json.loads(run_here("list", "--json").out)["models"]
        info = json.loads(run_here("info", "mine", "--json").out)
        keys = ("name", "license", "n_params", "note", "tokens_per_s")
        assert [listed[key] for key in keys] == [info[key] for key in keys]
        assert [listed[key] for key in keys[:4]] == ["mine", "MIT", 7_000_000, "Mine: for tests"]
        told.append(listed["tokens_per_s"])
        assert run_here("run", "mine", "hi", "-n", "8").code == 0
    assert told[0] is None
    assert re.search(r"(?m)^speed +\w+, [\d.]+/s \(tokens a second without drafts\)$", run_here("info", "mine").text)


def test_what_is_lacking_is_not_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """An optional runtime that is not installed is no fault; one that fails is."""
    answers = {
        "cpu": RuntimeReport("1", ("CPU",)),
        "gpu": RuntimeAbsentError("the package gpu is not installed"),
        "bad": PluginError("ImportError"),
    }
    monkeypatch.setattr("edgedec_apps.cli.commands.doctor.ask_runtimes", lambda _: answers)
    monkeypatch.setattr("edgedec_apps.cli.commands.doctor._devices", dict)
    facts = {line.split()[0]: line.split(maxsplit=1)[1] for line in run_here("doctor").text.splitlines()}
    assert facts["runtimes"] == "cpu"
    assert facts["optional"].startswith("gpu (not here;")
    assert facts["not"] == "working  runtime bad"


@pytest.mark.parametrize("columns", [80, 100, 140])
def test_the_list_fits_a_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At a terminal the last column wraps, and nothing is cut: the end of each use is there, and no line is wider."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    list_command(every=True, fits=None)
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= columns
    words = " ".join(shown.split())
    for entry in load_catalogue().values():
        assert entry.note.partition(": ")[2].split()[-1] in words
