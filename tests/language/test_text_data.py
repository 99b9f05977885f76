"""User-defined texts and instructions: what is scored, what shares a block, what was cut, and what is refused."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsign.config import from_dict
from fedsign.data.base import Dataset, Samples
from fedsign.data.text.blocks import Stream, text_of
from fedsign.data.text.examples import example_of
from fedsign.data.text.hugging_face import HuggingFace, hugging_face
from fedsign.data.text.jsonl import jsonl
from fedsign.data.text.packing import pack
from fedsign.data.text.text_folder import text_folder
from fedsign.data.text.tokenizers import Bytes
from fedsign.errors import ConfigError, DataError, FedSignError
from fedsign.tasks.base import IGNORED
from fedsign.tasks.documents import split
from fedsign.workload import Workload
from simulations.api import partition_record
from tests.language.language_samples import save_tokenizer, sums, write_lines

END = Bytes().end_id
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "no"},
]


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def tokens_of(samples: Any) -> torch.Tensor:
    """The tokens [n, T], without positions."""
    tokens: torch.Tensor = split(samples.features)[0]
    return tokens


def texts(samples: Any, *, scored: bool = False) -> list[str]:
    """What stands in each block, or what of it is scored."""
    shown = samples.targets if scored else tokens_of(samples)
    return [Bytes().decode(token for token in row if token >= 0) for row in shown.tolist()]


# --- folders of texts


def test_a_file_is_a_document_and_its_own_owner(tmp_path: Path) -> None:
    for name, letter in (("b", "y"), ("a", "x")):
        (tmp_path / f"{name}.txt").write_text(letter * 100)
    (tmp_path / "notes.md").write_text("not read")
    data = text_folder(0, root=str(tmp_path), block_length=30)
    assert data.train.owners is not None and data.test.owners is not None
    assert data.train.owners.tolist() == [0, 0, 0, 1, 1, 1] and data.test.owners.tolist() == [0, 1]
    assert texts(data.train, scored=True) == ["x" * 30] * 3 + ["y" * 30] * 3
    assert texts(data.test, scored=True) == ["x" * 10, "y" * 10]
    assert (data.input_shape, data.num_outputs) == ((30,), 257)


def test_a_folder_of_texts_is_an_owner_and_parts_of_the_users_own_are_kept(tmp_path: Path) -> None:
    for part in ("train", "test"):
        for owner in ("ann", "ben"):
            for file in ("1.txt", "deep/2.txt"):
                path = tmp_path / part / owner / file
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(f"{part} {owner} {path.stem}", encoding="utf-8")
    data = text_folder(0, root=str(tmp_path), block_length=12)
    assert data.train.owners is not None and data.train.owners.tolist() == [0, 0, 1, 1]
    assert texts(data.train, scored=True) == ["train ann 1", "train ann 2", "train ben 1", "train ben 2"]
    assert texts(data.test, scored=True) == ["test ann 1", "test ann 2", "test ben 1", "test ben 2"]
    assert all(END in row for row in data.train.targets.tolist()), "a whole document's end is learned"
    assert data.notes == ()


def test_texts_beside_the_parts_are_told_of(tmp_path: Path) -> None:
    for file in ("train/a.txt", "test/b.txt", "c.txt", "more/d.txt"):
        path = tmp_path / file
        path.parent.mkdir(exist_ok=True)
        path.write_text("a text of some length")
    data = text_folder(0, root=str(tmp_path), block_length=12)
    assert data.notes == (f"2 texts in {tmp_path} lie beside its folders train and test, and are not read.",)


@pytest.mark.parametrize(("there", "missing"), [("train", "test"), ("test", "train")])
def test_one_part_without_the_other_is_told_of(there: str, missing: str, tmp_path: Path) -> None:
    (tmp_path / there).mkdir()
    (tmp_path / there / "a.txt").write_text("a text of some length, and one of its test too", encoding="utf-8")
    (note,) = text_folder(0, root=str(tmp_path), block_length=12).notes
    assert (
        note
        == f"{tmp_path / there} is one owner's folder like any other, since there is no folder '{missing}' beside it."
    )


def test_a_folder_without_texts_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no file .txt in .*; expected a text a file"):
        text_folder(0, root=str(tmp_path))


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"", "is empty; remove it"), (b"\xff\xfe", r"cannot be read as UTF-8 text .*; save it as UTF-8")],
)
def test_a_text_that_cannot_be_read_is_named(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(DataError, match=rf"a\.txt {said}"):
        text_folder(0, root=str(tmp_path))


def test_the_mark_of_utf_8_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("abc\r\n".encode("utf-8-sig"))
    assert text_of(tmp_path / "a.txt") == "abc\n"


# --- tokenizers from a folder


@settings(deadline=None, max_examples=30)
@given(st.text(alphabet="aé\n 界", max_size=20))
def test_a_tokenizer_of_a_folder_gives_a_text_back(tokenizer_folder: str, text: str) -> None:
    tokenizer = hugging_face(tokenizer_folder)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode(text)) == len(text.encode())


def test_a_tokenizers_special_tokens_are_its_own(tokenizer_folder: str) -> None:
    tokenizer = hugging_face(tokenizer_folder)
    assert (tokenizer.start_id, tokenizer.end_id, tokenizer.vocabulary_size) == (0, 2, 3 + 256)
    assert tokenizer.pad_id == tokenizer.end_id, "it has none of its own"


def test_what_is_no_tokenizer_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data.tokenizer=bytes was given, .* expected byte, character, or a folder"):
        text_folder(0, root=make_text(tmp_path), tokenizer="bytes")
    with pytest.raises(DataError, match=r"has no end token"):
        HuggingFace(save_tokenizer(tmp_path / "endless", end=None))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match=r"the tokenizer in .*broken cannot be read"):
        HuggingFace(str(tmp_path / "broken"))


def make_text(folder: Path) -> str:
    (folder / "text").mkdir()
    (folder / "text" / "a.txt").write_text("abc " * 50)
    return str(folder / "text")


# --- instructions and conversations


def example(line: Mapping[str, Any], tokenizer: Any = None, **changes: Any) -> Stream:
    return example_of(line, tokenizer or Bytes(), **({"prompt": "alpaca", "score": "answer", "owner": 0} | changes))


def shown(stream: Stream, *, scored: bool = False) -> str:
    """The text, with the end token as `|`."""
    tokens = stream.tokens[stream.is_scored] if scored else stream.tokens
    return "".join("|" if token == END else chr(token) for token in tokens)


def test_an_instruction_is_alpacas_prompt_and_only_its_answer_and_end_are_scored() -> None:
    line = {"instruction": "Add.", "input": "1 2", "output": "3"}
    assert shown(example(line)) == (
        "|Below is an instruction that describes a task, paired with an input that provides further context. "
        "Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n3|"
    )
    assert shown(example(line), scored=True) == "3|"
    assert shown(example(line, prompt="short")) == "|### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n3|"
    without = {"instruction": "Add.", "output": "3"}
    assert shown(example(without, prompt="short")) == "|### Instruction:\nAdd.\n\n### Response:\n3|"
    assert shown(example(without)).startswith("|Below is an instruction that describes a task. Write a response")


def test_all_of_an_example_is_scored_where_that_is_asked_for() -> None:
    line = {"instruction": "Add.", "output": "3"}
    whole = example(line, score="all", prompt="short")
    assert "|" + shown(whole, scored=True) == shown(whole)


def test_a_conversation_without_a_template_has_a_heading_for_each_role() -> None:
    stream = example({"messages": CONVERSATION})
    assert shown(stream) == (
        "|### System:\nBe brief.\n\n### User:\nOne?\n\n### Assistant:\nyes|\n\n### User:\nTwo?\n\n### Assistant:\nno|"
    )
    assert shown(stream, scored=True) == "yes|no|"


def test_a_template_that_refuses_a_conversation_is_said(tmp_path: Path) -> None:
    tokenizer = HuggingFace(save_tokenizer(tmp_path, chat_template="{{ raise_exception('no system role') }}"))
    with pytest.raises(DataError, match=r"refuses the conversation \(no system role\)"):
        example({"messages": CONVERSATION}, tokenizer)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("7", "line 2 of .* is 7; expected an example in braces"),
        ("{", "line 2 of .* is not JSON"),
        ('{"question": "a"}', "line 2 of .* has the keys question; expected instruction"),
        ('{"instruction": "a", "output": 3}', "line 2 of .* has output='3'; expected a text"),
        ('{"instruction": "a"}', "line 2 of .* has no output"),
        ('{"messages": "a"}', "line 2 of .* has messages of type str"),
        ('{"messages": [{"role": "tool", "content": 3}]}', r"line 2 of .* has the message .* expected a role"),
        ('{"messages": [{"role": "assistant"}]}', r"line 2 of .* has the message .* expected a role"),
        (
            '{"messages": [{"role": "critic", "content": "a"}, {"role": "assistant", "content": "b"}]}',
            r"line 2 of .* has the role 'critic'; expected one of system, .*, or use a tokenizer with a chat template",
        ),
        (
            '{"messages": [{"role": "assistant", "tool_calls": [{}]}]}',
            r"line 2 of .* has tools, which only a chat template can write; use a tokenizer with a chat template",
        ),
        ('{"messages": [{"role": "user", "content": "a"}]}', "line 2 of .* none is the assistant's"),
    ],
)
def test_a_line_that_is_no_example_is_named(tmp_path: Path, line: str, said: str) -> None:
    file = Path(write_lines(tmp_path / "a.jsonl", sums(1)))
    file.write_text(file.read_text() + line + "\n" + file.read_text())
    with pytest.raises(DataError, match=said):
        jsonl(0, path=str(file))


def test_a_file_that_is_not_there_or_empty_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no file .* --set data.path=PATH"):
        jsonl(0, path=str(tmp_path / "a.jsonl"))
    (tmp_path / "a.jsonl").write_text("\n")
    with pytest.raises(DataError, match=r"has no line"):
        jsonl(0, path=str(tmp_path / "a.jsonl"))
    (tmp_path / "a.jsonl").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"cannot be read as UTF-8"):
        jsonl(0, path=str(tmp_path / "a.jsonl"))


def read(tmp_path: Path, lines: Any, **changes: Any) -> Dataset:
    return jsonl(0, path=write_lines(tmp_path / "a.jsonl", lines), **({"prompt": "short"} | changes))


def test_lines_are_split_by_the_seed_and_none_is_in_both_parts(tmp_path: Path) -> None:
    data = read(tmp_path, sums(20), packing=False, test_fraction=0.25, block_length=128)
    assert (len(data.train), len(data.test)) == (15, 5)
    both = texts(data.train) + texts(data.test)
    assert sorted(both) == sorted(shown(example(line, prompt="short")).strip("|") for line in sums(20))


def test_owners_are_what_the_key_says_and_share_no_block(tmp_path: Path) -> None:
    data = read(tmp_path, sums(20), owner="who", block_length=200)
    assert data.train.owners is not None
    asked = [[int(part.split()[0]) for part in row.split("Add ")[1:]] for row in texts(data.train)]
    assert [{k % 2 for k in row} for row in asked] == [{owner} for owner in data.train.owners.tolist()]
    assert len(asked) < sum(map(len, asked)) == 18, "blocks are shared"
    with pytest.raises(DataError, match=r"line 1 of .* has no owner under the key 'author'"):
        read(tmp_path, sums(20), owner="author")
    assert read(tmp_path, sums(20)).train.owners is None
    nobodys = write_lines(tmp_path / "test.jsonl", [{"instruction": "a", "output": "b"}])
    assert read(tmp_path, sums(20), owner="who", test_path=nobodys).test.owners is None


def test_what_was_cut_and_what_could_be_known_by_heart_is_counted_and_written_into_the_run(tmp_path: Path) -> None:
    short = {"instruction": "a", "output": "b"}
    long = {"instruction": "a", "output": "b" * 80}
    lost = {"instruction": "a" * 80, "output": "b"}
    path = write_lines(tmp_path / "train.jsonl", [short, long, long, lost])
    tree = {
        "task": "language",
        "metrics": [],
        "data": {"name": "jsonl", "path": path, "test_path": path, "block_length": 60, "prompt": "short"},
        "partition": {"name": "iid", "num_clients": 1},
        "model": {"name": "tests.language.language_samples:Bigram"},
        "server": {"cohort_size": 1},
    }
    notes = partition_record(Workload(from_dict(tree)))["data_notes"]
    assert notes == [
        "4 of 4 test lines are in the training lines, too, word for word.",
        *(
            f"3 of 4 {which} examples are longer than data.block_length=60 tokens and were cut, of which 1 had their "
            "whole answer beyond it and are left out."
            for which in ("training", "test")
        ),
    ]
    with pytest.raises(DataError, match=r"nothing that is scored is left of the 1 training lines"):
        read(tmp_path, [lost, short], test_fraction=0.5, block_length=40)


def test_a_tokenizer_made_of_the_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data.tokenizer=character was given with data.name=jsonl"):
        read(tmp_path, sums(4), tokenizer="character")


LENGTHS = st.lists(st.tuples(st.integers(2, 30), st.integers(0, 2)), min_size=1, max_size=20)


def streams(shapes: list[tuple[int, int]]) -> list[Stream]:
    """Examples whose tokens are all different, the last half of each scored."""
    made, first = [], 0
    for length, owner in shapes:
        tokens = np.arange(first, first + length)
        made.append(Stream(tokens, np.arange(length) >= max(1, length // 2), owner))
        first += length
    return made


@settings(deadline=None)
@given(LENGTHS, st.booleans())
def test_packing_keeps_every_scored_token_once_with_what_stands_before_it(
    shapes: list[tuple[int, int]], packing: bool
) -> None:
    examples = streams(shapes)
    samples, note = pack(examples, 29, pad_id=-1, packing=packing, split="training")
    is_scored = samples.targets != IGNORED
    expected = sorted(token for each in examples for token in each.tokens[each.is_scored].tolist())
    assert sorted(samples.targets[is_scored].tolist()) == expected and note is None
    assert torch.equal(tokens_of(samples)[is_scored] + 1, samples.targets[is_scored]), (
        "no target leads to another example"
    )


@settings(deadline=None)
@given(LENGTHS)
def test_packed_blocks_hold_whole_examples_of_one_owner(shapes: list[tuple[int, int]]) -> None:
    examples = streams(shapes)
    samples, _ = pack(examples, 29, pad_id=-1, packing=True, split="training")
    alone, _ = pack(examples, 29, pad_id=-1, packing=False, split="training")
    assert samples.owners is not None and len(samples) <= len(alone) == len(examples)
    owner_of = {token: each.owner for each in examples for token in each.tokens.tolist()}
    for owner, row in zip(samples.owners.tolist(), tokens_of(samples).tolist(), strict=True):
        assert {owner_of[token] for token in row if token >= 0} == {owner}
    given_ = sorted(token for each in examples for token in each.tokens[:-1].tolist())
    assert sorted(token for token in tokens_of(samples).ravel().tolist() if token >= 0) == given_


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 30))
def test_an_example_that_is_too_long_loses_its_end_and_is_counted(shapes: list[tuple[int, int]], length: int) -> None:
    examples = streams(shapes)
    samples, note = pack(examples, length, pad_id=-1, packing=False, split="test")
    left = [each.tokens[1 : length + 1][each.is_scored[1 : length + 1]] for each in examples]
    assert sorted(samples.targets[samples.targets != IGNORED].tolist()) == sorted(np.concatenate(left).tolist())
    num_cut, num_lost = sum(len(each.tokens) > length + 1 for each in examples), sum(not len(each) for each in left)
    assert (note is None) == (num_cut == 0)
    if note is not None:
        assert note.startswith(f"{num_cut} of {len(examples)} test examples are longer than")
        assert (f"of which {num_lost} had their whole answer" in note) == (num_lost > 0)


# --- sites


def at_sites(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    roots = [write_lines(tmp_path / f"silo{k}" / "a.jsonl", sums(10 + k, first=100 * k)) for k in range(3)]
    tree: dict[str, Any] = {
        "task": "language",
        "metrics": ["perplexity"],
        "data": {"name": "jsonl", "path": "a.jsonl", "block_length": 96, "prompt": "short"},
        "partition": {"name": "sites", "num_clients": 3, "roots": [str(Path(root).parent) for root in roots]},
        "model": {"name": "tests.language.language_samples:Bigram"},
        "server": {"cohort_size": 3},
    }
    return {
        key: {**tree.get(key, {}), **value} if isinstance(value, dict) else value
        for key, value in (tree | changes).items()
    }


@pytest.mark.needs("deployment")
def test_silos_read_their_own_lines_and_agree_on_the_vocabulary(tmp_path: Path) -> None:
    from clients.deployment.evaluator import samples_of_sites

    work = Workload(from_dict(at_sites(tmp_path)))
    assert (work.dataset.num_outputs, work.dataset.input_shape) == (257, (96, 2))
    for site in range(3):
        own = work.samples_of(site)
        assert isinstance(own, Samples) and all(f"Add {site}" in row if site else "Add" in row for row in texts(own))
        assert work.evaluate(work.make_model(), samples_of_sites(work.dataset)[site])["perplexity"] > 1


@pytest.mark.needs("deployment")
def test_a_server_without_data_knows_the_shape_of_text(tmp_path: Path) -> None:
    work = Workload(from_dict(at_sites(tmp_path)), frozenset())
    assert (len(work.dataset.train), work.dataset.input_shape, work.dataset.num_outputs) == (0, (96, 2), 257)
    assert work.dataset.train.features.dtype == torch.int64


@pytest.mark.needs("deployment")
def test_sites_notes_name_the_site(tmp_path: Path) -> None:
    tree = at_sites(tmp_path, data={"block_length": 48, "score": "all"})
    notes = Workload(from_dict(tree)).dataset.notes
    assert notes and all(note.startswith("site 'silo") for note in notes)


@pytest.mark.needs("deployment")
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"data": {"name": "text_folder", "tokenizer": "character"}}, "would give every site another vocabulary"),
        ({"data": {"name": "pytext"}}, "would give every site another vocabulary"),
        ({"data": {"name": "pytext", "tokenizer": "byte"}}, "takes neither a root nor a path"),
        ({"data": {"name": "npz"}}, "data.name=npz, but the server cannot see the shape"),
        ({"task": "classification", "metrics": []}, "data.name=jsonl has text; use task=language"),
    ],
)
def test_what_sites_cannot_agree_on_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    tree = at_sites(tmp_path)
    tree["data"] = changes.get("data", tree["data"])
    with pytest.raises(FedSignError, match=said):
        _ = Workload(from_dict(tree | {key: value for key, value in changes.items() if key != "data"})).dataset


@pytest.mark.needs("deployment")
def test_a_folder_of_texts_at_each_site_and_a_servers_own_to_test_on(tmp_path: Path) -> None:
    for name in ("north", "south", "server"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text(f"{name} " * 40)
    roots = [str(tmp_path / name) for name in ("north", "south")]
    tree = {
        "task": "language",
        "metrics": ["perplexity"],
        "data": {"name": "text_folder", "block_length": 16},
        "partition": {"name": "sites", "num_clients": 2, "roots": roots, "test_root": str(tmp_path / "server")},
        "model": {"name": "tests.language.language_samples:Bigram"},
        "server": {"cohort_size": 2},
    }
    work = Workload(from_dict(tree))
    held = [set("".join(texts(work.samples_of(site), scored=True)).split()) for site in range(2)]
    assert "north" in held[0] and "south" in held[1] and not held[0] & {"south", "server"}
    assert "server" in "".join(texts(work.dataset.test, scored=True)) and not work.is_evaluated_at_clients
    assert work.evaluate(work.make_model())["perplexity"] > 1
