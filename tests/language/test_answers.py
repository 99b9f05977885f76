"""Generated answers: which are asked for, how they are decoded, and how they are scored."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedsign.config import from_dict
from fedsign.data.text import libraries as llm
from fedsign.data.text.answers import answers_at, places_of
from fedsign.data.text.jsonl import jsonl
from fedsign.data.text.tokenizers import Bytes
from fedsign.errors import ConfigError
from fedsign.metrics.answer_check import run_check
from fedsign.metrics.exact_match import exact_match, normalized
from fedsign.metrics.generated import GENERATED
from fedsign.metrics.greedy import greedy
from fedsign.metrics.rouge import rouge_1, rouge_2, rouge_l
from fedsign.models.causal_lm import CausalLM
from fedsign.models.gpt import GPT
from fedsign.numerics import Numerics
from fedsign.workload import Workload
from tests.language.language_samples import Bigram, save_tokenizer, sums, write_lines

CPU = Numerics(device=torch.device("cpu"))
VOCABULARY = 40
KINDS = ["bigram", "gpt", "gpt2", "llama"]


def decoder(kind: str) -> nn.Module:
    """A random decoder with sharp logits, so that it says different tokens."""
    torch.manual_seed(0)
    if kind == "bigram":
        return Bigram((32,), VOCABULARY)
    if kind == "gpt":
        return GPT((32,), VOCABULARY, width=16, depth=2, num_heads=2, init_std=0.5).eval()
    pytest.importorskip("transformers")
    library = llm.transformers("this test")
    sizes = {"gpt2": {"n_positions": 32}, "llama": {"max_position_embeddings": 32, "intermediate_size": 32}}[kind]
    config = library.AutoConfig.for_model(
        kind, vocab_size=VOCABULARY, hidden_size=16, num_attention_heads=2, num_hidden_layers=2,
        initializer_range=0.5, **sizes,
    )  # fmt: skip
    return CausalLM(library.AutoModelForCausalLM.from_config(config).eval())


def alone(model: nn.Module, prompt: Tensor, num: int, end: int = -1) -> list[int]:
    """The likeliest token again and again, of one prompt, from all tokens before it."""
    tokens = prompt.tolist()
    for _ in range(num):
        with torch.no_grad():
            token = int(model(torch.tensor([tokens]))[0, -1].argmax())
        if token == end:
            break
        tokens.append(token)
    return tokens[len(prompt) :]


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_prompts_is_continued_as_each_alone(kind: str) -> None:
    """Lengths from 1 token to all but the last of a block, whose last new token takes no position."""
    model, num = decoder(kind), 8
    generator = torch.Generator().manual_seed(1)
    lengths = [1, 2, 3, 7, 12, 25, 32 + 1 - num]
    prompts = [torch.randint(1, VOCABULARY, (length,), generator=generator) for length in lengths]
    end = alone(model, prompts[2], num)[3]  # a token that the model says
    expected = [alone(model, prompt, num, end) for prompt in prompts]
    with torch.no_grad():
        found = greedy(model, prompts, CPU, num=num, end_id=end, pad_id=end)
    assert [tokens.tolist() for tokens in found] == expected
    assert len({*map(tuple, expected)}) > 4, "they differ"
    assert min(map(len, expected)) < num, "some end early"
    assert kind == "bigram" or num in map(len, expected), "which soon repeats itself, and ends"


def test_a_models_own_settings_of_generation_do_not_apply() -> None:
    model: Any = decoder("llama")
    prompts = [torch.tensor([5, 6, 7])]
    expected = alone(model, prompts[0], 6, end=0)
    own = model.network.generation_config
    own.update(do_sample=True, temperature=9.0, repetition_penalty=50.0, max_length=2)
    assert [greedy(model, prompts, CPU, num=6, end_id=0, pad_id=0)[0].tolist()] == [expected]
    assert model.network.generation_config is own and own.temperature == 9.0


# --- which answers are asked for

LINES = [
    {"instruction": "Add.", "input": "1 2", "output": "3"},
    {"messages": [{"role": role, "content": text} for role, text in (
        ("user", "One?"), ("assistant", "yes"), ("user", "Two?"), ("assistant", "no"),
    )]},
    {"instruction": "Say hello.", "output": "Hello!"},
]  # fmt: skip
ASKED = [
    ("### Instruction:\nAdd.\n\n### Input:\n1 2\n\n### Response:\n", "3"),
    ("### User:\nOne?\n\n### Assistant:\n", "yes"),
    ("### User:\nOne?\n\n### Assistant:\nyes\n\n### User:\nTwo?\n\n### Assistant:\n", "no"),
    ("### Instruction:\nSay hello.\n\n### Response:\n", "Hello!"),
]


def asked(samples: Any, text: Any) -> list[tuple[str, str]]:
    return [
        (text.decode(each.prompt.tolist()), text.decode(each.tokens.tolist()))
        for each in answers_at(samples, places_of(samples))
    ]


@pytest.mark.parametrize("packing", [True, False])
def test_prompts_and_answers_are_those_of_the_lines(packing: bool, tmp_path: Path) -> None:
    """A conversation has several, each after the true ones before it."""
    path = write_lines(tmp_path / "a.jsonl", LINES)
    data = jsonl(0, path=path, test_path=path, prompt="short", packing=packing, block_length=256)
    assert len(data.test) == (1 if packing else 3)
    assert asked(data.test, data.text) == ASKED
    assert all(
        each.prompt[0] == each.tokens[-1] == Bytes().end_id for each in answers_at(data.test, places_of(data.test))
    )


def test_a_prompt_of_a_chat_template_ends_with_the_header_of_an_answer(tmp_path: Path) -> None:
    tokenizer, path = save_tokenizer(tmp_path / "tokenizer"), write_lines(tmp_path / "a.jsonl", LINES[1:2])
    data = jsonl(0, path=path, test_path=path, tokenizer=tokenizer, block_length=256)
    _, second = answers_at(data.test, places_of(data.test))
    library: Any = llm.transformers("this test").AutoTokenizer.from_pretrained(tokenizer)
    messages = LINES[1]["messages"][:3]
    expected = library.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert second.prompt.tolist() == expected
    assert library.decode(second.tokens) == "no<|im_end|>\n", "as the template writes it"
    model = parrot("no", after="\n", tokenizer=data.text)
    work = workload(tmp_path, lines=[{"messages": LINES[1]["messages"][2:]}], data={"tokenizer": tokenizer})
    assert work.evaluate(model)["exact_match"] == 1, "what follows the end token does not count"


def workload(tmp_path: Path, *, lines: Sequence[Any] = sums(9), server: Any = None, **changes: Any) -> Workload:
    path = write_lines(tmp_path / "lines.jsonl", lines)
    data = {"name": "jsonl", "path": path, "test_path": path, "prompt": "short", "block_length": 96}
    tree = {
        "task": "language",
        "metrics": ["exact_match", "rouge_1", "rouge_2", "rouge_l"],
        "data": data | changes.pop("data", {}),
        "model": {"name": "gpt", "width": 16, "depth": 1, "num_heads": 2},
        "partition": {"name": "iid", "num_clients": 2},
        "server": {"cohort_size": 2, "max_new_tokens": 6} | (server or {}),
        "strategy": {"name": "fedavg"},
    }
    return Workload(from_dict(tree | changes))


def parrot(text: str, *, after: str = "\n", tokenizer: Any = Bytes()) -> Bigram:  # noqa: B008 - it holds no state
    """Says a text, whose characters all differ, after a character."""
    model = Bigram((96,), tokenizer.vocabulary_size)
    said = [*tokenizer.encode(after + text), tokenizer.end_id]
    with torch.no_grad():
        for token, following in pairwise(said):
            model.table[token, following] = 100.0
    return model


def test_a_run_records_the_share_of_right_answers(tmp_path: Path) -> None:
    """Sums 2k + 1 up to 17: one answer of nine is 7.  Each answer is one word, and shares it or not."""
    work = workload(tmp_path)
    metrics = work.evaluate(parrot("7"))
    assert metrics["exact_match"] == metrics["rouge_1"] == metrics["rouge_l"] == pytest.approx(1 / 9)
    assert metrics["rouge_2"] == 0
    assert work.evaluate(parrot("1 7"))["rouge_1"] == pytest.approx((2 / 3 + 2 / 3) / 9), "of 1 and 7"
    assert work.evaluate(parrot("1234567"))["exact_match"] == 0, "cut after max_new_tokens"


def test_an_answer_stops_where_its_block_ends(tmp_path: Path) -> None:
    """The reference is cut there, too, so that a model that knows it is right."""
    line = {"instruction": "Count.", "output": "123456789"}
    num = len("### Instruction:\nCount.\n\n### Response:\n")
    work = workload(tmp_path, lines=[line], data={"block_length": 1 + num + 3}, server={"max_new_tokens": 50})
    assert work.evaluate(parrot("123456789"))["exact_match"] == 1.0
    (answer,) = answers_at(work.dataset.test, places_of(work.dataset.test))
    assert len(answer.tokens) == 4


def test_references_that_are_longer_than_answers_are_found_before_a_run(tmp_path: Path) -> None:
    """Of the sums 1 to 17, 11, 13, 15, and 17 have two tokens; the end token does not count."""
    (found,) = run_check(workload(tmp_path, server={"max_new_tokens": 1}))
    assert found["message"].startswith("4 of 9 reference answers have more tokens than server.max_new_tokens=1, ")
    assert "server.max_new_tokens=2 to" in found["remedy"]
    for changes in ({"server": {"max_new_tokens": 2}}, {"metrics": [], "server": {"max_new_tokens": 1}}):
        assert run_check(workload(tmp_path, **changes)) == []


def test_a_sample_is_the_same_in_every_round_and_that_of_the_seed(tmp_path: Path) -> None:
    """Of 9 sums, 4 are answered: the share of right answers is a multiple of a quarter, of those that are drawn."""
    shares = []
    for seed in range(8):
        work = workload(tmp_path, server={"answers": 4}, seed=seed)
        first, second = (work.evaluate(parrot("7"), round=number)["exact_match"] for number in (1, 2))
        assert first == second in (0, 0.25)
        shares.append(first)
    assert {*shares} == {0, 0.25}, "sometimes the one right answer is drawn"


def test_answers_are_evaluated_every_so_many_rounds(tmp_path: Path) -> None:
    work = workload(tmp_path, server={"answers_every": 3}, metrics=["token_accuracy", "exact_match"], rounds=7)
    due = [number for number in range(1, 8) if "exact_match" in work.evaluate(parrot("7"), round=number)]
    assert due == [3, 6]
    with pytest.raises(ConfigError, match=r"server\.answers_every=3 was given, but the run has rounds=2"):
        workload(tmp_path, server={"answers_every": 3}, rounds=2)


def test_metrics_ask_the_model_only_once(tmp_path: Path) -> None:
    passes = []

    class Counting(Bigram):
        def forward(self, rows: Tensor) -> Tensor:
            passes.append(rows.shape)
            return super().forward(rows)

    def num_passes(metrics: list[str]) -> int:
        passes.clear()
        workload(tmp_path, metrics=metrics).evaluate(Counting((96,), 257, scale=0.0))
        return len(passes)

    silent = num_passes([])
    assert silent < num_passes(["rouge_l"]) == num_passes(["rouge_l", "exact_match", "rouge_1"])


# --- how they are scored


def test_answers_are_normalized_as_in_squad() -> None:
    assert normalized(" The  Cat, an-d\ta dog's\nTOY. ") == "cat and dogs toy"
    assert normalized("theatre") == "theatre", "only whole words are articles"
    assert exact_match(["The cat!", "cats", ""], ["cat", "cat", "the"]) == pytest.approx(2 / 3)


def test_rouge_counts_words_pairs_and_subsequences() -> None:
    """3 of 4 and 5 words are shared, of the pairs only `b c`, and the subsequence is `b c d`."""
    one, other = ["b c x d"], ["a b c y d"]
    assert rouge_1(one, other) == pytest.approx(2 * 3 / 9)
    assert rouge_2(one, other) == pytest.approx(2 * 1 / 7)
    assert rouge_l(one, other) == pytest.approx(2 * 3 / 9)
    assert rouge_l(["d c b"], ["b c d"]) == pytest.approx(1 / 3) and rouge_1(["d c b"], ["b c d"]) == 1
    assert rouge_1(["b b b"], ["b c"]) == pytest.approx(2 / 5), "a word counts as often as in both"
    assert rouge_1([""], ["b"]) == rouge_2(["b"], ["b"]) == rouge_l([""], [""]) == 0


_TEXTS = st.text(alphabet="abAB1é .,-\n", max_size=30)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(_TEXTS, _TEXTS), min_size=1, max_size=3))
def test_rouge_is_that_of_googles_package(pairs: list[tuple[str, str]]) -> None:
    scorer = pytest.importorskip("rouge_score.rouge_scorer").RougeScorer(["rouge1", "rouge2", "rougeL"])
    scores = [scorer.score(reference, prediction) for prediction, reference in pairs]
    predictions, references = zip(*pairs, strict=True)
    for name, metric in (("rouge1", rouge_1), ("rouge2", rouge_2), ("rougeL", rouge_l)):
        expected = sum(score[name].fmeasure for score in scores) / len(scores)
        assert metric(predictions, references) == pytest.approx(expected, abs=1e-12)


# --- what is refused


def test_text_without_prompts_is_refused_before_a_run(tmp_path: Path) -> None:
    said = r"metrics=.* was given, but data.name=jsonl has no answers behind prompts; use data.name=jsonl with data"
    with pytest.raises(ConfigError, match=said):
        workload(tmp_path, data={"score": "all"}).dataset  # noqa: B018
    tree = {"task": "language", "metrics": ["rouge_l"], "data": {"name": "pytext"}, "partition": {"name": "iid"}}
    with pytest.raises(ConfigError, match=r"data\.name=pytext has no answers behind prompts"):
        Workload(from_dict(tree)).dataset  # noqa: B018
    with pytest.raises(ConfigError, match=r"data\.name=digits has class labels, for which 'exact_match' says nothing"):
        Workload(from_dict({"metrics": ["exact_match"]})).dataset  # noqa: B018


def test_a_metric_of_ones_own_gets_the_texts(tmp_path: Path) -> None:
    def answers(predictions: list[str], references: list[str]) -> float:
        assert [*predictions] == ["7"] * 9 and references == [str(2 * k + 1) for k in range(9)]
        return len(predictions)

    answers.inputs = GENERATED  # type: ignore[attr-defined]
    work = workload(tmp_path, metrics=[])
    evaluation = type(work.evaluation)(
        task=work.task, metrics=[("own", answers)], numerics=work.numerics, text=work.dataset.text, config=work.config
    )
    assert evaluation.evaluate(parrot("7"), work.dataset.test, num_threads=1)["own"] == 9
