"""Tests of shared code run with some architectures only, which have among them whatever any architecture has."""

from dataclasses import MISSING, fields, replace
from pathlib import Path

import pytest
from support.models.code_paths import CODE_PATHS
from support.models.tiny_quantized import ARCHITECTURES, write_tiny

from edgedec.gguf.file import read_gguf
from edgedec_runtimes.architectures.reading import read_description
from edgedec_runtimes.cpu.network import read_network

pytestmark = pytest.mark.slow


def features(path: Path) -> set[str]:
    """Return what a network has: its switches that are no defaults, its mixers, and its kinds of tensors."""
    gguf = read_gguf(path)
    network = read_network(gguf)
    switches = {
        field.name + (f" {value}" if isinstance(value, str | bool) else "")
        for field in fields(network.switches)
        if field.default is not MISSING and (value := getattr(network.switches, field.name)) != field.default
    }
    rule = {f"rule {network.switches.recurrence.rule}"} if network.switches.recurrence else set()
    names = read_description(gguf, "cpu").gguf.tensors
    tensors = {name.split(".", 2)[-1] if name.startswith("blk.") else name for name in names}
    return switches | rule | {f"mixer {layer.mixer}" for layer in network.layers} | tensors


def test_no_architecture_has_what_no_member_has(tmp_path: Path) -> None:
    """Each switch, mixer and kind of tensor of any architecture is one of a member of CODE_PATHS."""
    found = {
        name: features(write_tiny(tmp_path / "m.gguf", replace(tiny, types=("Q4_0",))))
        for name, tiny in ARCHITECTURES.items()
    }
    covered = set().union(*(found[name] for name in CODE_PATHS))
    assert {name: kinds - covered for name, kinds in found.items() if kinds - covered} == {}
