"""Online adaptation: hypergradients of token weights through a language model, and the structure of a stream."""

import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional

from fedsign.bilevel.adaptation import THETA, Passage, Reader, adaptation, token_weights, uniform
from fedsign.bilevel.estimate import Method
from fedsign.bilevel.forward_gradient import forward_exact
from fedsign.bilevel.hypergradients import rgu
from fedsign.bilevel.unroll import Problem, Tree, final_state
from fedsign.models.gpt import GPT, gpt
from fedsign.seeding import globals_seeded
from simulations.recipes.fg2u import reading

LENGTH, VOCABULARY, NUM_FEATURES = 6, 7, 3


def small(dtype: torch.dtype = torch.float64) -> GPT:
    with globals_seeded(0):
        return gpt((LENGTH,), VOCABULARY, depth=2, width=4, num_heads=2, init_std=0.3).to(dtype)


def passages(count: int) -> list[Passage]:
    draw = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, VOCABULARY, (1, LENGTH + 1), generator=draw) for _ in range(count)]
    return [
        Passage(row[:, :-1], row[:, 1:], torch.randn(1, LENGTH, NUM_FEATURES, generator=draw, dtype=torch.float64))
        for row in rows
    ]


def problem(depth: int) -> tuple[Problem, Tree]:
    reader, (question, *read) = Reader(small()), passages(depth + 1)
    inner = adaptation(reader, start=reader.parameters(), lr=0.5)
    meta = uniform(NUM_FEATURES, num_hidden=2, generator=torch.Generator().manual_seed(2))
    told = {key: each.double() + 0.3 for key, each in meta.items()}  # away from uniform, where half of the slopes are 0
    return (
        Problem(
            inner=inner,
            data=read,
            outer=lambda state, _: reader.losses(state[THETA], question.tokens, question.targets).mean(),
        ),
        told,
    )


def flat(tree: Tree) -> Tensor:
    return torch.cat([each.flatten() for each in tree.values()])


@pytest.mark.parametrize("method", [rgu(), forward_exact()], ids=["reverse", "forward"])
def test_hypergradients_of_the_weight_model_are_those_of_finite_differences(method: Method) -> None:
    """Central differences through three steps of a GPT in float64: an error of about step^2."""
    asked, meta = problem(3)
    step, expected = 1e-5, []
    for key, each in meta.items():
        for at in range(each.numel()):
            move = torch.zeros(each.numel(), dtype=each.dtype)
            move[at] = step
            ends = [{**meta, key: each + sign * move.view(each.shape)} for sign in (1, -1)]
            up, down = (float(asked.outer(final_state(asked, end), end)) for end in ends)
            expected.append((up - down) / (2 * step))
    found = flat(method(asked, meta, generator=torch.Generator()).gradient)
    assert found.norm() > 1e-3
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), atol=1e-8, rtol=1e-6)


def test_a_weight_model_that_has_learned_nothing_trains_as_plain_sgd_does() -> None:
    """Exactly 1 for every token, and torch's own SGD on the mean loss of each passage."""
    network, read = small(), passages(4)
    reader = Reader(network)
    meta = {
        key: each.double()
        for key, each in uniform(NUM_FEATURES, num_hidden=2, generator=torch.Generator().manual_seed(2)).items()
    }
    assert all(bool((token_weights(meta, each.features) == 1).all()) for each in read)
    inner = adaptation(reader, start=reader.parameters(), lr=0.5)
    found = final_state(Problem(inner=inner, data=read, outer=lambda state, _: state[THETA].sum()), meta)[THETA]
    optimizer = torch.optim.SGD(network.parameters(), lr=0.5)
    for passage in read:
        optimizer.zero_grad()
        functional.cross_entropy(network(passage.tokens).flatten(0, 1), passage.targets.flatten()).backward()
        optimizer.step()
    before, after = inner.initial(meta)[THETA], reader.parameters()
    assert (after - before).norm() > 0.1
    torch.testing.assert_close(found, after)


def test_weights_are_positive_and_fall_upon_tokens_by_their_features() -> None:
    """A token of weight 0 teaches nothing; features decide which one it is."""
    reader, (read, *_) = Reader(small()), passages(1)
    meta = {"raw": torch.zeros((), dtype=torch.float64)}
    inner = adaptation(
        reader, start=reader.parameters(), lr=0.5, weigh=lambda _, features: (features[..., 0] > 0) * 1.0
    )
    assert 0 < int((read.features[..., 0] > 0).sum()) < LENGTH
    other = torch.where(read.features[..., 0] > 0, read.targets, (read.targets + 1) % VOCABULARY)
    ends = [inner.step(inner.initial(meta), meta, each)[THETA] for each in (read, read._replace(targets=other))]
    torch.testing.assert_close(ends[0], ends[1], atol=0, rtol=0)
    draw = torch.Generator().manual_seed(3)
    drawn = {key: 5 * torch.randn(each.shape, generator=draw).double() for key, each in problem(1)[1].items()}
    assert bool((token_weights(drawn, read.features) > 0).all())


def test_a_reader_computes_what_its_network_does() -> None:
    network, (read, *_) = small(), passages(1)
    reader = Reader(network)
    torch.testing.assert_close(reader.logits(reader.parameters(), read.tokens), network(read.tokens).detach())
    moved = reader.parameters() + 0.1
    named = {name: each.detach() + 0.1 for name, each in network.named_parameters()}
    torch.testing.assert_close(
        reader.logits(moved, read.tokens), functional_call(network, named, (read.tokens,)).detach()
    )


def test_an_answer_is_a_word_that_was_read() -> None:
    """Two words occur in passages at even positions; the one that begins in a window of questions is an answer."""
    fill = "." * reading.LENGTH
    text = "." + "".join(
        [
            "alpha".ljust(reading.LENGTH, "."),  # read
            "gamma.alpha".ljust(reading.LENGTH, "."),  # asked: gamma was not read
            ("." * (reading.LENGTH - 2) + "be"),  # read: where beta begins
            "ta.beta".ljust(reading.LENGTH, "."),  # asked: the rest of a word that was begun is none
            *[fill] * 8,
        ]
    )
    network = gpt((reading.LENGTH,), reading.texts().tokenizer.vocabulary_size, depth=1, width=4, num_heads=1)
    reader = Reader(network)
    (found,) = reading.excerpts([text], reader, reader.parameters())
    assert len(found.passages) == reading.PASSAGES_OF_EXCERPT == len(found.targets)
    assert found.passages[0].features.shape == (1, reading.LENGTH, reading.NUM_FEATURES)
    asked = found.targets[found.is_answer].tolist()
    assert reading.texts().tokenizer.decode(asked) == "alphabeta"


def test_no_part_of_the_documents_holds_a_paragraph_of_another() -> None:
    parts = [reading.texts().pretraining, reading.texts().learning, reading.texts().judging]
    long = [
        {each.strip() for text in part for each in text.split("\n\n") if len(each) >= 40 and each.strip()}
        for part in parts
    ]
    assert all(len(each) > 50 for each in long)
    assert not (long[0] & long[1] or long[0] & long[2] or long[1] & long[2])
