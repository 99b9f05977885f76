"""An update encoding changes what a client sends; the server decodes it before any other use of the reply."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedsign import workload
from fedsign.errors import ReplyError
from fedsign.federation.encoding import UpdateEncoding
from fedsign.federation.exchange import DirectExchange
from fedsign.records import CohortReply, Failure, Role, Tensors, TrainReply, TrainRequest
from simulations import run
from tests.contract.test_exchange import ROLES, SERVED, cohort, reply, stacked, taken, tree
from tests.contract.test_strategies import lines

KEPT = 5
BY_MESSAGES = "tests.contract.test_exchange"


class LargestEntries(UpdateEncoding):
    """The entries of each parameter that moved furthest: their places (int32) and by how much (bfloat16)."""

    def __init__(self, kept: int = KEPT) -> None:
        self.kept = kept

    def encode(self, reply: TrainReply, received: Tensors) -> Tensors:
        sent: Tensors = {}
        for name, tensor in reply.tensors.items():
            if reply.roles[name] is Role.BUFFER:
                sent[name] = tensor
                continue
            update = (tensor - received[name]).flatten()
            places = update.abs().topk(min(self.kept, len(update))).indices.sort().values
            sent |= {f"{name}/places": places.int(), f"{name}/values": update[places].bfloat16()}
        return sent

    def decode(self, reply: TrainReply, received: Tensors) -> Tensors:
        model: Tensors = {}
        for name, role in reply.roles.items():
            if role is Role.BUFFER:
                model[name] = reply.tensors[name]
                continue
            places, values = reply.tensors[f"{name}/places"].long(), reply.tensors[f"{name}/values"].float()
            if len(places) and not 0 <= places.min() <= places.max() < received[name].numel():
                raise ReplyError(f"'{name}/places' lie outside of the tensor.")
            update = torch.zeros(received[name].numel()).scatter(0, places, values)
            model[name] = received[name] + update.view_as(received[name])
        return model


def encode_with(monkeypatch: pytest.MonkeyPatch, encoding: UpdateEncoding) -> None:
    """As if a capability added it."""
    extensions = workload.extensions
    monkeypatch.setattr(
        workload,
        "extensions",
        lambda point: (lambda experiment: encoding,) if point == "update_encoding" else extensions(point),
    )


def link(*results: TrainReply | CohortReply | Failure, encoding: UpdateEncoding) -> DirectExchange:
    def train_many(requests: Sequence[TrainRequest]) -> Iterator[TrainReply | CohortReply | Failure]:
        yield from results

    made = DirectExchange(train_many, num_partitions=10, roles=ROLES)
    made.encoding = encoding
    return made


def test_the_server_aggregates_what_was_decoded_and_counts_what_was_sent() -> None:
    """w = (1, -2) moves by (3, 1): of one kept entry the 3 arrives; 4 + 2 bytes, and 4 of the buffer."""
    for answer in (reply(3), stacked(reply(3))):
        made = link(answer, encoding=LargestEntries(kept=1))
        (decoded,) = made.train(cohort(3))
        assert isinstance(decoded, TrainReply) and set(decoded.tensors) == set(SERVED)
        assert decoded.tensors["w"].tolist() == [4.0, -2.0] and decoded.tensors["mean"].tolist() == [3.0]
        assert made.traffic.bytes_up == 4 + 2 + 4
        assert made.traffic.dispersion.metrics() == (pytest.approx(3.0), pytest.approx(0.0))


@pytest.mark.parametrize("path", ["sequential", pytest.param("cohort", marks=pytest.mark.needs("cohort"))])
def test_a_run_is_the_same_over_messages(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The network has 64 * 8 + 8 + 8 * 10 + 10 parameters in four tensors, and no buffer."""
    client = {"local_steps": 3, "path": path}
    dense = run(tree(tmp_path, "feddyn", client=client))
    encode_with(monkeypatch, LargestEntries())
    direct = run(tree(tmp_path, "feddyn", client=client))
    spoken = run(tree(tmp_path, f"{BY_MESSAGES}:feddyn_by_messages", client=client))
    assert lines(direct) == lines(spoken)
    for line, other in zip(direct.rounds, dense.rounds, strict=True):
        assert line["bytes_up"] == 3 * 4 * KEPT * (4 + 2)
        assert other["bytes_up"] == 3 * 4 * (64 * 8 + 8 + 8 * 10 + 10) and other["bytes_down"] == line["bytes_down"]
    assert direct.rounds[-1]["loss"] != dense.rounds[-1]["loss"]


class Broken(LargestEntries):
    """Client 1 cannot encode; 2 sends undecodable data, 3 other shapes, 4 indices out of range, 5 no tensors."""

    def encode(self, reply: TrainReply, received: Tensors) -> Tensors:
        if reply.partition == 1:
            raise RuntimeError("no memory left")
        sent: dict[str, Any] = super().encode(reply, received)
        if reply.partition == 2:
            sent.popitem()
        if reply.partition == 5:
            return {"w": torch.zeros(2).numpy()}  # type: ignore[dict-item]
        if reply.partition == 4:
            sent = {name: tensor + 10**6 if name.endswith("places") else tensor for name, tensor in sent.items()}
        return sent

    def decode(self, reply: TrainReply, received: Tensors) -> Tensors:
        model = super().decode(reply, received)
        return model | {name: torch.zeros(1, 2, 3) for name in model} if reply.partition == 3 else model


@pytest.mark.parametrize("strategy", ["fedavg", f"{BY_MESSAGES}:fedavg_by_messages"])
def test_what_cannot_be_coded_is_its_own_clients_failure(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode_with(monkeypatch, Broken())
    done = run(tree(tmp_path, strategy, rounds=1, server={"cohort_size": 6}))
    (line,) = done.rounds
    reasons = {each["client"]: each["reason"] for each in line["failures"]}
    assert sorted(reasons) == [1, 2, 3, 4, 5] and line["num_replies"] == 1
    assert "Broken.encode failed: RuntimeError: no memory left" in reasons[1]
    assert "Broken.decode failed: KeyError" in reasons[2]
    assert "is float32[1, 2, 3]" in reasons[3]
    assert "lie outside of the tensor" in reasons[4]
    assert "Broken.encode failed: TypeError: what it returned is no dict of tensors" in reasons[5]
    written = map(json.loads, (done.path / "failures.jsonl").read_text().splitlines())
    details = {each["partition"]: each["details"] for each in written}
    assert all(("Traceback" in details[client]) is (client in (1, 2, 5)) for client in reasons)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"round": 2}, "is for round 2; expected round 1"),
        ({"roles": {"w": Role.PARAMETER}}, "names other parameters and buffers"),
        ({"num_examples": 0}, "counts num-examples=0; expected 1 or more"),
    ],
)
def test_in_process_too_a_reply_counts_only_for_its_round_and_model(changes: dict[str, Any], said: str) -> None:
    made = link(replace(reply(1), **changes), encoding=UpdateEncoding())
    made.encoding = None
    assert taken(made, cohort(1)) == []
    assert said in made.traffic.failures[0].reason
