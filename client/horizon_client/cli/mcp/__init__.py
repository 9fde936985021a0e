"""`horizon mcp`: tools for AI assistants, over the Model Context Protocol. The command is `command`, what it serves
`server`; tools that look are in `reading`, tools that change something in `writing`."""
