"""Documents and tokenizer of the base: real code in, streams that a tool call could have made out."""

from __future__ import annotations

import textwrap
from pathlib import Path

import numpy as np
import pytest
from base_kit import own_modules
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from strop.agent.compact import ARG, END, content_tokenizer
from strop.midtrain.base.build import TEXT_KINDS, TextCollector
from strop.midtrain.base.cases import choose_edits
from strop.midtrain.base.corpus import Module, read_corpus, write_corpus
from strop.midtrain.base.documents import EDIT_WEIGHT, DocumentMaker
from strop.midtrain.base.gate import argument_spans
from strop.midtrain.base.mixture import KIND_SHARES
from strop.midtrain.base.pretrain import pack
from strop.midtrain.base.tokenizer import train_tokenizer
from strop.tasks.mutation import IDENTIFIER_KINDS, apply_edit, candidate_edits


@pytest.fixture(scope="module")
def modules() -> list[Module]:
    return own_modules()


@pytest.fixture(scope="module")
def tokenizer(modules: list[Module]) -> Tokenizer:
    collector = TextCollector()
    maker = DocumentMaker(modules, collector, seed=5)  # type: ignore[arg-type]
    for index in range(400):
        maker.make(index, TEXT_KINDS[index % len(TEXT_KINDS)])
    return content_tokenizer(train_tokenizer(collector.texts, 2048))


@given(st.integers(0, 999), st.text(alphabet="abc (=+", max_size=6))
@settings(max_examples=60, deadline=None)
def test_a_number_below_1000_is_one_token_wherever_it_stands(tokenizer: Tokenizer, number: int, around: str) -> None:
    ids = tokenizer.encode(f"{around}{number}|x", add_special_tokens=False).ids
    assert tokenizer.token_to_id(str(number)) in ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == f"{around}{number}|x"


def test_a_name_has_the_same_tokens_wherever_it_stands(tokenizer: Tokenizer) -> None:
    name = tokenizer.encode("render_transcript", add_special_tokens=False).ids
    for text in ("x = render_transcript(y)", "(render_transcript)", "def render_transcript():", "render_transcript"):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert any(ids[i : i + len(name)] == name for i in range(len(ids))), text


def test_a_tokenizer_needs_room_for_numbers_and_enough_text() -> None:
    with pytest.raises(ValueError, match="1600"):
        train_tokenizer(["x"], 1000)
    with pytest.raises(ValueError, match="more text"):
        train_tokenizer(["x = 1"], 2048)


@pytest.mark.parametrize("kind", sorted(KIND_SHARES))
def test_documents_depend_on_seed_and_index_alone(modules: list[Module], tokenizer: Tokenizer, kind: str) -> None:
    one, two = DocumentMaker(modules, tokenizer, 3), DocumentMaker(modules, tokenizer, 3)
    two.make(99, kind)
    assert np.array_equal(one.make(7, kind).token_ids, two.make(7, kind).token_ids)
    assert not np.array_equal(one.make(7, kind).token_ids, one.make(8, kind).token_ids)
    other_seed = DocumentMaker(modules, tokenizer, 4)
    assert not np.array_equal(one.make(7, kind).token_ids, other_seed.make(7, kind).token_ids)


def test_the_last_edit_of_a_single_repair_restores_a_line_that_is_in_the_window(modules: list[Module], tokenizer: Tokenizer) -> None:
    maker = DocumentMaker(modules, tokenizer, 0)
    for index in range(30):
        document = maker.make_single_repair(index)
        text = maker.decode(document.token_ids)
        window = text.split("<|tool|>")[1].split("<|end|>")[0]
        call = text.split("<|call|>edit<|arg|>")[1].split("<|end|>")[0]
        _, old, line, new = call.split("<|arg|>")
        row = next(r for r in window.split("\n") if r.startswith(f"{line}|"))
        assert row.partition("|")[2].count(old) == 1
        assert old != new
        answer = text.split("<|tool|>ok\n")[1].split("<|end|>")[0]
        assert answer == f"{line}|{row.partition('|')[2].replace(old, new)}"


def test_weights_are_on_actions_and_a_share_of_the_text_and_never_on_the_first_token(modules: list[Module], tokenizer: Tokenizer) -> None:
    maker = DocumentMaker(modules, tokenizer, 0)
    documents = [maker.make(index, "repair") for index in range(30)]
    for document in documents:
        assert document.weights[0] == 0
        for name, start, stop in argument_spans(maker, document):
            assert (document.weights[start:stop] == (EDIT_WEIGHT if name.startswith("edit.") else 0)).all()
    text = np.concatenate([d.weights[~d.is_action] > 0 for d in documents])
    assert 0.2 < text.mean() < 0.3


def test_wrong_edits_in_episodes_are_context_only(modules: list[Module], tokenizer: Tokenizer) -> None:
    maker = DocumentMaker(modules, tokenizer, 0)
    masked = 0
    for index in range(40):
        document = maker.make(index, "episode")
        spans = [s for s in argument_spans(maker, document) if s[0].startswith("edit.")]
        last_start = max(s[1] for s in spans if s[0] == "edit.1")
        for _, start, stop in spans:
            learned = document.weights[start:stop] > 0
            assert learned.all() or not learned.any()
            masked += not learned.any()
            if start >= last_start:
                assert learned.all()
    assert masked > 0


def test_packing_lines_targets_up_with_the_rows_that_predict_them(modules: list[Module], tokenizer: Tokenizer) -> None:
    maker = DocumentMaker(modules, tokenizer, 0)
    documents = [maker.make(index) for index in range(4)]
    packed, targets, rows, weights, actions = pack(documents)
    assert (packed.token_ids[rows + 1] == targets).all()
    starts = np.cumsum([0, *packed.lengths])
    assert not set((rows + 1).tolist()) & set(starts.tolist())
    assert (weights > 0).all()
    assert int(actions.sum()) == sum(int((d.is_action & (d.weights > 0)).sum()) for d in documents)


def test_identifier_kinds_are_about_a_fifth() -> None:
    source = textwrap.dedent("""
        def f(a, b, c):
            if a < b and c != 0:
                return min(a, b) + c
            return a - b * c
    """).strip()
    from strop.tasks.mutation import find_functions

    (span,) = find_functions(source)
    candidates = candidate_edits(source, span)
    rng = np.random.default_rng(0)
    chosen = [choose_edits(rng, candidates, 1)[0] for _ in range(2000)]
    share = np.mean([edit.kind in IDENTIFIER_KINDS for edit in chosen])
    assert 0.16 < share < 0.24
    several = choose_edits(rng, candidates, 3)
    assert len({edit.line for edit in several}) == len(several)
    for edit in several:
        apply_edit(source, edit)


def test_corpus_files_round_trip_and_a_damaged_one_is_named(tmp_path: Path, modules: list[Module]) -> None:
    path = tmp_path / "code.jsonl.zst"
    write_corpus(path, [{"name": "strop"}], modules[:5])
    sources, back = read_corpus(path)
    assert sources == [{"name": "strop"}]
    assert back == modules[:5]
    path.write_bytes(path.read_bytes()[:-40])
    from strop.core.errors import TaskError

    with pytest.raises(TaskError, match=r"code\.jsonl\.zst"):
        read_corpus(path)


def test_an_argument_span_ends_with_its_separator(modules: list[Module], tokenizer: Tokenizer) -> None:
    maker = DocumentMaker(modules, tokenizer, 0)
    document = maker.make(3, "copy")
    for _, _, stop in argument_spans(maker, document):
        assert document.token_ids[stop - 1] in (ARG, END)
