"""``strop serve``: the OpenAI-compatible server over a run's promoted model or a checkpoint."""

from __future__ import annotations

import socket
from pathlib import Path

from strop.cli.models import find_model
from strop.cli.registry import resolve
from strop.core.errors import ConfigError


def serve_model(model: Path, host: str, port: int) -> int:
    """Serve until stopped.

    Raises:
        ConfigError: The address can't be used.
        CheckpointError: No model there, or a damaged one.
    """
    checkpoint = find_model(model)
    listener = _listen(host, port)
    app = resolve("strop.production.server:create_app", "the server")(checkpoint)
    import uvicorn

    address = f"http://{host}:{listener.getsockname()[1]}/v1"
    print(f"serving {checkpoint}\nOpenAI base URL: {address} (any API key); stop with Ctrl-C", flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])
    return 0


def _listen(host: str, port: int) -> socket.socket:
    """Bind before the model is loaded, so that a taken port is said at once."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(128)
    except OSError as error:
        raise ConfigError(f"can't listen on {host}:{port}: {error.strerror or error}; choose another --port or --host") from None
    return listener
