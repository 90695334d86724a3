"""A tool server of MCP's own SDK for tests: `python tool_server.py` at its standard streams, with a PORT over HTTP."""

import base64
import os
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve()


def serve(port: int | None) -> None:
    """Serve until the input ends, or for ever at a port."""
    from mcp.server.mcpserver import Image, MCPServer

    server = MCPServer("tests", log_level="ERROR")
    png = base64.b64decode("iVBORw0KGgo=")

    @server.tool()
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    @server.tool()
    def wait(seconds: float) -> str:
        """Wait, then say so; the file WAITS in the environment is there meanwhile."""
        if waits := os.environ.get("WAITS"):
            Path(waits).touch()
        time.sleep(seconds)
        return "waited"

    @server.tool()
    def die() -> str:
        """End the server."""
        sys.stderr.write("out of order\n")
        sys.stderr.flush()
        os._exit(3)

    @server.tool()
    def huge(n: int) -> str:
        """Return n letters."""
        return "x" * n

    @server.tool()
    def picture() -> list[str | Image]:
        """Return a picture and a word."""
        return ["seen", Image(data=png, format="png")]

    @server.tool()
    def variable(name: str) -> str:
        """Return a variable of the environment."""
        return os.environ.get(name, "unset")

    if port is None:
        server.run("stdio")
    else:
        server.run("streamable-http", port=port)


if __name__ == "__main__":
    serve(int(sys.argv[1]) if len(sys.argv) > 1 else None)
