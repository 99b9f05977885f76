"""What a node decides by itself, and what it keeps private: by the ClientApp, over serialized messages."""

import io
import json
import logging
import re
import shutil
import socket
import sys
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.cli.build import build_fab_from_disk
from torch import Tensor

from clients.app import client_app
from clients.deployment.evaluator import SiteEvaluator, samples_of_sites
from clients.deployment.node import SuperNode
from clients.node import EXPERIMENT_KEY, RUN_KEY, STATE_KEY, Node
from fedsign.config import ExperimentConfig, from_dict, from_toml
from fedsign.errors import ConfigError, EngineError, ReplyError
from fedsign.flower import evaluation
from fedsign.flower.partition_grid import PartitionGrid
from fedsign.flower.shims import ensure_task_identity, set_message_id
from fedsign.records import LATE, EvaluateReply, EvaluateRequest, Failure, roles_of, tensors_of
from fedsign.storage.results import RunFolder, read_json
from fedsign.workload import Workload
from simulations import Run, run
from simulations.backends.base import intra_op_threads
from simulations.deployment.engine.server_app import SUBMISSION_KEY, label_counts, submission_of
from simulations.deployment.engine.submission import write_submission
from simulations.deployment.startup_kits import open_startup_kit
from tests.contract.contexts import make_context
from tests.contract.transported import grid_of, run_with
from tests.deployment.test_sites import NUM_SITES, tree, write_site
from tests.unit.test_flower_wire import Deployment

SIZES = (60, 40, 30)
APP = client_app(SuperNode)


@pytest.fixture(autouse=True)
def _threads_are_lent() -> Iterator[None]:
    """A node takes the experiment's number of threads, for good: it is a process of its own elsewhere."""
    with intra_op_threads(torch.get_num_threads()):
        yield


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("sites")
    return [str(write_site(folder / f"clinic {k}", size, seed=k)) for k, size in enumerate(SIZES)]


def deployed(root: Path, roots: list[str], **changes: Any) -> ExperimentConfig:
    """What a server knows of an experiment whose data lie at nodes."""
    return from_dict(tree(root, [""] * len(roots), **{"engine": {"name": "superlink"}, **changes}))


def node(config: ExperimentConfig, root: Path, **own: Any) -> Callable[[Message], Message]:
    context = make_context(
        own["partition-id"],
        node_config=own,
        run_config={EXPERIMENT_KEY: config.to_toml(), RUN_KEY: "a-run", STATE_KEY: str(root / "foreign")},
    )
    return lambda message: APP(message, context)


def sites_of(config: ExperimentConfig, root: Path, roots: list[str], **own: Any) -> list[Callable[[Message], Message]]:
    return [
        node(
            config,
            root,
            **{
                "partition-id": k,
                "data-root": where,
                "site": f"clinic {k}",
                "state-root": str(root / f"disk {k}"),
                **own,
            },
        )
        for k, where in enumerate(roots)
    ]


@pytest.fixture(scope="module")
def reference(roots: list[str], tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(tree(tmp_path_factory.mktemp("run"), roots, strategy={"name": "feddyn"}))


def test_sites_at_nodes_give_the_bits_of_the_run_in_process(reference: Run, roots: list[str], tmp_path: Path) -> None:
    config = deployed(tmp_path, roots, strategy={"name": "feddyn"})
    folder = run_with(config, RunFolder(tmp_path / "transported"), sites_of(config, tmp_path, roots))
    for name in ("rounds.jsonl", "sites.jsonl", "model.safetensors"):
        assert (folder.path / name).read_bytes() == (reference.path / name).read_bytes()


def test_states_lie_where_the_node_says_and_never_where_the_server_does(roots: list[str], tmp_path: Path) -> None:
    config = deployed(tmp_path, roots, strategy={"name": "feddyn"}, server={"cohort_size": NUM_SITES})
    run_with(config, RunFolder(tmp_path / "transported"), sites_of(config, tmp_path, roots))
    for k in range(NUM_SITES):
        assert list((tmp_path / f"disk {k}" / "a-run").rglob("round-000002.safetensors"))
    assert not (tmp_path / "foreign").exists()


def test_without_a_place_of_its_own_a_node_keeps_states_in_its_users_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = make_context(0, node_config={"partition-id": 0}, run_config={RUN_KEY: "a-run", STATE_KEY: "/foreign"})
    monkeypatch.delenv("FLWR_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert SuperNode(context).states.folder == tmp_path / ".fedsign" / "clients" / "a-run"
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flower"))
    assert SuperNode(context).states.folder == tmp_path / "flower" / "clients" / "a-run"
    assert Node(context).states.folder == Path("/foreign")
    for name in ("", "..", "a/b", "/etc"):
        foreign = make_context(0, node_config={"partition-id": 0}, run_config={RUN_KEY: name})
        with pytest.raises(ConfigError, match="which can be no folder's name"):
            _ = SuperNode(foreign).states


def test_what_sites_receive_names_no_folder_process_or_host_and_the_run_keeps_its_name(
    roots: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All files of the bundle; the server keeps what it needs to itself."""
    hidden = tmp_path / "hidden place"
    hidden.mkdir()
    monkeypatch.chdir(hidden)
    changes: dict[str, Any] = {
        "engine": {"name": "superlink", "federation": str(hidden / "federation")},
        "partition": {"test_root": str(hidden / "test")},
        "server": {"evaluation": "server"},
    }
    config = from_dict(tree(tmp_path, roots, **changes))
    received = []
    for name in ("one", "other", "one"):
        folder = RunFolder(hidden / name)
        folder.path.mkdir(exist_ok=True)
        bundle = build_fab_from_disk(write_submission(config, folder, hidden / "flower"))
        with zipfile.ZipFile(io.BytesIO(bundle)) as files:
            text = "\n".join([bundle.decode("latin-1"), *(files.read(each).decode() for each in files.namelist())])
            tables = tomllib.loads(files.read("pyproject.toml").decode())
        for each in (hidden.name, *roots, STATE_KEY, str(tmp_path), str(Path.home()), sys.prefix):
            assert each not in text
        assert not re.search(rf"\b{re.escape(socket.gethostname())}\b", text.partition("[project]")[2])
        received.append(tables["tool"]["flwr"]["app"]["config"])
        assert received[-1].keys() == {EXPERIMENT_KEY, RUN_KEY, SUBMISSION_KEY}
    at_sites, server = from_toml(received[0][EXPERIMENT_KEY]), config.replace(**{"partition.roots": []})
    assert at_sites.changed().keys() < server.changed().keys()
    files = [submission_of(hidden / "flower", each[RUN_KEY]) for each in received]
    own = [read_json(file) for file in files]
    assert [each["folder"] for each in own] == [str(hidden / name) for name in ("one", "other", "one")]
    assert {each["experiment"] for each in own} == {server.to_toml()}
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}


def test_a_sites_folder_has_no_part_in_its_name(roots: list[str], tmp_path: Path) -> None:
    config = deployed(tmp_path, roots)
    grid = grid_of(config, sites_of(config, tmp_path, roots, site=""))
    tensors = Workload(config).make_model().state_dict()
    requests = [EvaluateRequest(round=1, partition=k, tensors=dict(tensors)) for k in range(NUM_SITES)]
    said = list(evaluation.ask_sites(grid, requests, timeout_s=10))
    assert [each.name for each in said if isinstance(each, EvaluateReply)] == ["site 0", "site 1", "site 2"]


def as_dict(outputs: Tensor, targets: Tensor) -> Any:
    return {"accuracy": 1.0}


@pytest.mark.parametrize(
    ("own", "changes", "said"),
    [
        ({"data-root": ""}, {}, r"site \d has no data here; start its node with --node-config 'data-root="),
        (
            *({"data-root": "/nowhere"}, {}),
            r"site 'clinic \d': there is nothing at /nowhere; correct the node's data-root",
        ),
        ({"share-details": "no"}, {}, r"share-details=no was given, but expected true or false"),
        ({}, {"metrics": [f"{__name__}:as_dict"]}, r"metric 'as_dict' gives a dict; expected one number"),
    ],
)
def test_a_node_that_cannot_take_part_says_so_at_the_roll_call(
    own: dict[str, Any], changes: dict[str, Any], said: str, roots: list[str], tmp_path: Path
) -> None:
    config = deployed(tmp_path, roots, **changes)
    with pytest.raises(EngineError, match=f"a node cannot take part: .*{said}") as caught:
        grid_of(config, sites_of(config, tmp_path, roots, **own))
    assert "\n" not in str(caught.value)


def test_tables_of_numbers_at_nodes_need_no_levels(tmp_path: Path) -> None:
    roots = [str(tmp_path / name) for name in "abc"]
    for root in map(Path, roots):
        root.mkdir()
        (root / "data.csv").write_text("x,ill\n" + "0.5,no\n1.5,yes\n" * 6)
    table = {"name": "csv", "target": "ill", "features": ["x"], "class_names": ["no", "yes"], "normalize": "none"}
    config = deployed(tmp_path, roots, data=table, partition={"input_shape": [1]})
    done = run_with(config, RunFolder(tmp_path / "run"), sites_of(config, tmp_path, roots))
    assert [line["failures"] for line in done.records("rounds.jsonl")] == [[], []]


def test_an_unknown_class_stops_the_run_before_the_first_round(roots: list[str], tmp_path: Path) -> None:
    odd = write_site(tmp_path / "odd", 20, seed=3, y_train=np.arange(16) % 3)
    config = deployed(tmp_path, roots)
    with pytest.raises(
        EngineError,
        match=r"DataError: site 'clinic 1': .*data\.npz holds training targets .* from 0 to 1, .* such as 2;",
    ):
        grid_of(config, sites_of(config, tmp_path, [roots[0], str(odd), roots[2]]))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"engine": {"share_details": True}}, r"engine\.share_details=true was given with engine\.federation=here"),
        ({}, r"partition\.roots=\['.*'\] was given with engine\.federation=here"),
    ],
)
def test_nobody_decides_for_the_sites_of_a_federation(
    changes: dict[str, Any], said: str, roots: list[str], tmp_path: Path
) -> None:
    engine = {"name": "superlink", "federation": "here", **changes.get("engine", {})}
    with pytest.raises(ConfigError, match=said):
        run(tree(tmp_path, roots, engine=engine))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("said", "told"), [("", None), ("share_details = false", None), ("share_details = true", True)]
)
def test_a_kit_tells_that_its_site_shares_details_only_if_the_site_says_so(
    said: str, told: bool | None, tmp_path: Path
) -> None:
    facts = {"name": "x", "site": "a", "partition": 0, "host": "h", "port": 1, "insecure": False, "versions": {}}
    (tmp_path / "site.toml").write_text(f"{said}\n{tomli_w.dumps({'federation': facts})}", encoding="utf-8")
    assert open_startup_kit(tmp_path).node_config().get("share-details") is told
    (tmp_path / "site.toml").write_text(
        f"share_details = 'no'\n{tomli_w.dumps({'federation': facts})}", encoding="utf-8"
    )
    with pytest.raises(ConfigError, match=r"share_details = 'no'; expected true or false"):
        open_startup_kit(tmp_path)


@pytest.mark.needs("sharding")
def test_a_kit_says_on_which_machines_its_sites_ranks_are(tmp_path: Path) -> None:
    facts = {"name": "x", "site": "a", "partition": 0, "host": "h", "port": 1, "insecure": False, "versions": {}}
    own = {"machines": 2, "listen": "192.0.2.1:29400", "secret_file": "silo.secret", "insecure_network": True}
    (tmp_path / "site.toml").write_text(tomli_w.dumps({"sharding": own, "federation": facts}), encoding="utf-8")
    config = from_dict({"engine": {"name": "superlink"}, "client": {"sharding": {"ranks": 4, "groups": 2}}})
    told = open_startup_kit(tmp_path).node_config()
    context = make_context(0, node_config=told, run_config={EXPERIMENT_KEY: config.to_toml()})
    found = SuperNode(context).workload.config.client.sharding
    assert (found.machines, found.listen, found.secret_file) == (2, "192.0.2.1:29400", str(tmp_path / "silo.secret"))
    assert found.insecure_network
    of_server = config.replace(**{"client.sharding.insecure_network": True, "client.sharding.machines": 2})
    theirs = {key: value for key, value in told.items() if key != "sharding-insecure-network"}
    context = make_context(0, node_config=theirs, run_config={EXPERIMENT_KEY: of_server.to_toml()})
    assert not SuperNode(context).workload.config.client.sharding.insecure_network, "the server cannot allow it"
    (tmp_path / "site.toml").write_text(
        tomli_w.dumps({"sharding": {"ranks": 2}, "federation": facts}), encoding="utf-8"
    )
    with pytest.raises(
        ConfigError,
        match=r"sharding = {'ranks': 2}; expected a table of machines, listen, secret_file, insecure_network",
    ):
        open_startup_kit(tmp_path)


@pytest.mark.needs("sharding")
def test_a_machine_that_joins_a_node_reads_the_same_site_where_it_says(roots: list[str], tmp_path: Path) -> None:
    """The node's own site has another folder there; the samples are those of the node."""
    from clients.sharding.worker import _workload as machines_workload
    from clients.workers.shared_data import digest_of

    own = {"partition-id": 1, "data-root": roots[1], "site": "b"}
    context = make_context(0, node_config=own, run_config={EXPERIMENT_KEY: deployed(tmp_path, roots).to_toml()})
    first = SuperNode(context).workload
    moved = shutil.copytree(roots[1], tmp_path / "elsewhere")
    told = {"config": first.config.to_toml(), "sites": [1]}
    for root in ("", str(moved)):
        assert digest_of(machines_workload(told, root).dataset) == digest_of(first.dataset)
    assert digest_of(machines_workload(told, roots[0]).dataset) != digest_of(first.dataset)
    told = {"config": from_dict(tree(tmp_path, roots)).to_toml(), "sites": None}
    with pytest.raises(ConfigError, match=r"--data-root=.* was given, but all sites are trained in one process"):
        machines_workload(told, str(moved))


def test_one_folder_is_not_several_sites(roots: list[str], tmp_path: Path) -> None:
    config = deployed(tmp_path, roots)
    both = node(config, tmp_path, **{"partition-id": 0, "partitions": "0,1,2", "data-root": roots[0]})
    with pytest.raises(EngineError, match=r"a node with one data-root serves the sites \[0, 1, 2\]"):
        grid_of(config, [both] * NUM_SITES)


def with_a_secret(outputs: torch.Tensor, targets: torch.Tensor) -> float:
    """A metric that fails at the second site."""
    if len(targets) == SIZES[1] // 5:
        raise ValueError("cannot be computed")
    return 1.0


@pytest.mark.parametrize("shares", [False, True])
def test_a_traceback_stays_at_the_node_unless_the_node_shares_it(
    shares: bool, roots: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = deployed(tmp_path, roots, metrics=["accuracy", f"{__name__}:with_a_secret"], rounds=1)
    with caplog.at_level(logging.ERROR, logger="fedsign"):
        folder = run_with(
            config, RunFolder(tmp_path / "transported"), sites_of(config, tmp_path, roots, **{"share-details": shares})
        )
    (failure,) = map(json.loads, (folder.path / "failures.jsonl").read_text().splitlines())
    assert failure["reason"] == "in evaluation: ValueError: cannot be computed"
    assert ("Traceback" in failure["details"]) == shares
    assert ("in with_a_secret" in caplog.text) != shares


@pytest.mark.parametrize("shares", [False, True])
def test_label_counts_travel_only_if_the_node_shares_them(shares: bool, roots: list[str], tmp_path: Path) -> None:
    config = deployed(tmp_path, roots)
    grid = grid_of(config, sites_of(config, tmp_path, roots, **{"share-details": shares}))
    known = Workload(from_dict(tree(tmp_path, roots))).label_counts()
    assert label_counts(grid.answers) == (dict(enumerate(known)) if shares else {})
    if shares:
        assert label_counts({0: grid.answers[1], 1: grid.answers[1]}) == {1: known[1]}, "a site counts for itself alone"


def test_a_site_of_a_federation_says_itself_where_its_data_lie(roots: list[str], tmp_path: Path) -> None:
    config = deployed(tmp_path, roots, engine={"name": "superlink", "federation": "here"})
    own = {"partition-id": 1, "data-root": roots[1]}
    context = make_context(0, node_config=own, run_config={EXPERIMENT_KEY: config.to_toml()})
    assert len(SuperNode(context).workload.samples_of(1)) == SIZES[1] * 4 // 5


def test_a_nodes_device_wins(roots: list[str], tmp_path: Path) -> None:
    config = deployed(tmp_path, roots, engine={"name": "superlink", "device": "cuda:7"})
    own = {"partition-id": 0, "data-root": roots[0], "device": "cpu"}
    context = make_context(0, node_config=own, run_config={EXPERIMENT_KEY: config.to_toml()})
    assert SuperNode(context).workload.device.type == "cpu"


@pytest.mark.needs("images", "tables")
def test_a_node_finds_the_usual_data_in_its_own_place(tmp_path: Path) -> None:
    for name, key in (("mnist", "root"), ("csv", "path")):
        config = from_dict({"data": {"name": name}, "engine": {"name": "superlink"}})
        own = {"partition-id": 0, "data-root": str(tmp_path / "here")}
        context = make_context(0, node_config=own, run_config={EXPERIMENT_KEY: config.to_toml()})
        assert SuperNode(context).workload.config.data.settings[key] == str(tmp_path / "here")
    config = from_dict({"engine": {"name": "superlink"}})  # digits come from nowhere
    context = make_context(0, node_config=own, run_config={EXPERIMENT_KEY: config.to_toml()})
    assert SuperNode(context).workload.config == config


# Replies that are none


def test_a_node_that_answers_nonsense_is_its_own_failure(roots: list[str], tmp_path: Path) -> None:
    config = deployed(tmp_path, roots)
    answers = sites_of(config, tmp_path, roots)

    def lying(message: Message) -> Message:
        reply = answers[1](message)
        if message.metadata.message_type == "evaluate":
            said = json.loads(str(reply.content["reply"]["answer"]))
            reply.content["reply"] = ConfigRecord({"answer": json.dumps({**said, "round": 9})})
        return reply

    grid = grid_of(config, [answers[0], lying, answers[2]])
    tensors = dict(Workload(config).make_model().state_dict())
    requests = [EvaluateRequest(round=1, partition=k, tensors=tensors) for k in range(NUM_SITES)]
    said = list(evaluation.ask_sites(grid, requests, timeout_s=10))
    assert [each.partition for each in said] == [0, 1, 2]
    assert isinstance(said[1], Failure) and "the reply is for round 9, partition 1" in said[1].reason
    assert isinstance(said[0], EvaluateReply) and isinstance(said[2], EvaluateReply)


def test_a_site_that_does_not_answer_in_time_is_a_failure(roots: list[str], tmp_path: Path) -> None:
    config = deployed(tmp_path, roots)
    answers = sites_of(config, tmp_path, roots)

    def silent(message: Message) -> Message | None:
        return None if message.metadata.message_type == "evaluate" else answers[0](message)

    grid = PartitionGrid(
        Deployment([silent, *answers[1:]]),
        num_partitions=NUM_SITES,
        roles=roles_of(Workload(config).make_model()),
        leaves_process=True,
    )
    grid.roll_call(timeout_s=5)
    tensors = dict(Workload(config).make_model().state_dict())
    requests = [EvaluateRequest(round=1, partition=k, tensors=tensors) for k in range(NUM_SITES)]
    said = list(evaluation.ask_sites(grid, requests, timeout_s=0.2))
    assert isinstance(said[0], Failure) and said[0].reason == LATE
    assert all(isinstance(each, EvaluateReply) for each in said[1:])


def test_a_site_evaluates_as_a_plain_model_does_and_holds_none_between_requests(
    roots: list[str], tmp_path: Path
) -> None:
    work = Workload(from_dict(tree(tmp_path, roots)))
    model, evaluator = work.make_model(), SiteEvaluator(work)
    request = EvaluateRequest(round=1, partition=2, tensors=tensors_of(model))
    assert evaluator.evaluate(request).metrics == work.evaluate(model, samples_of_sites(work.dataset)[2])
    assert not any(parameter.numel() for parameter in evaluator._model.parameters.values())


def test_an_evaluate_reply_survives_the_wire_with_values_that_are_not_finite(roots: list[str], tmp_path: Path) -> None:
    work = Workload(from_dict(tree(tmp_path, roots)))
    request = EvaluateRequest(round=1, partition=2, tensors=dict(work.make_model().state_dict()))
    reply = SiteEvaluator(work).evaluate(request)
    odd = replace(reply, metrics={**reply.metrics, "auc": float("nan"), "loss": float("inf")})
    message = Message(evaluation.pack_reply(odd, _request_message()).content, 2, "evaluate")
    back = evaluation.unpack_reply(message, request, most=100)
    assert np.isnan(back.metrics["auc"]) and back.metrics["loss"] == float("inf")
    assert replace(back, metrics={}) == replace(odd, metrics={})
    none = Message(evaluation.pack_reply(replace(odd, num_test=0), _request_message()).content, 2, "evaluate")
    with pytest.raises(ReplyError, match="counts 0 test samples"):
        evaluation.unpack_reply(none, request, most=100)
    for counts in ("num_test", "num_train", "num_validation"):
        many = Message(evaluation.pack_reply(replace(odd, **{counts: 101}), _request_message()).content, 2, "evaluate")
        with pytest.raises(ReplyError, match="expected 100 of each at most"):
            evaluation.unpack_reply(many, request, most=100)


def _request_message() -> Message:
    ensure_task_identity()
    message = Message(RecordDict(), 2, "evaluate")
    set_message_id(message, "1")
    return message
