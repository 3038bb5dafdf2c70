"""The wired start of the base: before any step it already copies and points better than chance, and an unwired one doesn't."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from base_kit import own_modules

from strop.agent.compact import content_tokenizer
from strop.midtrain.base.build import TEXT_KINDS, TextCollector
from strop.midtrain.base.documents import DocumentMaker
from strop.midtrain.base.pretrain import TINY, pack
from strop.midtrain.base.tokenizer import train_tokenizer
from strop.midtrain.base.wiring import wire
from strop.model.decoder import Decoder


@pytest.fixture(scope="module")
def maker() -> DocumentMaker:
    collector = TextCollector()
    modules = own_modules()
    texts = DocumentMaker(modules, collector, seed=5)  # type: ignore[arg-type]
    for index in range(300):
        texts.make(index, TEXT_KINDS[index % len(TEXT_KINDS)])
    return DocumentMaker(modules, content_tokenizer(train_tokenizer(collector.texts, 2048)), 0)


def fresh(maker: DocumentMaker, *, wired: bool) -> Decoder:
    model = Decoder(TINY)
    model.initialise(torch.Generator().manual_seed(0))
    if wired:
        wire(model, maker.number_ids)
    return model.eval()


@torch.no_grad()
def rank_share(model: Decoder, maker: DocumentMaker, kind: str) -> float:
    """Mean share of the vocabulary that ranks above the right token: 0.5 is chance."""
    ranks: list[float] = []
    for index in range(6):
        packed, targets, rows, _, _ = pack([maker.make(index, kind)])
        logits = model.logits(model(packed).hidden[rows])
        right = logits.gather(1, targets[:, None])
        ranks += (logits > right).float().mean(1).tolist()
    return float(np.mean(ranks))


@pytest.mark.parametrize("kind", ["repeat", "pointer"])
def test_a_wired_model_copies_and_points_before_the_first_step(maker: DocumentMaker, kind: str) -> None:
    assert rank_share(fresh(maker, wired=True), maker, kind) < 0.33


@pytest.mark.parametrize("kind", ["repeat", "pointer"])
def test_an_unwired_model_is_at_chance(maker: DocumentMaker, kind: str) -> None:
    assert 0.4 < rank_share(fresh(maker, wired=False), maker, kind) < 0.6


def test_wiring_is_a_function_of_its_arguments_and_leaves_experts_and_norms_alone(maker: DocumentMaker) -> None:
    plain, one, two = fresh(maker, wired=False), fresh(maker, wired=True), fresh(maker, wired=True)
    for (name, before), after, again in zip(plain.named_parameters(), one.parameters(), two.parameters(), strict=True):
        assert torch.equal(after, again), name
        if "mlp" in name or "norm" in name:
            assert torch.equal(before, after), name
