"""One API request as generation: its prompts, its answers piece by piece, its usage."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from strop.core.episode import EpisodeKey
from strop.production.chat import ChatCodec
from strop.production.protocol import MAX_CHOICES, ApiError, ChatRequest, CompletionRequest, normalise_messages, normalise_tools
from strop.production.served import ServedModel

_PIECE_WITH_STOPS = 8
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what an incomplete character decodes to


@dataclass(frozen=True, slots=True)
class Result:
    """One finished choice.

    Attributes:
        index: Its number.
        token_ids: Tokens of the answer, the stop token included.
        text: Answer as text.
        finish_reason: ``"stop"``, ``"length"`` or ``"tool_calls"``.
        message: OpenAI message, for chat.
        logprobs: ``float32``, one for each token, if asked for.
        tokens: Text of each token, if log-probabilities were asked for.
    """

    index: int
    token_ids: list[int]
    text: str
    finish_reason: str
    message: dict[str, Any] | None = None
    logprobs: np.ndarray | None = None
    tokens: list[str] = field(default_factory=list)

    def chat_logprobs(self) -> dict[str, Any] | None:
        """In the chat format."""
        return None if self.logprobs is None else {"content": _token_entries(self.tokens, self.logprobs), "refusal": None}

    def completion_logprobs(self) -> dict[str, Any] | None:
        """In the older format."""
        if self.logprobs is None:
            return None
        return _completion_entries(self.tokens, self.logprobs, 0)


def _token_entries(tokens: Sequence[str], logprobs: np.ndarray) -> list[dict[str, Any]]:
    return [
        {"token": token, "logprob": float(value), "bytes": list(token.encode("utf-8", "replace")), "top_logprobs": []}
        for token, value in zip(tokens, logprobs, strict=True)
    ]


def _completion_entries(tokens: Sequence[str], logprobs: np.ndarray, start: int) -> dict[str, Any]:
    """Entries of tokens whose text begins at ``start`` of the answer."""
    offsets = np.cumsum([start, *(len(token) for token in tokens[:-1])]).tolist()
    return {"tokens": list(tokens), "token_logprobs": [float(x) for x in logprobs], "top_logprobs": None, "text_offset": offsets}


@dataclass(frozen=True, slots=True)
class _Delta:
    """What a choice has new; ``result`` marks its end."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: np.ndarray | None
    result: Result | None = None


class Generator:
    """Makes jobs out of requests.

    Args:
        served: The model.
    """

    def __init__(self, served: ServedModel) -> None:
        self.served = served
        self.codec = ChatCodec(served.renderer)

    def chat(self, request: ChatRequest) -> Job:
        """Job of a chat request.

        Raises:
            ApiError: The conversation can't be rendered or doesn't fit.
        """
        tools = normalise_tools(request.tools)
        messages = normalise_messages(request.messages)
        ids = self.codec.prompt_ids(messages, tools)
        limit = request.max_completion_tokens or request.max_tokens
        callable_tools = tools if request.tool_choice != "none" else []
        return Job(
            self, request, [ids], limit, messages=messages, rendered_tools=tools, tools=callable_tools, want_logprobs=request.logprobs
        )

    def completion(self, request: CompletionRequest) -> Job:
        """Job of a completion request.

        Raises:
            ApiError: A prompt is empty, doesn't fit or holds an unknown token.
        """
        prompt: Any = request.prompt
        several = prompt if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else [prompt]
        if len(several) * request.n > MAX_CHOICES:
            raise ApiError(
                f"{len(several)} prompts with n = {request.n} ask for {len(several) * request.n} answers; one request may ask for "
                f"{MAX_CHOICES}",
                param="prompt",
                code="invalid_value",
            )
        prompts = [self.served.encode(one) if isinstance(one, str) else [int(token) for token in one] for one in several]
        for token in (token for ids in prompts for token in ids):
            if not 0 <= token < self.served.vocab_size:
                raise ApiError(
                    f"token id {token} is outside the vocabulary [0, {self.served.vocab_size})", param="prompt", code="invalid_value"
                )
        return Job(self, request, prompts, request.max_tokens, want_logprobs=request.logprobs is not None)


class Job:
    """The generation of one request; made by ``Generator``.

    Args:
        generator: Its maker.
        request: What the client asked for.
        prompts: Token ids; each gets ``request.n`` answers.
        limit: Most tokens to sample, or ``None`` for what the context leaves.
        messages: The conversation; ``None`` for a completion.
        rendered_tools: Tools that are part of the prompt.
        tools: Tools that may be called.
        want_logprobs: Keep log-probabilities.

    Raises:
        ApiError: A prompt is empty or doesn't fit the context.
    """

    def __init__(
        self,
        generator: Generator,
        request: ChatRequest | CompletionRequest,
        prompts: list[list[int]],
        limit: int | None,
        *,
        messages: list[dict[str, Any]] | None = None,
        rendered_tools: Sequence[dict[str, Any]] = (),
        tools: Sequence[dict[str, Any]] = (),
        want_logprobs: bool = False,
    ) -> None:
        self._served, self._codec, self._request = generator.served, generator.codec, request
        self._prompts, self._messages, self._rendered_tools, self._tools = prompts, messages, rendered_tools, tools
        self._want_logprobs = want_logprobs
        self._seed = f"seed-{request.seed}" if request.seed is not None else uuid.uuid4().hex
        self._limits = [
            _limit(len(ids), limit, self._served.max_tokens, "messages" if messages is not None else "prompt") for ids in prompts
        ]
        self._sampled: dict[int, int] = {}
        self._cached = 0
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self) -> list[Result]:
        """All answers in order of their index."""
        results: list[Result] = []
        async for delta in self._deltas(self._piece):
            if delta.result is not None:
                results.append(delta.result)
        return sorted(results, key=lambda result: result.index)

    def usage(self) -> dict[str, Any]:
        """Token counts, complete when all answers are."""
        prompt, sampled = sum(len(ids) for ids in self._prompts), sum(self._sampled.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": sampled,
            "total_tokens": prompt + sampled,
            "prompt_tokens_details": {"cached_tokens": min(self._cached, prompt)},
        }

    async def close(self) -> None:
        """Cancel what still runs."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def stream_chat(self, common: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Chunks of a chat answer. Where a tool may be called, the answer comes in one piece: only its end tells whether it is a call."""
        for index in range(self._request.n):
            yield self._chunk(common, {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None})
        async for delta in self._deltas(self._piece if self._tools else 1):
            result = delta.result
            content: dict[str, Any] = {"content": delta.text} if delta.text or delta.logprobs is not None else {}
            if self._tools and result is None:
                continue
            if result is not None and result.message is not None and self._tools:
                calls = [{"index": i, **call} for i, call in enumerate(result.message.get("tool_calls", []))]
                content = {"content": result.message["content"], **({"tool_calls": calls} if calls else {})}
            if content:
                choice: dict[str, Any] = {"index": delta.index, "delta": content, "finish_reason": None}
                if result is not None and self._tools and self._want_logprobs:
                    choice["logprobs"] = result.chat_logprobs()  # of all pieces: those before were held back
                elif delta.logprobs is not None:
                    tokens = [self._codec.decode([token]) for token in delta.token_ids]
                    choice["logprobs"] = {"content": _token_entries(tokens, delta.logprobs), "refusal": None}
                yield self._chunk(common, choice)
            if result is not None:
                yield self._chunk(common, {"index": delta.index, "delta": {}, "finish_reason": result.finish_reason})
        for chunk in self._last_chunk(common):
            yield chunk

    async def stream_completion(self, common: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Chunks of a completion. With log-probabilities a token has its chunk even where its text must wait for the next."""
        starts: dict[int, int] = {}
        async for delta in self._deltas(1):
            reason = delta.result.finish_reason if delta.result is not None else None
            entries = None
            if delta.logprobs is not None:
                tokens = [self._codec.decode([token]) for token in delta.token_ids]
                start = starts.get(delta.index, 0)
                entries = _completion_entries(tokens, delta.logprobs, start)
                starts[delta.index] = start + sum(map(len, tokens))
            if delta.text or reason or entries is not None:
                yield self._chunk(common, {"index": delta.index, "text": delta.text, "finish_reason": reason, "logprobs": entries})
        for chunk in self._last_chunk(common):
            yield chunk

    def _chunk(self, common: dict[str, Any], choice: dict[str, Any]) -> dict[str, Any]:
        chunk = {**common, "choices": [choice]}
        return {**chunk, "usage": None} if self._wants_usage else chunk

    def _last_chunk(self, common: dict[str, Any]) -> list[dict[str, Any]]:
        return [{**common, "choices": [], "usage": self.usage()}] if self._wants_usage else []

    @property
    def _piece(self) -> int:
        """Tokens between two looks at the text."""
        return _PIECE_WITH_STOPS if self._request.stops else self._served.max_tokens

    @property
    def _wants_usage(self) -> bool:
        return bool((self._request.stream_options or {}).get("include_usage"))

    async def _deltas(self, size: int) -> AsyncIterator[_Delta]:
        """All choices at once, each as soon as it has something new; ``size`` is the most tokens between two deltas of a choice."""
        queue: asyncio.Queue[_Delta | BaseException] = asyncio.Queue()
        count = len(self._prompts) * self._request.n
        self._tasks = [asyncio.ensure_future(self._produce(index, size, queue)) for index in range(count)]
        try:
            while count:
                item = await queue.get()
                if isinstance(item, BaseException):
                    raise item
                count -= item.result is not None
                yield item
        finally:
            await self.close()

    async def _produce(self, index: int, size: int, queue: asyncio.Queue[_Delta | BaseException]) -> None:
        try:
            async with contextlib.aclosing(self._choice(index, size)) as deltas:
                async for delta in deltas:
                    queue.put_nowait(delta)
        except BaseException as error:
            queue.put_nowait(error)  # the reader raises it
            if isinstance(error, asyncio.CancelledError):
                raise

    async def _choice(self, index: int, size: int) -> AsyncGenerator[_Delta, None]:
        request, codec = self._request, self._codec
        prompt, limit = self._prompts[index // request.n], self._limits[index // request.n]
        session = await self._served.engine.open(EpisodeKey(phase="serve", step=0, task_id=self._seed, sample=index))
        try:
            ids: list[int] = []
            new_ids, sent = prompt, 0
            while True:
                before = len(ids)
                generation = await session.generate(
                    new_ids, max_new_tokens=min(size, limit - before), stop_ids=codec.stop_ids, temperature=request.sampling_temperature
                )
                new_ids = []
                ids += generation.token_ids.tolist()
                self._sampled[index] = len(ids)
                reason = generation.finish_reason if generation.finish_reason == "stop" or len(ids) == limit else ""
                text = codec.text(ids)
                stopped_at = min((at for at in map(text.find, request.stops) if at >= 0), default=-1)
                if reason or stopped_at >= 0:
                    break
                end = _safe_end(text, request.stops)
                yield _Delta(index, text[sent:end], ids[before:], self._logprobs(session, len(ids) - before))
                sent = max(sent, end)
            self._cached += getattr(session, "cached_tokens", 0) if index % request.n == 0 else 0
            result = self._finish(index, ids, reason, text, stopped_at, self._logprobs(session, len(ids)))
            last = None if result.logprobs is None else result.logprobs[before:]
            yield _Delta(index, result.text[sent:], result.token_ids[before:], last, result)
        finally:
            await session.close()

    def _logprobs(self, session: Any, count: int) -> np.ndarray | None:
        return session.trace().logprobs[-count:] if self._want_logprobs else None

    def _finish(self, index: int, ids: list[int], reason: str, text: str, stopped_at: int, logprobs: np.ndarray | None) -> Result:
        codec = self._codec
        if stopped_at >= 0:
            while len(ids) > 1 and any(stop in codec.text(ids[:-1]) for stop in self._request.stops):
                ids = ids[:-1]  # a piece may reach beyond the stop text
            text, reason = text[:stopped_at], "stop"
            self._sampled[index] = len(ids)
            logprobs = None if logprobs is None else logprobs[: len(ids)]
        message = None
        if self._messages is not None:
            answer = codec.answer(ids, reason, self._tools, text=text if stopped_at >= 0 else None)
            message, reason = answer.message, answer.finish_reason
            if stopped_at < 0:
                codec.remember(self._messages, self._rendered_tools, answer, [*self._prompts[index // self._request.n], *ids])
        tokens = [codec.decode([token]) for token in ids] if logprobs is not None else []
        return Result(index, ids, text, reason, message, logprobs, tokens)


def _limit(prompt: int, limit: int | None, context: int, param: str) -> int:
    if not prompt:
        raise ApiError("the prompt has no tokens", param=param, code="invalid_value")
    wanted = 1 if limit is None else limit
    if prompt + wanted > context:
        raise ApiError(
            f"this model's context length is {context} tokens; the request has {prompt} in the prompt and {wanted} for the answer",
            param=param,
            code="context_length_exceeded",
        )
    return context - prompt if limit is None else limit


def _safe_end(text: str, stops: Sequence[str]) -> int:
    """Return how much of ``text`` later tokens can't change: not an incomplete character, not the beginning of a stop text."""
    end = len(text)
    while end and text[end - 1] == _REPLACEMENT:
        end -= 1
    for stop in stops:
        for size in range(min(len(stop) - 1, end), 0, -1):
            if text[:end].endswith(stop[:size]):
                end -= size
                break
    return end
