"""edgedec export and edgedec info on draft heads, as commands."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.heads.tiny_blocks import block_card, tiny_block, write_block
from support.heads.tiny_heads import TinyHead, write_head
from support.models.tiny_models import tiny_llama
from support.processes.command_line import run_here

from edgedec.gguf.file import read_gguf
from edgedec_runtimes.trained_heads.card import Promise
from edgedec_runtimes.trained_heads.load import load_head
from edgedec_runtimes.trained_heads.record import RECORD_FILE, record_text
from edgedec_runtimes.trained_heads.target import target_of

TINY = TinyHead(n_embd=64, n_embd_target=64, head_dim=16, taps=(0, 2, 4), n_vocab_target=260)
DSPARK = {"markov": "vanilla", "rank": 32, "confidence": True}


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """Return a tiny model."""
    return tiny_llama(tmp_path / "m.gguf", n_layer=4)


@pytest.fixture
def head(tmp_path: Path, target: Path) -> Path:
    """Return a head for it, with a record."""
    folder = tmp_path / "head"
    write_head(folder, TINY)
    promise = Promise((0.5, 0.25), {"chat": (0.6, 0.3)})
    (folder / RECORD_FILE).write_text(record_text("my head", target_of(read_gguf(target)), promise))
    return folder


def test_a_head_is_exported(head: Path, target: Path, tmp_path: Path) -> None:
    """The GGUF is a head for that model, of the types that were asked for; the message says how to use it."""
    out = tmp_path / "m.head.gguf"
    done = run_here("export", str(head), "--to", "gguf", "--for", str(target), "-o", str(out), "--type", "Q8_0,q=F16")
    assert done.code == 0, done.err
    assert f"edgedec run {target} --draft-option head={out}" in " ".join(done.err.split())
    found = load_head(out)
    assert (found.tensors["q"].type.name, found.tensors["fc"].type.name) == ("F16", "Q8_0")
    assert found.card == load_head(head).card
    as_json = run_here("export", str(out), "--to", "gguf", "--for", str(target), "-o", str(out) + "2", "--json")
    assert as_json.code == 0, as_json.err
    assert json.loads(as_json.out)["draft_for"] == str(target)


@pytest.mark.parametrize(
    ("options", "code", "named"),
    [
        (("--to", "gguf"), 40, "name the model that it belongs to with --for"),
        (("--for", "m"), 40, "are for --to gguf"),
        (("--to", "gguf", "--own-output"), 40, "name its model with --for"),
        (("--to", "gguf", "--for", "TARGET", "--layers", "1"), 40, "--layers"),
        (("--to", "gguf", "--for", "TARGET", "--type", "Q4_K_M"), 40, "'Q4_K_M' can't be written for a draft head"),
        (("--to", "gguf", "--for", "OTHER"), 13, "does not fit the model"),
    ],
)
def test_wrong_options_are_named(
    head: Path, target: Path, tmp_path: Path, options: tuple[str, ...], code: int, named: str
) -> None:
    """Nothing is written then."""
    other = tiny_llama(tmp_path / "other.gguf", n_layer=4, n_embd=32)
    names = {"TARGET": str(target), "OTHER": str(other)}
    out = tmp_path / "out.gguf"
    done = run_here("export", str(head), *(names.get(option, option) for option in options), "-o", str(out))
    assert (done.code, named in " ".join(done.err.split())) == (code, True), done.err
    assert not out.exists()


def test_info_shows_a_card(head: Path) -> None:
    """For a person: target, taps, what it accepts; as JSON the card and its tensors."""
    text = run_here("info", str(head))
    assert text.code == 0, text.err
    for line in (
        "trained for tiny llama 0 (weights",
        "taps what enters layers 0, 2, 4, counted from 0",
        "vocabulary drafts 40 of 260 tokens",
        "accepts the first token of a draft 50 %, up to the second 25 %",
        "accepts, chat the first token of a draft 60 %, up to the second 30 %",
    ):
        assert line in " ".join(text.text.split())
    found = json.loads(run_here("info", str(head), "--json").out)
    assert (found["kind"], found["name"], found["taps"]) == ("draft head", "my head", [0, 2, 4])
    assert found["tensors"]["fc"] == {"shape": [64, 192], "type": "F32", "n_bytes": 64 * 192 * 4}


@pytest.mark.parametrize("form", ["confidence", "unshifted", "selecting"])
def test_a_block_head_is_exported_and_shown(target: Path, tmp_path: Path, form: str) -> None:
    """The GGUF is the same head; a person reads its layers, its rows, its Markov head and its confidence."""
    sizes = {"n_embd": 64, "n_embd_target": 64, "head_dim": 16, "taps": (0, 2, 4), "n_vocab_target": 260}
    selecting = {"shifted": False, "markov": "selector", "rank": 32, "top_k": 4, "conv_length": 2, "conv_group": 16}
    forms: dict[str, dict[str, Any]] = {"confidence": DSPARK, "unshifted": {"shifted": False}, "selecting": selecting}
    card = block_card({"n_layer": 2} | forms[form], **sizes)
    folder, out = tmp_path / "head", tmp_path / "m.head.gguf"
    write_block(folder, tiny_block(card))
    done = run_here("export", str(folder), "--to", "gguf", "--for", str(target), "-o", str(out), "--type", "Q8_0")
    assert done.code == 0, done.err
    assert load_head(out).card == load_head(folder).card
    shown = " ".join(run_here("info", str(out)).text.split())
    lines = {
        "confidence": (
            "kind a trained draft head (DSpark)",
            "types Q8_0 fc markov_w1 markov_w2 q k v o gate up down; F32 confidence layers",
            "layers 2 of width 64, 4 heads of 16",
            "block 5 rows, the newest token and 4 masks; a row sees all of them",
            "Markov head by the token before, of rank 32",
            "confidence says how likely each token is accepted",
        ),
        "unshifted": (
            "kind a trained draft head (DFlash)",
            "block 5 rows, the newest token, which drafts nothing, and 4 masks",
            "Markov head no",
            "confidence none",
        ),
        "selecting": (
            "kind a trained draft head (DFlash2)",
            "attention_conv_proj mlp_conv_proj",
            "selector_predecessor selector_successor selector_hidden",
            "convolutions over 2 rows, with kernels for 16 neighbours",
            "Markov head by the token before, among the 4 best tokens of a row, of rank 32",
        ),
    }
    for line in lines[form]:
        assert line in shown
    assert json.loads(run_here("info", str(out), "--json").out)["block"]["n_layer"] == 2
