"""Conversations have exactly the tokens of the chat template, and the answers that `transformers` would mark."""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest

from fedsign.data.text import libraries as llm
from fedsign.data.text.examples import example_of
from fedsign.data.text.hugging_face import HuggingFace
from fedsign.data.text.jsonl import jsonl
from fedsign.data.text.tokenizers import Bytes
from fedsign.errors import DataError
from simulations.recipes.base import NotDecidableHere
from simulations.recipes.language.pretrained import smollm2
from tests.language.language_samples import write_lines

pytest.importorskip("transformers")
transformers = llm.transformers("this test")

# « and » stand for {% generation %} and {% endgeneration %}
THINKS = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}«"
    "{% if loop.index0 > ns.last %}{{ m.content }}{% else %}{{ m.content.split('</think>')[-1].lstrip('\n') }}"
    "{% endif %}<|im_end|>\n»{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {
    "chatml": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}«{{ m.content }}<|im_end|>\n»"
        "{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "trimmed": (
        "{% for m in messages %}<|im_start|>{{ m.role }}<|sep|>\n\n{% if m.role == 'assistant' %}"
        "«{{ m.content | trim }}<|im_end|>»{% else %}{{ m.content | trim }}<|im_end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant<|sep|>\n\n{% endif %}"
    ),
    "never_asks": (
        "<|im_start|>{% for m in messages %}{% if m.role == 'assistant' %}«{{ m.content }}<|im_end|>»"
        "{% else %}<|sep|>{{ m.content }}<|sep|>{% endif %}{% endfor %}"
    ),
    "ends_once_more": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}«{{ m.content }}<|sep|>\n»"
        "{% else %}{{ m.content }}<|sep|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
        "{% elif messages[-1].role == 'assistant' %}«{{ eos_token }}»{% else %}{{ eos_token }}{% endif %}"
    ),
    "thinks": THINKS,
    "asks_for_thoughts": THINKS.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}"),
}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "two_turns": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "yes, <b>one</b> "},
        {"role": "user", "content": "Two? yes"},
        {"role": "assistant", "content": "yes"},
    ],
    "thoughts": [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "<think>\nit is odd\n</think>\n\nodd"},
        {"role": "user", "content": "Two?"},
        {"role": "assistant", "content": "<think>\nit is even\n</think>\n\neven"},
    ],
    "the_user_is_last": [
        {"role": "user", "content": "assistant\n"},
        {"role": "assistant", "content": "é界\n\n"},
        {"role": "user", "content": "é界"},
    ],
}
TEXT = ["Be brief. One? Two? yes, no, <b>one</b> assistant user system it is odd it is even <think>\n</think>\n\n"] * 20
KINDS = ("bpe", "unigram", "wordpiece", "split", "byte_fallback")
SPECIAL = ["<|end|>", "<|im_start|>", "<|im_end|>", "<|sep|>"]


@cache
def trained(kind: str) -> Any:
    """A tokenizer without a start token, trained on a few words."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer: Any
    if kind == "bpe":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
        trainer: Any = trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet)
    elif kind == "unigram":
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=[*SPECIAL, "<unk>"], unk_token="<unk>")
    elif kind == "split":  # as GPT-4's
        tokenizer = Tokenizer(models.BPE())
        words = pre_tokenizers.Split(Regex(r"\p{L}+| ?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+"), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(False, use_regex=False)])
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet)
    elif kind == "byte_fallback":  # as LLaMA 2's
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        fallback = [f"<0x{byte:02X}>" for byte in range(256)]
        trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=[*SPECIAL, "<unk>", *fallback])
    else:
        tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
        tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.NFKC(), pre_tokenizers.BertPreTokenizer()
        trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=[*SPECIAL, "<unk>"])
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def load(
    folder: Path,
    template: str,
    *,
    kind: str = "bpe",
    marks: bool = False,
    end: str = "<|im_end|>",
    start: str | None = None,
) -> Any:
    """Our tokenizer with a template, and the library's own."""
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=trained(kind), bos_token=start, eos_token=end, additional_special_tokens=SPECIAL
    )
    first, last = ("{% generation %}", "{% endgeneration %}") if marks else ("", "")
    fast.chat_template = template.replace("«", first).replace("»", last)
    fast.save_pretrained(str(folder))
    return HuggingFace(str(folder)), fast


def tokens_and_answers(messages: Sequence[Mapping[str, Any]], tokenizer: HuggingFace, **line: Any) -> Any:
    entry = {"messages": messages, **line}
    stream = example_of(entry, tokenizer, prompt="alpaca", score="answer", owner=0)
    return stream.tokens.tolist(), stream.is_scored.tolist()


@pytest.mark.parametrize("marks", [False, True], ids=["found", "marked"])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_answers_are_those_of_transformers(
    kind: str, template: str, conversation: str, marks: bool, tmp_path: Path
) -> None:
    ours, plain = load(tmp_path / "ours", TEMPLATES[template], kind=kind, marks=marks)
    _, theirs = load(tmp_path / "theirs", TEMPLATES[template], kind=kind, marks=True)
    messages = CONVERSATIONS[conversation]
    expected = theirs.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    assert plain.apply_chat_template(messages)["input_ids"] == expected["input_ids"]
    tokens, answers = tokens_and_answers(messages, ours)
    assert tokens == expected["input_ids"], "neither a start nor an end token is added"
    assert answers == [bool(each) for each in expected["assistant_masks"]] and any(answers)


def templates_of_trl() -> dict[str, tuple[str, str]]:
    """Templates as they come with `trl`, without and with marks of the answers; those of texts alone."""
    try:
        folder = Path(str(distribution("trl").locate_file("trl/chat_templates")))
    except PackageNotFoundError:
        return {}
    names = [path.stem.removesuffix("_training") for path in sorted(folder.glob("*_training.jinja"))]
    read = {
        name: tuple((folder / f"{name}{end}.jinja").read_text("utf-8") for end in ("", "_training")) for name in names
    }
    return {name: pair for name, pair in read.items() if name != "llava_next"}


# They write contents that are lists, and nothing of a text
UNTOLD = {"idefics3", "smolvlm"}


@pytest.mark.skipif(not templates_of_trl(), reason="trl is not installed")
@pytest.mark.parametrize("name", templates_of_trl())
@pytest.mark.parametrize("kind", KINDS)
def test_templates_of_trl_give_its_tokens_and_its_answers(kind: str, name: str, tmp_path: Path) -> None:
    """Exactly where the template marks answers.  Found answers lack at most the role before and the blanks behind."""
    plain, training = templates_of_trl()[name]
    start = "<|end|>" if "bos_token" in plain else None
    ours, _ = load(tmp_path / "plain", plain, kind=kind, start=start)
    marked, theirs = load(tmp_path / "training", training, kind=kind, start=start)
    for messages in (CONVERSATIONS["two_turns"][1:], CONVERSATIONS["thoughts"]):
        expected = theirs.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        answers = [bool(each) for each in expected["assistant_masks"]]
        assert any(answers)
        assert tokens_and_answers(messages, marked) == (expected["input_ids"], answers)
        if name in UNTOLD:
            with pytest.raises(DataError, match="does not tell answers from the rest"):
                tokens_and_answers(messages, ours)
            continue
        tokens, found = tokens_and_answers(messages, ours)
        if tokens == expected["input_ids"]:  # some training templates keep thoughts that the others drop
            assert all(theirs or not mine for mine, theirs in zip(found, answers, strict=True)) and any(found)


@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_smollm2s_own_tokenizer_and_template(conversation: str) -> None:
    try:
        folder = smollm2()
    except NotDecidableHere as error:
        pytest.skip(str(error))
    theirs, messages = transformers.AutoTokenizer.from_pretrained(folder), CONVERSATIONS[conversation]
    tokens, found = tokens_and_answers(messages, HuggingFace(str(folder)))
    assert tokens == theirs.apply_chat_template(messages)["input_ids"]
    said = theirs.decode([token for token, is_answer in zip(tokens, found, strict=True) if is_answer])
    assert said == "".join(f"{each['content']}<|im_end|>\n" for each in messages if each["role"] == "assistant")


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALLS: list[dict[str, Any]] = [
    {"role": "user", "content": "One and two?"},
    {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]},
    {"role": "tool", "name": "add", "content": "3"},
    {"role": "assistant", "content": "It is 3."},
    {"role": "user", "content": "yes"},
    {"role": "assistant", "content": "yes"},
]
CALLING = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n«{{ m.content or '' }}"
    "{% for call in m.tool_calls or () %}<|sep|>{{ call.function | tojson }}<|sep|>{% endfor %}<|im_end|>\n»"
    "{% elif m.role == 'tool' %}<|im_start|>tool {{ m.name }}\n{{ m.content }}<|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# a tool's result in the turn of its call
IN_ONE_TURN = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% if loop.first or loop.previtem.role == 'user' %}"
    "<|im_start|>{% endif %}«{% for call in m.tool_calls or () %}<|sep|>{{ call.function | tojson }}{% endfor %}»"
    "{% if m.tool_calls %}{{ messages[loop.index].content }}{% endif %}«{{ m.content or '' }}»"
    "{% elif m.role == 'user' %}<|im_start|>{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("marks", [False, True], ids=["found", "marked"])
def test_tools_and_their_results_are_written_by_the_template_and_only_calls_are_answers(
    marks: bool, tmp_path: Path
) -> None:
    ours, _ = load(tmp_path / "ours", CALLING, marks=marks)
    _, theirs = load(tmp_path / "theirs", CALLING, marks=True)
    expected = theirs.apply_chat_template(CALLS, tools=TOOLS, return_dict=True, return_assistant_tokens_mask=True)
    for tools in (TOOLS, json.dumps(TOOLS)):
        tokens, answers = tokens_and_answers(CALLS, ours, tools=tools)
        assert tokens == expected["input_ids"]
        assert answers == [bool(each) for each in expected["assistant_masks"]]
    scored = ours.decode(token for token, answer in zip(tokens, answers, strict=True) if answer)
    assert '"arguments": {"a": 1}' in scored and "It is 3." in scored
    assert tokens_and_answers(CALLS, ours)[0] == theirs.apply_chat_template(CALLS)["input_ids"] != tokens


def test_a_template_that_writes_a_tools_result_into_an_answer_has_to_mark_it(tmp_path: Path) -> None:
    ours, _ = load(tmp_path / "ours", IN_ONE_TURN)
    with pytest.raises(DataError, match=r"does not tell answers from the rest"):
        tokens_and_answers(CALLS, ours)
    marked, theirs = load(tmp_path / "marked", IN_ONE_TURN, marks=True)
    expected = theirs.apply_chat_template(CALLS, return_dict=True, return_assistant_tokens_mask=True)
    tokens, answers = tokens_and_answers(CALLS, marked)
    assert tokens == expected["input_ids"] and answers == [bool(each) for each in expected["assistant_masks"]]


def test_a_line_sets_what_the_template_reads(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}{% if loud %}!{% endif %}<|im_end|>{% endfor %}"
    ours, theirs = load(tmp_path, template)
    messages = CONVERSATIONS["two_turns"]
    tokens, _ = tokens_and_answers(messages, ours, chat_template_kwargs={"loud": True})
    assert (
        tokens == theirs.apply_chat_template(messages, loud=True)["input_ids"] != tokens_and_answers(messages, ours)[0]
    )


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"tools": "add"}, "has tools that are not JSON"),
        ({"tools": {"name": "add"}}, "has tools=.*; expected a list of JSON schemas"),
        ({"chat_template_kwargs": ["loud"]}, "has chat_template_kwargs=.*; expected names and values in braces"),
    ],
)
def test_what_a_template_cannot_read_is_said(line: dict[str, Any], said: str, tmp_path: Path) -> None:
    ours, _ = load(tmp_path, CALLING)
    with pytest.raises(DataError, match=said):
        tokens_and_answers(CALLS, ours, **line)


def test_without_a_template_a_tool_has_a_heading() -> None:
    messages = [CALLS[0], *CALLS[2:4]]
    stream = example_of({"messages": messages}, Bytes(), prompt="alpaca", score="answer", owner=0)
    assert "### Tool:\n3\n\n### Assistant:\nIt is 3." in Bytes().decode(stream.tokens.tolist())
    assert Bytes().decode(stream.tokens[stream.is_scored].tolist()) == "It is 3."


def test_all_of_a_conversation_is_scored_where_that_is_asked_for(tmp_path: Path) -> None:
    ours, theirs = load(tmp_path, TEMPLATES["thinks"])
    messages = CONVERSATIONS["thoughts"]
    stream = example_of({"messages": messages}, ours, prompt="alpaca", score="all", owner=0)
    assert stream.tokens.tolist() == theirs.apply_chat_template(messages)["input_ids"]
    assert stream.is_scored.tolist() == [False] + [True] * (len(stream.tokens) - 1)


def test_a_template_without_the_end_token_is_told_of(tmp_path: Path) -> None:
    for end, said in [("<|im_end|>", False), ("<|end|>", True)]:
        folder = tmp_path / end.strip("<|>")
        load(folder, TEMPLATES["chatml"], end=end)
        path = write_lines(tmp_path / "a.jsonl", [{"messages": CONVERSATIONS["two_turns"]}])
        notes = jsonl(0, path=path, test_path=path, tokenizer=str(folder)).notes
        assert any("no answer of the 1 training conversations has the end token" in note for note in notes) == said


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages | length }}",
        "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ loop.length }}{{ m.content | length }}{{ m.content }}{% endfor %}",
    ],
    ids=["left_out", "twice", "counted"],
)
def test_answers_that_a_template_does_not_tell_apart_are_refused(template: str, tmp_path: Path) -> None:
    ours, _ = load(tmp_path, template)
    with pytest.raises(DataError, match=r"does not tell answers from the rest; mark them .* or use data.score=all"):
        tokens_and_answers(CONVERSATIONS["two_turns"], ours)
