"""One episode: the loop, the tools, and prompts that are token-exact."""
