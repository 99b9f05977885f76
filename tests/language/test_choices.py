"""Multiple choice by likelihood: what is asked, against one choice at a time by `transformers`, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedsign.config import from_dict
from fedsign.data.text import libraries as llm
from fedsign.data.text.blocks import Question
from fedsign.data.text.jsonl import jsonl
from fedsign.data.text.tokenizers import Bytes
from fedsign.errors import ConfigError, DataError
from fedsign.metrics.base import Evaluated
from fedsign.metrics.choices import CHOICES, acc, acc_norm
from fedsign.workload import Workload
from simulations import run
from tests.language.language_samples import save_tokenizer, sums, write_lines

LINES = [
    {"question": "Which is red?", "choices": ["blood", "grass", "the sky"], "answer": 0, "subject": "colors"},
    {"instruction": "Complete.", "input": "One, two,", "choices": ["three", "four"], "label": "0"},
    {
        "messages": [
            {"role": "user", "content": "One?"},
            {"role": "assistant", "content": "yes"},
            {"role": "user", "content": "Two?"},
        ],
        "choices": ["no", "yes", "näh", "no way, never"],
        "answer": 2,
    },
]


def workload(tmp_path: Path, *, lines: Any = LINES, data: Any = None, **changes: Any) -> Workload:
    path = write_lines(tmp_path / "lines.jsonl", lines)
    tree = {
        "task": "language",
        "metrics": ["acc", "acc_norm"],
        "data": {"name": "jsonl", "path": path, "test_path": path, "prompt": "short", "block_length": 96}
        | (data or {}),
        "model": {"name": "gpt", "width": 16, "depth": 1, "num_heads": 2},
        "partition": {"name": "iid", "num_clients": 1},
        "server": {"cohort_size": 1},
        "strategy": {"name": "fedavg"},
    }
    return Workload(from_dict(tree | changes))


def inputs_of(work: Workload) -> tuple[list[torch.Tensor], list[Question]]:
    evaluated = Evaluated(
        model=work.make_model().eval(),
        samples=work.dataset.test,
        text=work.dataset.text,
        config=work.config,
        numerics=work.numerics,
    )
    with torch.no_grad():
        return CHOICES.of(evaluated)


# --- what is asked


@pytest.mark.parametrize("packing", [True, False])
def test_a_line_trains_its_right_choice_and_asks_for_all(packing: bool, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [*LINES, *sums(2)])
    data = jsonl(0, path=path, test_path=path, prompt="short", block_length=160, packing=packing)
    text = Bytes()
    scored = [text.decode(row[row >= 0].tolist()) for row in data.train.targets]
    assert "".join(scored) == "blood" + "three" + "yesnäh" + "1" + "3"
    assert data.test.questions is not None
    asked = [question for of_block in data.test.questions for question in of_block or ()]
    assert [text.decode(question.prompt.tolist()) for question in asked] == [
        "### Instruction:\nWhich is red?\n\n### Response:\n",
        "### Instruction:\nComplete.\n\n### Input:\nOne, two,\n\n### Response:\n",
        "### User:\nOne?\n\n### Assistant:\nyes\n\n### User:\nTwo?\n\n### Assistant:\n",
    ]
    assert [tuple(text.decode(each.tolist()) for each in question.choices) for question in asked] == [
        tuple(line["choices"]) for line in LINES
    ]
    assert [question.answer for question in asked] == [0, 0, 2]
    assert asked[2].num_bytes == (2, 3, 4, 13)
    assert all(question.prompt[0] == text.start_id for question in asked)


def test_a_chat_template_is_asked_for_an_answer(tmp_path: Path) -> None:
    tokenizer, path = save_tokenizer(tmp_path / "tokenizer"), write_lines(tmp_path / "a.jsonl", LINES[2:])
    data = jsonl(0, path=path, test_path=path, tokenizer=tokenizer, block_length=256)
    library: Any = llm.transformers("this test").AutoTokenizer.from_pretrained(tokenizer)
    ((question,),) = data.test.questions
    asked = library.apply_chat_template(LINES[2]["messages"], add_generation_prompt=True, return_dict=True)
    assert question.prompt.tolist() == asked["input_ids"]
    assert [library.decode(each) for each in question.choices] == LINES[2]["choices"]


# --- what it scores


def by_brute_force(network: Any, question: Question, length: int) -> list[float]:
    """Each choice alone: the sum of its tokens' log-probabilities, of the last `length` tokens of prompt and choice."""
    found = []
    for choice in question.choices:
        tokens = torch.tensor([[*question.prompt, *choice]])[:, -(length + 1) :]
        scores = network(tokens[:, :-1]).logits[0].double().log_softmax(-1)
        start = tokens.shape[1] - len(choice)
        found.append(sum(float(scores[at - 1, tokens[0, at]]) for at in range(start, tokens.shape[1])))
    return found


@pytest.mark.parametrize(("kind", "length"), [("llama", 96), ("gpt2", 96), ("llama", 24)])
def test_likelihoods_are_those_of_each_choice_alone_in_transformers(kind: str, length: int, tmp_path: Path) -> None:
    """24 tokens are fewer than a prompt has: its beginning is dropped, as lm-evaluation-harness does."""
    pytest.importorskip("transformers")
    library = llm.transformers("this test")
    sizes = {"gpt2": {"n_positions": length}, "llama": {"max_position_embeddings": length, "intermediate_size": 32}}
    config = library.AutoConfig.for_model(
        kind, vocab_size=259, hidden_size=16, num_attention_heads=2, num_hidden_layers=2, initializer_range=0.5,
        **sizes[kind],
    )  # fmt: skip
    config.save_pretrained(tmp_path / "config")
    longer = [{"question": "Add 1.", "choices": ["2", "three", "4"], "answer": 0}]
    lines = LINES if length == 96 else [{**longer[0], "question": "?"}, *longer]
    work = workload(
        tmp_path,
        lines=lines,
        data={"block_length": length, "score": "all"},
        model={"name": "transformers", "config": str(tmp_path / "config")},
    )
    network: Any = work.make_model().eval()
    found, questions = inputs_of(work)
    assert len(questions) == len(lines)
    with torch.no_grad():
        expected = [by_brute_force(network.network, question, length) for question in questions]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.numpy(), other, rtol=1e-5)
    right = [int(np.argmax(values)) == question.answer for values, question in zip(expected, questions, strict=True)]
    per_byte = [
        int(np.argmax(np.array(values) / question.num_bytes)) == question.answer
        for values, question in zip(expected, questions, strict=True)
    ]
    assert work.evaluate(network)["acc"] == pytest.approx(np.mean(right))
    assert work.evaluate(network)["acc_norm"] == pytest.approx(np.mean(per_byte))


def question(*sizes: int, answer: int) -> Question:
    none = np.zeros(0, dtype=np.int64)
    return Question(prompt=none, choices=(none,) * len(sizes), num_bytes=sizes, answer=answer)


def test_lengths_decide_only_where_they_are_asked_for() -> None:
    """-4 of 2 bytes is -2 a byte, -6 of 6 bytes is -1."""
    scores = [torch.tensor([-4.0, -6.0], dtype=torch.float64)] * 2
    asked = [question(2, 6, answer=0), question(2, 6, answer=1)]
    assert (acc(scores[:1], asked[:1]), acc_norm(scores[:1], asked[:1])) == (1.0, 0.0)
    assert (acc(scores[1:], asked[1:]), acc_norm(scores[1:], asked[1:])) == (0.0, 1.0)
    assert acc(scores, asked) == acc_norm(scores, asked) == 0.5


def test_a_model_learns_to_choose(tmp_path: Path) -> None:
    """It is always the blue one, wherever that is named."""
    colors = ["red", "green", "blue"]
    lines = [
        {"question": f"{word}?", "choices": colors[start:] + colors[:start], "answer": 2 - start}
        for word in ("Which", "What", "Your choice", "My choice", "And now", "And then", "Again", "Last")
        for start in range(3)
    ]
    path = write_lines(tmp_path / "a.jsonl", lines)
    done = run(
        {
            "rounds": 1,
            "callbacks": [],
            "task": "language",
            "metrics": ["acc", "acc_norm", "exact_match"],
            "data": {"name": "jsonl", "path": path, "prompt": "short", "block_length": 64, "validation_fraction": 0.3},
            "partition": {"name": "iid", "num_clients": 1},
            "model": {"name": "gpt", "width": 32, "depth": 1, "num_heads": 2},
            "client": {"local_steps": 60, "batch_size": 8, "lr": 1e-2, "optimizer": {"name": "adamw"}},
            "strategy": {"name": "fedavg"},
            "server": {"cohort_size": 1, "max_new_tokens": 8},
            "results": {"root": str(tmp_path)},
        }
    )
    assert {done.rounds[-1][name] for name in ("acc", "acc_norm", "validation_acc", "exact_match")} == {1.0}


@pytest.mark.needs("deployment")  # for sites
def test_sites_ask_their_own_questions(tmp_path: Path) -> None:
    """The mean over sites, weighted by blocks, is that of all questions, since each block has one."""
    from clients.deployment.evaluator import samples_of_sites

    for site, lines in enumerate((LINES[:2], LINES[2:])):
        write_lines(tmp_path / f"site {site}" / "a.jsonl", lines)
    whole = workload(tmp_path, data={"packing": False})
    apart = Workload(
        whole.config.replace(
            **{"partition.name": "sites", "partition.roots": [str(tmp_path / f"site {site}") for site in range(2)]},
            **{"partition.num_clients": 2, "data.path": "a.jsonl", "data.test_path": "a.jsonl"},
        )
    )
    model = whole.make_model()
    first, second = (apart.evaluate(model, each) for each in samples_of_sites(apart.dataset).values())
    together = whole.evaluate(model)
    for name in ("acc", "acc_norm"):
        assert (2 * first[name] + second[name]) / 3 == pytest.approx(together[name])


# --- what is refused


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"answer": 3},
            r"line 2 of .* has the answer 3 of 3 choices; expected the position .*, from 0 to 2\.",
        ),
        ({"answer": -1}, r"has the answer -1 of 3 choices"),
        ({"answer": "A"}, r"has choices and answer='A'; expected the position of the right choice"),
        ({"answer": None}, r"has choices and answer='None'"),
        ({"answer": True}, r"has choices and answer='True'"),
        ({"choices": ["one"]}, r"has choices=\['one'\]; expected a list of two texts or more"),
        ({"choices": {"text": ["a", "b"]}}, r"has choices=\{.*; expected a list"),
        ({"choices": ["one", ""]}, "none of them empty"),
        ({"messages": LINES[2]["messages"][:2]}, "has choices, but its messages end with an answer"),
        ({"messages": 3}, "has messages of type int"),
        ({"question": 3}, "has instruction='3'; expected a text"),
    ],
)
def test_a_line_whose_choices_are_wrong_is_named(changes: Any, said: str, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [*sums(1), LINES[0] | changes])
    with pytest.raises(DataError, match=said):
        jsonl(0, path=path, test_path=path)


def test_choices_without_a_question_are_no_example(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"choices": ["a", "b"], "answer": 0}])
    with pytest.raises(DataError, match="has the keys answer, output; expected instruction"):
        jsonl(0, path=path, test_path=path)


def test_a_file_without_choices_is_refused_before_a_run(tmp_path: Path) -> None:
    said = r"metrics=.* was given, but data\.name=jsonl has no test examples with choices; use lines with \"choices\""
    with pytest.raises(ConfigError, match=said):
        workload(tmp_path, lines=sums(3)).dataset  # noqa: B018
