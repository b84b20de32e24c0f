"""What of a chat's output is reasoning, calls of tools, and content, by each family's own form."""
