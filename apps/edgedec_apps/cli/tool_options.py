"""Command-line options of tools of other programs, shared by the commands that offer tools to a model."""

from dataclasses import dataclass
from typing import Annotated

from edgedec_apps.cli.options import option


@dataclass(frozen=True)
class ToolFlags:
    """The options of tools of other programs."""

    mcp: Annotated[
        str | None,
        option(
            "--mcp",
            help="File of tool servers (MCP) that the model may use, or off (default: mcp.json beside catalogue.toml).",
            metavar="FILE",
            panel="Tools",
        ),
    ] = None
    allow_tools: Annotated[
        str | None,
        option(
            "--allow-tools",
            help="Tools that run without a question, by name, with commas; read_* stands for all that begin so.",
            metavar="NAMES",
            panel="Tools",
        ),
    ] = None
