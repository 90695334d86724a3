"""What `edgedec plan` and `edgedec info` say of a model is what a process that runs it holds, within 5 % or 16 MB."""

import sys
from pathlib import Path
from typing import Any

import pytest
from support.processes.command_line import run_process

pytestmark = [
    pytest.mark.slow,
    pytest.mark.model,
    pytest.mark.skipif(sys.platform != "linux", reason="the system's count of memory"),
]

CPU = ("--runtime", "cpu")


@pytest.fixture(scope="module")
def settings(smollm_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A cache of its own that has the tiles and measurements, as for every run but a model's first."""
    made = {"EDGEDEC_CACHE": str(tmp_path_factory.mktemp("held"))}
    document(made, "run", smollm_path, "A", *CPU, "--raw", "--method=ignore-end", "-n", "8", "-q")
    return made


def document(settings: dict[str, str], *args: Any) -> dict[str, Any]:
    """Return what a command in a process of its own prints with --json."""
    return run_process(*args, "--json", env=settings).document()


def is_near(held: int, planned: int) -> bool:
    """Return whether it is within what docs/memory.md promises."""
    return abs(held - planned) <= max(16_000_000, planned * 0.05)


@pytest.mark.parametrize(
    ("n_context", "prompt", "n_tokens", "part"),
    [(4096, "Why is the sky blue?", 24, "start_bytes"), (512, "river " * 400, 100, "total_bytes")],
    ids=["a short text", "a full context"],
)
def test_the_plan_of_a_run_is_what_it_holds(
    smollm_path: Path, settings: dict[str, str], n_context: int, prompt: str, n_tokens: int, part: str
) -> None:
    """Without a cap: `plan` tells what is held with a short text, and where the context is full."""
    options = ("-c", str(n_context), *CPU)
    planned = document(settings, "plan", smollm_path, *options)
    run = ("run", smollm_path, prompt, *options, "--raw", "--method=ignore-end", "-t", "0", "-n", str(n_tokens), "-q")
    held = document(settings, *run)["memory"]["peak_bytes"]
    unfilled = ("draft stores", "prompt cache")  # by one text: its blocks go to the disk one by one
    spare = sum(term["n_bytes"] for term in planned["terms"] if term["name"] in unfilled)
    expected = planned[part] - (spare if part == "total_bytes" else 0)
    assert is_near(held, expected), (held, expected)


def test_info_and_plan_say_the_same(smollm_path: Path, settings: dict[str, str]) -> None:
    """The memory of `info` is that of `plan`; processes differ a little in what an interpreter takes."""
    told, planned = (document(settings, command, smollm_path) for command in ("info", "plan"))
    assert told["n_ctx_default"] == planned["setting"]["context"] == 8192
    assert is_near(told["memory_bytes"]["8192"], planned["total_bytes"])
    assert is_near(told["memory_start_bytes"], planned["start_bytes"])
    assert told["memory_bytes"]["8192"] - told["memory_start_bytes"] == planned["total_bytes"] - planned["start_bytes"]
