"""``make base``: download the pinned sources, build corpus and tokenizer, pre-train, pass the gate, write the checkpoint. Resumable.

Each step leaves a file in the working directory; a step whose file exists is skipped, and pre-training continues from its last save.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

import torch
from tokenizers import Tokenizer

from strop.agent.compact import CHAT_TEMPLATE, SPECIAL_TOKENS, content_tokenizer
from strop.core.errors import StropError
from strop.midtrain.base.corpus import Module, build_corpus, read_corpus
from strop.midtrain.base.documents import DocumentMaker
from strop.midtrain.base.gate import copy_accuracy, heldout_loss, repair_accuracy
from strop.midtrain.base.pretrain import TINY, PretrainConfig, describe, pretrain
from strop.midtrain.base.tokenizer import train_tokenizer
from strop.model.checkpoint import save_checkpoint
from strop.model.decoder import Decoder

TOKENIZER_DOCUMENTS = 6000
TEXT_KINDS = ("repair", "repair", "repair", "episode", "code")
GATE_SEED = 1
COPY_BAR = 0.98
DOWNLOAD_BATCH = 16


class TextCollector:
    """Stands in for a tokenizer while there is none: keeps the texts of documents, to train one on."""

    encode_special_tokens = True

    def __init__(self) -> None:
        self.texts: list[str] = []

    def encode(self, text: str, add_special_tokens: bool = False) -> TextCollector:
        """Keep ``text``."""
        self.texts.append(text)
        return self

    @property
    def ids(self) -> list[int]:
        """One id stands for any text."""
        return [len(SPECIAL_TOKENS)]


def download(directory: Path) -> None:
    """Download the pinned wheels that aren't there.

    Raises:
        StropError: A wheel can't be had; names it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    lines = resources.files("strop.midtrain.base").joinpath("sources.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    have = {"==".join(path.name.split("-")[:2]).replace("_", "-").lower() for path in directory.glob("*.whl")}
    missing = [pin for pin in pins if pin.lower() not in have]
    for start in range(0, len(missing), DOWNLOAD_BATCH):
        pins = missing[start : start + DOWNLOAD_BATCH]
        print(f"downloading {start + 1}-{start + len(pins)} of {len(missing)}", flush=True)
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "-d", str(directory), *pins]
        if subprocess.run(command, check=False).returncode:
            raise StropError(
                f"one of {', '.join(pins)} can't be downloaded (pip says which, above); "
                "try again, or take it out of src/strop/midtrain/base/sources.txt"
            )


def make_tokenizer(modules: list[Module], path: Path) -> Tokenizer:
    """Train the tokenizer on texts of the documents, or read it if it was."""
    if path.exists():
        return Tokenizer.from_file(str(path))
    collector = TextCollector()
    maker = DocumentMaker(modules, collector, seed=123)  # type: ignore[arg-type]
    for index in range(TOKENIZER_DOCUMENTS):
        maker.make(index, TEXT_KINDS[index % len(TEXT_KINDS)])
    tokenizer = train_tokenizer(collector.texts, TINY.vocab_size)
    tokenizer.save(str(path))
    return tokenizer


def decoder_of(weights: Mapping[str, torch.Tensor]) -> Decoder:
    """Return a plain torch decoder with ``weights``."""
    decoder = Decoder(TINY)
    decoder.load_state_dict({"lm_head.weight": weights["model.embed_tokens.weight"], **weights})
    return decoder.eval()


def run_gate(model: Decoder, heldout: list[Module], tokenizer: Tokenizer, cases: int) -> dict[str, dict[str, float]]:
    """Return the gate's figures on held-out modules."""
    maker = DocumentMaker(heldout, content_tokenizer(tokenizer), GATE_SEED)
    return {
        "repair": repair_accuracy(model, maker, cases),
        "copy": copy_accuracy(model, maker, cases // 2),
        "loss": heldout_loss(model, maker, cases // 2),
    }


def write_tokenizer_files(tokenizer: Tokenizer, directory: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` as transformers and vLLM read them."""
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[1],
        "eos_token": SPECIAL_TOKENS[2],
        "pad_token": SPECIAL_TOKENS[0],
        "clean_up_tokenization_spaces": False,
        "model_max_length": TINY.max_positions,
        "chat_template": CHAT_TEMPLATE,
        "strop_chat_format": "compact",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def build(work: Path, out: Path, config: PretrainConfig, *, deadline_s: float | None, gate_cases: int) -> dict[str, dict[str, float]]:
    """Do everything that isn't done and return the gate's figures."""
    work.mkdir(parents=True, exist_ok=True)
    corpus = work / "code.jsonl.zst"
    if not corpus.exists():
        download(work / "wheels")
        print(f"corpus: {build_corpus(work / 'wheels', corpus)}", flush=True)
    sources, modules = read_corpus(corpus)
    tokenizer = make_tokenizer(modules, work / "tokenizer.json")
    trainer = pretrain(config, modules, tokenizer, work, deadline_s=deadline_s)
    _, heldout = read_corpus(corpus.with_name(corpus.name + ".heldout"))
    weights = trainer.model.weights()
    figures = run_gate(decoder_of(weights), heldout, tokenizer, gate_cases)
    staging = work / "tokenizer_files"
    staging.mkdir(exist_ok=True)
    write_tokenizer_files(tokenizer, staging)
    save_checkpoint(out, TINY, weights, tokenizer_from=staging)
    card = {"gate": figures, "settings": describe(config), "tokens": trainer.tokens, "sources": sources}
    (out / "base_card.json").write_text(json.dumps(card, indent=1) + "\n", encoding="utf-8")
    return figures


def main() -> None:
    """Command line of ``python -m strop.midtrain.base.build``."""
    parser = argparse.ArgumentParser(description="Build the tiny base that ships with strop.")
    parser.add_argument("--work", type=Path, default=Path("build/base"), help="working directory, kept for resuming")
    parser.add_argument("--out", type=Path, default=Path("src/strop/assets/models/tiny"), help="checkpoint directory")
    parser.add_argument("--tokens", type=int, default=PretrainConfig().total_tokens, help="length of pre-training")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=None, help="stop pre-training after so many minutes (resumable)")
    parser.add_argument("--gate-cases", type=int, default=400)
    options = parser.parse_args()
    config = PretrainConfig(total_tokens=options.tokens, threads=options.threads)
    deadline_s = None if options.minutes is None else 60 * options.minutes
    figures = build(options.work, options.out, config, deadline_s=deadline_s, gate_cases=options.gate_cases)
    for name, values in figures.items():
        print(f"{name}: " + ", ".join(f"{key} {value:.3f}" for key, value in sorted(values.items())))
    worst = min(figures["copy"].values())
    print(f"copy gate ({COPY_BAR:.0%} of arguments exact): {'passed' if worst >= COPY_BAR else 'missed'}, worst {worst:.3f}")


if __name__ == "__main__":
    main()
