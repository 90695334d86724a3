"""The programs that `edgedec launch` sets up, as a table: how each is told of a server.

A program is told by variables and arguments, which end with it. Only one that reads nothing but a file has its file
written (edgedec_apps.launch_files).
"""

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from edgedec.callers import did_you_mean
from edgedec.errors import RequestError

_N_WRITTEN = 4096  # most tokens of an answer, for programs that ask for a number


@dataclass(frozen=True, slots=True)
class Target:
    """What a program is told.

    Attributes:
        url: The address of the server.
        model: The name of the model there.
        n_ctx: Tokens of its context.
        key: The server's key; any text stands for none.
    """

    url: str
    model: str
    n_ctx: int
    key: str = field(default="none", repr=False)


@dataclass(frozen=True, slots=True)
class Setup:
    """How a program is told: variables, the first arguments, and lines of its settings file."""

    variables: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    settings: str = ""


@dataclass(frozen=True, slots=True)
class Tool:
    """A program.

    Attributes:
        title: Its name, for a person.
        setup: Returns how it is told of a server.
        n_prompt: Tokens of its first prompt, as measured (docs/agents.md).
        executable: What starts it; "" where an editor does.
        install: How it is installed.
        file: Its settings file below the home folder; "" where none is written.
    """

    title: str
    setup: Callable[[Target], Setup]
    n_prompt: int
    executable: str = ""
    install: str = ""
    file: str = ""

    @property
    def path(self) -> Path:
        """Its settings file, not a link to it."""
        return Path(os.path.realpath(Path.home() / self.file))


def tool_of(name: str) -> Tool:
    """Return the program of a name (RequestError for another name)."""
    if name not in TOOLS:
        hint = did_you_mean(name, TOOLS)
        raise RequestError(f"{name!r:.80} is no program that edgedec sets up{hint}; they are {', '.join(TOOLS)}")
    return TOOLS[name]


def command_of(setup: Setup, words: list[str]) -> list[str]:
    """Return the arguments of a program: those of the setup, then a person's; the same option of a person replaces ours.

    >>> command_of(Setup(arguments=("--tools=Read", "--model=a")), ["--tools", "Bash"])
    ['--model=a', '--tools', 'Bash']
    """
    typed = {word.partition("=")[0] for word in words if word.startswith("--")}
    return [word for word in setup.arguments if word.partition("=")[0] not in typed] + words


def _claude(at: Target) -> Setup:
    roles = ("", "_SMALL_FAST", "_DEFAULT_HAIKU", "_DEFAULT_SONNET", "_DEFAULT_OPUS")
    models = {f"ANTHROPIC{role}_MODEL": at.model for role in roles}
    variables = {
        "ANTHROPIC_BASE_URL": at.url,
        "ANTHROPIC_AUTH_TOKEN": at.key,
        "ANTHROPIC_API_KEY": "",  # a person's own does not go to another server
        **models,
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(_N_WRITTEN),
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # it differs by session, and stands before all that could be reused
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "API_TIMEOUT_MS": "3600000",
    }
    return Setup(variables, ("--tools=Bash,Read,Edit,Write,Glob,Grep",))  # all 24 are 16,000 tokens


def _codex(at: Target) -> Setup:
    provider = {
        "name": "edgedec",
        "base_url": f"{at.url}/v1",
        "wire_api": "responses",
        "env_key": "EDGEDEC_API_KEY",
        "stream_idle_timeout_ms": 3_600_000,
    }
    values = {
        "model": at.model,
        "model_provider": "edgedec",
        "model_context_window": at.n_ctx,
        "web_search": "disabled",
        "check_for_update_on_startup": False,
        **{f"model_providers.edgedec.{name}": value for name, value in provider.items()},
    }
    pairs = (("-c", f"{name}={json.dumps(value)}") for name, value in values.items())
    return Setup({"EDGEDEC_API_KEY": at.key}, tuple(word for pair in pairs for word in pair))


def _opencode(at: Target) -> Setup:
    model = {"name": at.model, "tool_call": True, "limit": {"context": at.n_ctx, "output": _N_WRITTEN}}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "edgedec",
        "options": {"baseURL": f"{at.url}/v1", "apiKey": "{env:EDGEDEC_API_KEY}"},
        "models": {at.model: model},
    }
    name = f"edgedec/{at.model}"
    settings = {"model": name, "small_model": name, "provider": {"edgedec": provider}, "autoupdate": False}
    return Setup({"EDGEDEC_API_KEY": at.key, "OPENCODE_CONFIG_CONTENT": json.dumps(settings | {"share": "disabled"})})


def _aider(at: Target) -> Setup:
    variables = {"OPENAI_API_KEY": at.key, "AIDER_ANALYTICS": "false"}
    address = (f"--openai-api-base={at.url}/v1", f"--model=openai/{at.model}")
    return Setup(variables, (*address, "--no-show-model-warnings", "--no-check-update"))


def _continue(at: Target) -> Setup:
    """Chats by OpenAI's interface; completions by ollama's, which fills in the middle."""
    model = json.dumps(at.model)
    return Setup(
        settings=f"""\
- name: edgedec
  provider: openai
  model: {model}
  apiBase: {at.url}/v1
  apiKey: none
  roles: [chat, edit, apply]
  defaultCompletionOptions: {{contextLength: {at.n_ctx}, maxTokens: {_N_WRITTEN}}}
- name: edgedec completion
  provider: ollama
  model: {model}
  apiBase: {at.url}
  roles: [autocomplete]
"""
    )


def _zed(at: Target) -> Setup:
    model = {"name": at.model, "display_name": at.model, "max_tokens": at.n_ctx, "supports_tools": True}
    settings = {
        "language_models": {"ollama": {"api_url": at.url, "available_models": [model]}},
        "agent": {"default_model": {"provider": "ollama", "model": at.model}},
    }
    return Setup(settings=json.dumps(settings, indent=2) + "\n")


TOOLS: Mapping[str, Tool] = {
    "claude": Tool("Claude Code", _claude, 6_000, "claude", "npm install -g @anthropic-ai/claude-code"),
    "codex": Tool("Codex", _codex, 6_100, "codex", "npm install -g @openai/codex"),
    "opencode": Tool("opencode", _opencode, 7_300, "opencode", "npm install -g opencode-ai"),
    "aider": Tool("aider", _aider, 800, "aider", "python -m pip install aider-chat"),
    "continue": Tool("Continue", _continue, 1_000, file=".continue/config.yaml"),
    "zed": Tool("Zed", _zed, 1_000),
}


def with_models(before: str, entries: str) -> str:
    """Return Continue's settings with more entries, the first ones of its list of models; the rest stays as it is.

    Args:
        before: The settings so far; "" where there are none.
        entries: The entries, each beginning with "- ".

    Raises:
        RequestError: The list is written in a way that text can't be put into.
    """
    if not before.strip():
        return f"name: edgedec\nversion: 0.0.1\nschema: v1\nmodels:\n{_indented(entries, 2)}"
    lines = before.splitlines(keepends=True)
    begins = [i for i, line in enumerate(lines) if line.startswith("models:")]
    if not begins:
        return f"{before.rstrip()}\nmodels:\n{_indented(entries, 2)}"
    rest = "".join(lines[begins[0] + 1 :])
    item = re.match(r"(?:[ \t]*(?:#.*)?\r?\n)*( *)- ", rest)
    if not re.fullmatch(r"models:\s*(#.*)?", lines[begins[0]].rstrip()) or item is None:
        raise RequestError("its list of models is not one entry a line; put these there by hand:\n" + entries)
    return "".join(lines[: begins[0] + 1]) + _indented(entries, len(item[1])) + rest


def _indented(entries: str, n: int) -> str:
    return "".join(f"{' ' * n}{line}\n" for line in entries.splitlines())
