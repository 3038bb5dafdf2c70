"""Turns the expert's episodes into streams to learn from, with names replaced per episode.

Only what the agent samples is learned. A wrong edit is context, not a target: its arguments carry no loss, so that exploring teaches
undoing and going on, not the wrong repair.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer

from strop.agent.toolspec import TOOL_NAMES, usage_line
from strop.core.episode import Episode, EpisodeKey, Trace, VersionSpan
from strop.core.sample import Sample
from strop.core.task import Task
from strop.midtrain.base.documents import EDIT_WEIGHT
from strop.midtrain.base.names import NameMaker
from strop.midtrain.base.writer import Document, StreamWriter
from strop.tasks.mutation import Edit


def rewrite_episode(
    episode: Episode,
    task: Task,
    gold: Edit,
    *,
    function: str,
    tokenizer: Tokenizer,
    names: NameMaker,
    rng: np.random.Generator,
    rename: float,
    drop_system_prompt: float,
) -> Document:
    """Return the episode as a stream, its function renamed with probability ``rename``.

    Args:
        episode: A finished scripted episode (its turns are used, not its tokens).
        task: Its task.
        gold: The repair; any other ``edit`` is context only.
        function: Name of the function under repair.
        tokenizer: From ``content_tokenizer``.
        names: Where new names come from.
        rng: Decides.
        rename: Probability of a new name.
        drop_system_prompt: Probability of leaving the system prompt out.
    """
    old = function.split(".")[-1]
    new = names.make(rng) if not old.startswith("__") and rng.random() < rename else old
    pattern = re.compile(rf"\b{re.escape(old)}\b")

    def renamed(text: str) -> str:
        return pattern.sub(new, text)

    writer = StreamWriter(tokenizer, rng, observed_weight=0.0, observed_share=0.0)
    system = None if rng.random() < drop_system_prompt else usage_line(task.tools or TOOL_NAMES)
    writer.start(renamed(task.instruction), system)
    for index, turn in enumerate(episode.turns):
        args = [renamed(value) for value in turn.arguments.values()]
        is_wrong = turn.call == "edit" and list(turn.arguments.values())[1:] != [gold.old, str(gold.line), gold.new]
        writer.act(turn.call, args, learned=0 if is_wrong else None, emphasis=EDIT_WEIGHT if turn.call == "edit" else 1.0)
        if index + 1 < len(episode.turns):
            writer.observe(renamed(turn.observation))
    return writer.finish()


def as_sample(document: Document, key: EpisodeKey) -> Sample:
    """Return a document as a supervised sample: the loss weights take the place of the advantage."""
    length = len(document)
    learned = document.weights > 0
    trace = Trace(
        token_ids=document.token_ids.copy(),
        loss_mask=learned,
        logprobs=np.zeros(length, np.float32),
        versions=(VersionSpan(start=0, end=length, version=0),),
    )
    return Sample(key=key, trace=trace, advantage=document.weights.copy())


def batches(documents: Sequence[Document], *, batch_tokens: int, epochs: int, rng: np.random.Generator) -> list[list[int]]:
    """Return indexes of the documents of each step: shuffled, of similar length within a step, about ``batch_tokens`` tokens each.

    Sorting happens inside blocks of eight steps, so that the order over training stays random.
    """
    steps: list[list[int]] = []
    for _ in range(epochs):
        order = rng.permutation(len(documents)).tolist()
        lengths = [len(d) for d in documents]
        block = max(1, round(8 * batch_tokens / (sum(lengths) / len(lengths))))
        cut: list[list[int]] = []
        for start in range(0, len(order), block):
            current: list[int] = []
            for index in sorted(order[start : start + block], key=lambda i: lengths[i]):
                current.append(index)
                if sum(lengths[i] for i in current) >= batch_tokens:
                    cut.append(current)
                    current = []
            if current:
                cut.append(current)
        steps += [cut[i] for i in rng.permutation(len(cut))]
    return steps
