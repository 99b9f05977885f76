"""The commands of the page on language models work."""

import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import pytest

from fedsign.data.text import libraries as llm
from tests.e2e.command import fedsign
from tests.e2e.test_docs import snippets


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")  # of transformers to peft
def test_the_page_on_language_models_runs_from_the_base_to_the_exported_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a shorter pretraining and fewer rounds, without `pip` and the recipe, which are for a reader's own
    machine.
    """
    page = "docs/how-to/federated-llm.md"
    monkeypatch.chdir(tmp_path)
    make, use, use_adapters = snippets(page, "python")
    shortened = make.replace("steps=800", "steps=20")
    (experiment,) = snippets(page, "toml")
    assert shortened != make and "rounds = 10" in experiment
    exec(compile(shortened, page, "exec"), {"__name__": "__main__"})
    (tmp_path / "instructions.toml").write_text(experiment.replace("rounds = 10", "rounds = 1"), encoding="utf-8")
    commands = [line for block in snippets(page, "bash") for line in block.splitlines() if line.startswith("fedsign")]
    runnable = [command for command in commands if not command.startswith("fedsign reproduce")]
    assert [command.split()[1] for command in runnable] == ["run"] * 7 + ["export"] * 5
    if find_spec("bitsandbytes") is None:
        runnable = [command for command in runnable if not re.search("qlora|adamw_8bit", command)]
    for command in runnable:
        command = command.replace("answers_every=5", "answers_every=1")
        words = [word for each in shlex.split(command)[1:] for word in sorted(map(str, Path().glob(each))) or [each]]
        done = fedsign(*words, folder=tmp_path)
        assert done.returncode == 0, done.stderr
    llm.transformers("this test")  # which says how it is imported beside a torch without CUDA
    for folder in sorted(map(str, Path().glob("tuned*"))):
        capsys.readouterr()
        exec(compile(use.replace('"tuned"', f'"{folder}"'), page, "exec"), {})
        assert len(capsys.readouterr().out) > 10  # though so short a training leaves little to say but blank lines
    exec(compile(use_adapters, page, "exec"), loaded := {})
    assert loaded["model"].peft_config["default"].r == 8
