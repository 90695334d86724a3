"""docs/boards.md: the plans that it shows are those that the commands print."""

import re
from pathlib import Path

import pytest
from support.models.real_models import real_model
from support.processes.command_line import run_here

DOCUMENT = Path(__file__).parents[3] / "docs" / "boards.md"
BLOCK = re.compile(r"```text\n\$ edgedec plan ([^\n]+)\n(.*?)\n```", re.DOTALL)


@pytest.mark.slow
@pytest.mark.usefixtures("drafting")
@pytest.mark.skipif(not DOCUMENT.is_file(), reason="the documents are not beside the tests")
def test_the_plans_of_the_document_are_those_of_the_commands() -> None:
    """Of one machine with a GPU: what the cpu runtime plans depends on this machine's processor."""
    pytest.importorskip("llama_cpp")
    path = real_model("qwen2.5-coder-1.5b.gguf")
    blocks = dict(BLOCK.findall(DOCUMENT.read_text(encoding="utf-8")))
    commands = [command for command in blocks if "jetson-orin-nano-4gb" in command]
    assert len(commands) == 1
    for command in commands:
        result = run_here("plan", path, *command.split()[1:], "--runtime", "llamacpp", "--quiet")
        assert result.code == 0, result
        found = result.out.decode().split("\nWhat is changed to fit")[0].strip()
        assert found.splitlines()[1:] == blocks[command].splitlines()[1:], command  # below the model's name
