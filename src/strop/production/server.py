"""The OpenAI-compatible server over an engine: models, chat with tools, completions, streaming.

Requests share the engine's continuous batching. A client that goes away cancels its generation.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import time
import uuid
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from strop.core.config import EngineConfig
from strop.core.errors import CheckpointError, ConfigError, EngineError, nearest
from strop.production.generation import Generator, Result
from strop.production.protocol import ApiError, ChatRequest, CompletionRequest, read_request
from strop.production.served import ServedModel, load_served_model

MAX_BODY_BYTES = 8 << 20


def create_app(
    checkpoint_dir: str | Path | None = None,
    *,
    served: ServedModel | None = None,
    model_name: str | None = None,
    config: EngineConfig | None = None,
    seed: int = 0,
    threads: int = 0,
    api_key: str | None = None,
) -> FastAPI:
    """Build the application.

    Args:
        checkpoint_dir: Hugging Face layout with tokenizer and chat format.
        served: A model that is already loaded, instead of ``checkpoint_dir``; the application closes its engine.
        model_name: What clients call it; by default the directory's name.
        config: Sessions and context of the engine.
        seed: Seed of requests, together with their own.
        threads: CPU threads of the model; 0 means all.
        api_key: Demand this bearer token.

    Raises:
        CheckpointError: The checkpoint can't be served.
    """
    if served is None:
        if checkpoint_dir is None:
            raise CheckpointError("create_app needs a checkpoint directory or a loaded model")
        served = load_served_model(checkpoint_dir, name=model_name, config=config, seed=seed, threads=threads)
    model = served

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await model.engine.close()

    app = FastAPI(title="strop", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    server = _Server(model, api_key)
    app.add_api_route("/health", server.health, methods=["GET"])
    app.add_api_route("/v1/models", server.models, methods=["GET"])
    app.add_api_route("/v1/models/{name:path}", server.model, methods=["GET"])
    app.add_api_route("/v1/chat/completions", server.chat, methods=["POST"])
    app.add_api_route("/v1/completions", server.completions, methods=["POST"])
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(EngineError, _engine_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unexpected_error)
    return app


def serve(checkpoint_dir: str | Path, host: str = "127.0.0.1", port: int = 8000, **options: Any) -> None:
    """Serve a checkpoint until interrupted; ``options`` as in ``create_app``.

    Raises:
        CheckpointError: The checkpoint can't be served.
        ConfigError: The address can't be used.
    """
    import socket

    import uvicorn

    app = create_app(checkpoint_dir, **options)
    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=2048)
    except OSError as error:
        raise ConfigError(f"can't listen on {host}:{port}: {error.strerror or error}. Choose another --port (0 takes a free one)") from None
    with listener:
        uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5)).run(sockets=[listener])


class _Server:
    """The endpoints."""

    def __init__(self, served: ServedModel, api_key: str | None) -> None:
        self._served = served
        self._api_key = api_key
        self._generator = Generator(served)
        self._created = int(time.time())

    async def health(self) -> Response:
        problem = self._served.problem()
        body = {"status": "ok" if not problem else "broken", "model": self._served.name, "problem": problem}
        return JSONResponse(body, status_code=503 if problem else 200)

    async def models(self, request: Request) -> Response:
        self._authorise(request)
        return JSONResponse({"object": "list", "data": [self._model_card()]})

    async def model(self, request: Request, name: str) -> Response:
        self._authorise(request)
        self._check_model(name)
        return JSONResponse(self._model_card())

    async def chat(self, request: Request) -> Response:
        self._authorise(request)
        body: ChatRequest = read_request(ChatRequest, await _body(request))
        self._check_model(body.model)
        job = self._generator.chat(body)
        common = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": self._served.name}
        if body.stream:
            first = {"object": "chat.completion.chunk", **common}
            return _event_stream(job.stream_chat(first), job)
        results = await _unless_disconnected(request, job.run())
        choices = [_chat_choice(result) for result in results]
        return JSONResponse({"object": "chat.completion", **common, "choices": choices, "usage": job.usage()})

    async def completions(self, request: Request) -> Response:
        self._authorise(request)
        body: CompletionRequest = read_request(CompletionRequest, await _body(request))
        self._check_model(body.model)
        job = self._generator.completion(body)
        common = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time()), "model": self._served.name}
        if body.stream:
            return _event_stream(job.stream_completion(common), job)
        results = await _unless_disconnected(request, job.run())
        choices = [
            {"index": r.index, "text": r.text, "finish_reason": r.finish_reason, "logprobs": r.completion_logprobs()} for r in results
        ]
        return JSONResponse({**common, "choices": choices, "usage": job.usage()})

    def _model_card(self) -> dict[str, Any]:
        return {
            "id": self._served.name,
            "object": "model",
            "created": self._created,
            "owned_by": "strop",
            "max_model_len": self._served.max_tokens,
        }

    def _check_model(self, name: str) -> None:
        if name != self._served.name:
            hint = nearest(name, [self._served.name])
            raise ApiError(f"the model {name!r} does not exist.{hint}", status=404, param="model", code="model_not_found")

    def _authorise(self, request: Request) -> None:
        if self._api_key is None:
            return
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), self._api_key.encode()):
            raise ApiError("wrong or missing API key", status=401, code="invalid_api_key", kind="authentication_error")


def _chat_choice(result: Result) -> dict[str, Any]:
    message = result.message
    assert message is not None
    return {"index": result.index, "message": message, "finish_reason": result.finish_reason, "logprobs": result.chat_logprobs()}


async def _body(request: Request) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise ApiError(f"the body is larger than {MAX_BODY_BYTES >> 20} MiB", status=413)
        parts.append(part)
    return b"".join(parts)


async def _unless_disconnected(request: Request, work: Coroutine[Any, Any, list[Result]]) -> list[Result]:
    """Await ``work``, but cancel it when the client goes away."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError("the client went away", status=499, kind="cancelled")
        return task.result()
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _event_stream(events: AsyncIterator[dict[str, Any]], job: Any) -> Response:
    async def lines() -> AsyncIterator[str]:
        try:
            async for event in events:
                yield f"data: {json.dumps(event, ensure_ascii=False)}\n\n"
        except (EngineError, ApiError) as error:
            # The status line is out already; the client libraries raise on an event with an error.
            answer = error if isinstance(error, ApiError) else _as_api_error(error)
            yield f"data: {json.dumps(answer.body())}\n\n"
        else:
            yield "data: [DONE]\n\n"
        finally:
            await job.close()

    return StreamingResponse(lines(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


def _as_api_error(error: EngineError) -> ApiError:
    if error.retryable:
        return ApiError(str(error), status=503, kind="overloaded_error")
    return ApiError(str(error), status=500, kind="server_error")


async def _api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body(), status_code=error.status)


async def _engine_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, EngineError)
    return await _api_error(request, _as_api_error(error))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    known = "/v1/models, /v1/chat/completions, /v1/completions, /health"
    message = f"{request.method} {request.url.path}: {error.detail}. Known: {known}"
    return await _api_error(request, ApiError(message, status=error.status_code))


async def _unexpected_error(request: Request, error: Exception) -> Response:
    return await _api_error(request, ApiError(f"internal error: {type(error).__name__}", status=500, kind="server_error"))
