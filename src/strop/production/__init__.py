"""From checkpoint to users: the promotion gate, the pointer to the served model, and the OpenAI-compatible server."""
