"""Trains the tiny base's tokenizer: byte-level BPE on code, made for copying.

Every number of up to three digits is one token, so a line number below 1000 is copied by copying one token. Spaces and punctuation never
merge with words, so a name has the same tokens wherever it stands (after a space, a bracket, or as an argument of a call).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from strop.agent.compact import SPECIAL_TOKENS

DIGITS = "0123456789"
PIECES = r"[A-Za-z_]+|[^A-Za-z_\p{N}]+"
"""Words, and runs of everything that is neither word nor number; merges stay inside a piece."""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Return a tokenizer with exactly ``vocab_size`` tokens.

    Args:
        texts: Training texts in the formats that the model will see.
        vocab_size: At least 1,600: 8 special tokens, 256 bytes, 1,100 numbers, the rest merges.

    Raises:
        ValueError: If ``vocab_size`` is too small or the texts too few.
    """
    if vocab_size < 1600:
        raise ValueError(f"vocab_size = {vocab_size}; at least 1600 is needed for bytes and numbers")
    number_tokens = [a + b for a, b in itertools.product(DIGITS, DIGITS)]
    number_tokens += ["".join(t) for t in itertools.product(DIGITS, DIGITS, DIGITS)]
    tokenizer = Tokenizer(models.BPE())
    # Single digits while training, so that no merge is spent on numbers; they're added below.
    tokenizer.pre_tokenizer = _pieces(r"\p{N}")
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(number_tokens),
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    state = json.loads(tokenizer.to_str())
    vocab, merges = state["model"]["vocab"], state["model"]["merges"]
    for token in number_tokens:
        vocab[token] = len(vocab)
    merges += [[a, b] for a, b in itertools.product(DIGITS, DIGITS)]
    # Both ways to reach three digits: which pair of digits merges first depends on rank, not on position.
    merges += [[a + b, c] for a, b, c in itertools.product(DIGITS, DIGITS, DIGITS)]
    merges += [[a, b + c] for a, b, c in itertools.product(DIGITS, DIGITS, DIGITS)]
    if len(vocab) != vocab_size:
        raise ValueError(f"the texts give only {len(vocab)} of {vocab_size} tokens; use more text")
    result = Tokenizer.from_str(json.dumps(state))
    result.pre_tokenizer = _pieces(r"\p{N}{1,3}")
    result.decoder = decoders.ByteLevel()
    return result


def _pieces(number: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(f"{number}|{PIECES}"), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
