"""A checkpoint made ready to serve: engine, chat format, tokenizer and limits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from strop.agent.render import ActionRenderer, renderer_for
from strop.core.config import EngineConfig, RunConfig
from strop.core.errors import CheckpointError, EngineError
from strop.ports import Engine


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """What the server needs.

    Attributes:
        name: What clients call it.
        engine: Generates tokens.
        renderer: Chat format.
        encode: Plain text to tokens, for ``/v1/completions``; special tokens that are spelled out are read as such.
        max_tokens: Context length.
        vocab_size: Token ids lie in ``[0, vocab_size)``.
        check: Raises ``EngineError`` if the engine can't work any more.
    """

    name: str
    engine: Engine
    renderer: ActionRenderer
    encode: Callable[[str], list[int]]
    max_tokens: int
    vocab_size: int
    check: Callable[[], None] = lambda: None

    def problem(self) -> str:
        """Why nothing can be generated, or an empty text."""
        try:
            self.check()
        except EngineError as error:
            return str(error)
        return ""


def load_served_model(
    checkpoint_dir: str | Path, *, name: str | None = None, config: EngineConfig | None = None, seed: int = 0, threads: int = 0
) -> ServedModel:
    """Load a checkpoint into the embedded engine.

    Args:
        checkpoint_dir: Hugging Face layout with ``tokenizer.json``.
        name: By default the directory's name.
        config: Engine sizes.
        seed: Seed of the engine.
        threads: CPU threads; 0 means all.

    Raises:
        CheckpointError: Missing or damaged files, or another model family.
    """
    from strop.engine.embedded import EmbeddedEngine
    from strop.model.checkpoint import load_checkpoint
    from strop.model.inference import InferenceModel

    folder = Path(checkpoint_dir)
    if not folder.is_dir():
        raise CheckpointError(f"checkpoint {str(folder)!r} is not a directory")
    shape, weights = load_checkpoint(folder)
    renderer = renderer_for(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    if tokenizer.get_vocab_size() > shape.vocab_size:
        raise CheckpointError(f"{folder}: the tokenizer has {tokenizer.get_vocab_size()} tokens, the model {shape.vocab_size}")
    wanted = config or RunConfig().engine
    engine_config = wanted.model_copy(update={"max_tokens": min(wanted.max_tokens, shape.max_positions)})
    engine = EmbeddedEngine(engine_config, InferenceModel(shape, weights, threads=threads), seed=seed)
    return ServedModel(
        name=name or folder.resolve().name,
        engine=engine,
        renderer=renderer,
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
        max_tokens=engine_config.max_tokens,
        vocab_size=shape.vocab_size,
        check=engine.check_alive,
    )
