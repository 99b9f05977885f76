"""Text as blocks of tokens: nothing is lost or scored twice, and no test text is in a training block."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedsign.data.base import Samples
from fedsign.data.text.blocks import Document, Stream, blocks, cut, dataset_of, stream_of
from fedsign.data.text.pytext import pytext
from fedsign.data.text.tokenizers import Bytes, Characters
from fedsign.errors import DataError
from fedsign.tasks.base import IGNORED

TEXTS = st.text(alphabet="ab \n", max_size=200)


@settings(deadline=None)
@given(st.text())
def test_bytes_give_any_text_back(text: str) -> None:
    text = text.encode(
        "utf-8", errors="replace"
    ).decode()  # hypothesis draws no lone surrogates, but says nothing of it
    tokens = Bytes().encode(text)
    assert Bytes().decode([*tokens, Bytes().end_id]) == text and Bytes().end_id not in tokens


@settings(deadline=None)
@given(st.lists(st.text(), min_size=1))
def test_characters_give_the_texts_they_are_made_of_back(texts: list[str]) -> None:
    tokenizer = Characters.of(texts)
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert all(2 <= token < tokenizer.vocabulary_size for token in tokenizer.encode(text))


def test_a_character_that_is_not_in_the_training_text_is_the_unknown_one() -> None:
    tokenizer = Characters.of(["ab"])
    assert tokenizer.encode("az") == [2, tokenizer.unknown_id]
    assert tokenizer.decode([2, tokenizer.unknown_id, tokenizer.end_id]) == "a\ufffd"


def test_what_a_model_writes_in_half_characters_can_be_read() -> None:
    assert Bytes().decode([0xC3, ord("a")]) == "\ufffda"


@pytest.mark.needs("workers")
def test_a_vocabulary_alone_encodes_nothing() -> None:
    from clients.workers.shared_data import VocabularyOnly

    with pytest.raises(DataError, match="without their tokenizer"):
        VocabularyOnly(5).encode("a")
    with pytest.raises(DataError, match="without their tokenizer"):
        VocabularyOnly(5).decode([1])


@settings(deadline=None)
@given(TEXTS.filter(bool), st.integers(1, 40), st.booleans())
@example("abcd", 4, True)
@example("abcd", 5, True)
def test_every_token_of_a_document_is_a_target_exactly_once(text: str, block_length: int, is_whole: bool) -> None:
    document = Document(text=text, owner=0, is_whole=is_whole)
    features, targets = blocks(stream_of(document, Bytes()), block_length, pad_id=Bytes().pad_id)
    expected = Bytes().encode(text) + [Bytes().end_id] * is_whole
    assert targets[targets != IGNORED].tolist() == expected
    assert features.shape == targets.shape == (-(-len(expected) // block_length), block_length)


@settings(deadline=None)
@given(TEXTS.filter(bool), st.integers(1, 40))
def test_a_target_is_what_follows_its_input(text: str, block_length: int) -> None:
    stream = stream_of(Document(text=text, owner=0), Bytes())
    features, targets = blocks(stream, block_length, pad_id=Bytes().pad_id)
    inputs = features.ravel()[: len(stream.tokens) - 1].tolist()
    assert inputs == stream.tokens[:-1].tolist() and inputs[0] == Bytes().start_id
    assert targets.ravel()[: len(inputs)].tolist() == stream.tokens[1:].tolist()


@settings(deadline=None)
@given(st.lists(st.booleans(), min_size=2, max_size=60), st.integers(1, 20))
def test_only_what_is_to_be_scored_is_and_blocks_without_any_are_left_out(is_scored: list[bool], length: int) -> None:
    is_scored[0] = False
    tokens = np.arange(len(is_scored))
    _, targets = blocks(Stream(tokens, np.array(is_scored), 0), length, pad_id=0)
    assert targets[targets != IGNORED].tolist() == tokens[np.array(is_scored)].tolist()
    assert (targets != IGNORED).any(axis=1).all()


@settings(deadline=None)
@given(TEXTS, st.floats(0.01, 0.99))
def test_a_cut_loses_nothing_and_leaves_the_test_at_most_its_share(text: str, fraction: float) -> None:
    train, test = cut(Document(text=text, owner=3), fraction)
    assert train.text + test.text == text and train.owner == test.owner == 3
    assert len(test.text) <= fraction * len(text)
    assert train.is_whole == test.is_whole == (not (train.text and test.text))


def test_a_cut_is_made_at_a_paragraph_where_there_is_one_in_the_last_part() -> None:
    text = "a" * 60 + " b\nc\n\n" + "d" * 34
    assert cut(Document(text=text, owner=0), 0.4)[1].text == "d" * 34
    assert cut(Document(text=text, owner=0), 0.36)[1].text == "d" * 34
    assert cut(Document(text="a" * 90 + " " + "b" * 9, owner=0), 0.1)[1].text == "b" * 9


def test_documents_without_a_test_text_are_said() -> None:
    documents = [Document(text="abc", owner=0)]
    with pytest.raises(DataError, match="leaves no text for the test part"):
        dataset_of(documents, [Document(text="", owner=0)], Bytes(), block_length=4, where="here")


def test_a_block_that_is_longer_than_any_document_is_said() -> None:
    documents = [Document(text="abc", owner=0, is_whole=False), Document(text="ab", owner=1, is_whole=False)]
    with pytest.raises(
        DataError, match=r"data.block_length=4 was given, but the longest document of here has 3 tokens"
    ):
        dataset_of(documents, documents, Bytes(), block_length=4, where="here")
    assert len(dataset_of(documents, documents, Bytes(), block_length=3, where="here").train) == 2


def scored(samples: Samples) -> list[int]:
    found: list[int] = samples.targets[samples.targets != IGNORED].tolist()
    return found


@pytest.mark.parametrize("tokenizer", ["character", "byte"])
def test_pytext_trains_on_nine_tenths_of_every_topic_in_order(tokenizer: str) -> None:
    from pydoc_data.topics import topics

    data = pytext(0, tokenizer=tokenizer, block_length=64)  # type: ignore[arg-type]
    assert isinstance(data.train, Samples) and data.text is not None and data.train.owners is not None
    for owner, name in enumerate(sorted(topics)):
        own = data.train[(data.train.owners == owner).nonzero().ravel().numpy()]
        text = data.text.decode(scored(own))
        assert topics[name].startswith(text) and len(text) >= 0.9 * len(topics[name])


def test_no_paragraph_of_pytexts_test_can_be_known_by_heart() -> None:
    data = pytext(0)
    assert isinstance(data.train, Samples) and isinstance(data.test, Samples) and data.text is not None
    trained_on = data.text.decode(scored(data.train))
    tests = data.text.decode(scored(data.test)).split("\n\n")
    notable = [each.strip() for each in tests if len(each) >= 200]
    assert len(notable) > 20 and not any(each in trained_on for each in notable)


def test_pytext_has_the_vocabulary_of_its_training_text() -> None:
    data = pytext(0)
    assert isinstance(data.train, Samples) and isinstance(data.text, Characters)
    used = set(scored(data.train))
    assert used == set(range(2, data.num_outputs)) and data.num_outputs == len(data.text.characters) + 2


def test_pytext_is_the_same_whatever_the_seed() -> None:
    first, other = pytext(0), pytext(1)
    assert torch.equal(first.train.features, other.train.features)
    assert torch.equal(first.test.targets, other.test.targets)
