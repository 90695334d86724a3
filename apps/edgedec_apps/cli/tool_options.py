"""Command-line options of tools of other programs, shared by the commands that offer tools to a model."""

from dataclasses import dataclass

from edgedec_apps.cli.declared import flag


@dataclass(frozen=True)
class ToolFlags:
    """The options of tools of other programs."""

    mcp: str | None = flag(
        "--mcp FILE",
        "File of tool servers (MCP) that the model may use, or off (default: mcp.json beside catalogue.toml).",
        panel="Tools",
    )
    allow_tools: str | None = flag(
        "--allow-tools NAMES",
        "Tools that run without a question, by name, with commas; read_* stands for all that begin so.",
        panel="Tools",
    )
