"""Tools of other programs that a chat's model may call: servers of the Model Context Protocol (MCP)."""
