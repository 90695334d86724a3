"""The programs that `edgedec launch` sets up, as a table: how each is told of a server."""

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from edgedec.callers import did_you_mean
from edgedec.errors import RequestError

_N_WRITTEN = 4096  # most tokens of an answer, for programs that ask for a number
_WAIT_MS = 3_600_000  # a long first prompt takes minutes on a slow machine


@dataclass(frozen=True, slots=True)
class Target:
    """What a program is told: a server's address, a model and the tokens of its context, and the server's key."""

    url: str
    model: str
    n_ctx: int
    key: str = field(default="none", repr=False)


@dataclass(frozen=True, slots=True)
class Setup:
    """How a program is told: variables, the first arguments, and what its settings file needs."""

    variables: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    settings: str = ""

    def before(self, words: list[str]) -> list[str]:
        """Return all arguments: those of the setup, but for options that a person typed, then the person's.

        >>> Setup(arguments=("--tools=Read", "--model=a")).before(["--tools", "Bash"])
        ['--model=a', '--tools', 'Bash']
        """
        typed = {word.partition("=")[0] for word in words if word.startswith("--")}
        return [word for word in self.arguments if word.partition("=")[0] not in typed] + words


@dataclass(frozen=True, slots=True)
class Tool:
    """A program: its name for a person, the tokens of its first prompt as measured, and how it is told of a server.

    `executable` is "" where an editor starts it, and `file` where it has no settings file, below the home folder.
    """

    title: str
    n_prompt: int
    setup: Callable[[Target], Setup]
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
        raise RequestError(f"{name!r:.80} is not among {', '.join(TOOLS)}{did_you_mean(name, TOOLS)}")
    return TOOLS[name]


def _claude(at: Target) -> Setup:
    variables = {
        "ANTHROPIC_BASE_URL": at.url,
        "ANTHROPIC_AUTH_TOKEN": at.key,
        "ANTHROPIC_API_KEY": "",  # a person's own does not go to another server
        **{f"ANTHROPIC_{kind}MODEL": at.model for kind in ("", "DEFAULT_HAIKU_", "DEFAULT_SONNET_", "DEFAULT_OPUS_")},
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(_N_WRITTEN),
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # it stands before all that could be reused, and changes
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "API_TIMEOUT_MS": str(_WAIT_MS),
    }
    return Setup(variables, ("--tools=Bash,Read,Edit,Write,Glob,Grep",))  # all 24 have 16,000 tokens


def _codex(at: Target) -> Setup:
    values: dict[str, object] = {"model": at.model, "model_provider": "edgedec", "model_context_window": at.n_ctx}
    values |= {"web_search": "disabled", "check_for_update_on_startup": False}
    provider: dict[str, object] = {"name": "edgedec", "base_url": f"{at.url}/v1"}
    provider |= {"wire_api": "responses", "env_key": "EDGEDEC_API_KEY", "stream_idle_timeout_ms": _WAIT_MS}
    values |= {f"model_providers.edgedec.{name}": value for name, value in provider.items()}
    words = tuple(word for name, value in values.items() for word in ("-c", f"{name}={json.dumps(value)}"))
    return Setup({"EDGEDEC_API_KEY": at.key}, words)


def _opencode(at: Target) -> Setup:
    model = {"name": at.model, "tool_call": True, "limit": {"context": at.n_ctx, "output": _N_WRITTEN}}
    options = {"baseURL": f"{at.url}/v1", "apiKey": "{env:EDGEDEC_API_KEY}"}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": "edgedec", "options": options, "models": {at.model: model}}
    name = f"edgedec/{at.model}"
    settings = {"model": name, "small_model": name, "provider": {"edgedec": provider}, "share": "disabled"}
    return Setup({"EDGEDEC_API_KEY": at.key, "OPENCODE_CONFIG_CONTENT": json.dumps(settings)})


def _aider(at: Target) -> Setup:
    words = (f"--openai-api-base={at.url}/v1", f"--model=openai/{at.model}")
    return Setup({"OPENAI_API_KEY": at.key}, (*words, "--no-show-model-warnings", "--no-check-update"))


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
    ollama = {"api_url": at.url, "available_models": [model]}
    return Setup(settings=json.dumps({"language_models": {"ollama": ollama}}, indent=2))


TOOLS: Mapping[str, Tool] = {
    "claude": Tool("Claude Code", 4_200, _claude, "claude", "npm install -g @anthropic-ai/claude-code"),
    "codex": Tool("Codex", 6_100, _codex, "codex", "npm install -g @openai/codex"),
    "opencode": Tool("opencode", 7_300, _opencode, "opencode", "npm install -g opencode-ai"),
    "aider": Tool("aider", 800, _aider, "aider", "python -m pip install aider-chat"),
    "continue": Tool("Continue", 1_400, _continue, file=".continue/config.yaml"),
    "zed": Tool("Zed", 1_000, _zed),
}


def with_models(before: str, entries: str) -> str:
    """Return Continue's settings with more models before the others (RequestError where the list is in one line)."""
    before = before if before.strip() else "name: edgedec\nversion: 0.0.1\nschema: v1\n"
    if not re.search("^models:", before, re.MULTILINE) and not before.lstrip().startswith("{"):
        return f"{before.rstrip()}\nmodels:\n{entries}"
    item = re.search(r"^models:[ \t]*(?:#.*)?\r?\n((?:[ \t]*(?:#.*)?\r?\n)*)( *)- ", before, re.MULTILINE)
    if item is None:
        raise RequestError("models: is not followed by an entry a line; put these there by hand:\n" + entries)
    shift = re.sub("^  ", item[2], entries, flags=re.MULTILINE)
    return before[: item.start(1)] + shift + before[item.start(1) :]
