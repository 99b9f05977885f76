"""Causal language models of `transformers`, from a local folder or from a config.json alone.

    path     a folder with config.json and *.safetensors, from which every process reads the weights
    config   a config.json, or a folder with one; the experiment's seed initializes the weights

Nothing is downloaded, and no code shipped with a model runs.  A tied head becomes a module that reads the embedding's
weight, because one tensor with two names would be sent twice.  On the meta device no weights are read.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn import functional

from fedsign.data.text import libraries as llm
from fedsign.errors import ConfigError
from fedsign.models.causal_roles import roles_of_network
from fedsign.tasks.documents import is_row_of_tokens, split

_NAME = "model.name=transformers"
_DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}


class TiedHead(nn.Module):
    """A head that reads the embedding's matrix without registering it."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self._embedding = (embedding,)  # a tuple hides it from nn.Module's registration

    @property
    def weight(self) -> Tensor:
        """The embedding's matrix [V, width]."""
        weight: Tensor = self._embedding[0].weight  # type: ignore[assignment]
        return weight

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., V]."""
        return functional.linear(x, self.weight)


class CausalLM(nn.Module):
    """Wraps a `transformers` network as tokens [B, T], or packed documents [B, T, 2] -> logits [B, T, V]."""

    def __init__(self, network: nn.Module, *, path: str = "") -> None:
        super().__init__()
        self.network = network
        self.path = path  # the folder of its weights, if it does not start at random

    def forward(self, rows: Tensor, **labels: Tensor) -> Any:
        """Logits at every position; with labels, the network's output. Causal, without a key-value cache."""
        tokens, positions = split(rows)
        # `transformers` tells packed documents by positions that start again, if there is no attention mask
        packed = {} if positions is None else {"position_ids": positions}
        outputs = self.network(input_ids=tokens, use_cache=False, **packed, **labels)
        return outputs if labels else outputs.logits

    def greedy(self, prompts: Sequence[Tensor], *, num: int, end_id: int, pad_id: int) -> Tensor:
        """Tokens [B, num or fewer] that follow prompts, as `fedsign.metrics.greedy`, with a key-value cache.

        What the folder's generation_config.json sets, such as a penalty on repetition, does not apply.
        """
        network: Any = self.network
        longest = max(map(len, prompts))
        rows = prompts[0].new_full((len(prompts), longest), pad_id)
        mask = torch.zeros_like(rows)
        for row, is_token, prompt in zip(rows, mask, prompts, strict=True):
            # on the left: the new tokens follow the last one of each row
            row[longest - len(prompt) :], is_token[longest - len(prompt) :] = prompt, 1
        before = network.generation_config
        network.generation_config = llm.transformers(_NAME).GenerationConfig(
            max_new_tokens=num, do_sample=False, eos_token_id=end_id, pad_token_id=pad_id
        )
        try:
            made: Tensor = network.generate(rows, attention_mask=mask)
        finally:
            network.generation_config = before
        return made[:, longest:]

    @property
    def ends(self) -> tuple[nn.Module, ...]:
        """The input embedding and the output head."""
        network: Any = self.network
        return network.get_input_embeddings(), network.get_output_embeddings()

    @property
    def model_roles(self) -> dict[str, Any] | None:
        """Fields of `fedsign.parameterization.roles.ModelRoles`, for families whose roles are known.

        Raises:
            ConfigError: a parameterization would draw the weights of a folder anew.
        """
        if self.path:
            raise ConfigError(
                f"model.path='{self.path}' was given with a parameterization, which would draw its weights anew; set "
                f"model.config='{self.path}' for a random start, or parameterization.name=none."
            )
        return roles_of_network(self.network, "network")


def causal_lm(
    input_shape: tuple[int, ...],
    num_outputs: int,
    *,
    path: str = "",
    config: str = "",
    dtype: Literal["float32", "bf16"] = "float32",
    checkpoint_activations: bool = False,
) -> CausalLM:
    """A causal language model of `transformers`; its weights are stored, trained, and sent in `dtype`.

    `checkpoint_activations` saves only the activations between layers and recomputes the rest in the backward pass.

    Raises:
        ConfigError: the library or the files are missing, or the model does not suit the data.
    """
    if not is_row_of_tokens(input_shape):
        raise ConfigError(
            f"{_NAME} takes rows of tokens, but a sample has the shape {tuple(input_shape)}; use it with data of text."
        )
    if bool(path) == bool(config):
        raise ConfigError(
            f"model.path='{path}' and model.config='{config}' were given with {_NAME}; "
            "expected one of them: a folder with weights, or a config.json for a random start."
        )
    library = llm.transformers(_NAME)
    settings = read_config(library, Path(path or config), key="path" if path else "config")
    _check_fit(settings, length=input_shape[0], vocabulary=num_outputs)
    with _sentences(path or config):
        network = _network(library, settings, path, _DTYPES[dtype])
        if checkpoint_activations:
            _checkpoint(network)
    untie(network)
    return CausalLM(network, path=path)


def read_config(library: Any, path: Path, *, key: str) -> Any:
    """Read a model configuration from its file or folder.

    Raises:
        ConfigError: there is none, or the library does not know the model.
    """
    given = f"model.{key}='{path}' was given with {_NAME}"
    file = path / "config.json" if path.is_dir() else path
    if not path.exists():
        raise ConfigError(f"{given}, but there is nothing; give a {'folder' if key == 'path' else 'config.json'} here.")
    if key == "path" and not path.is_dir():
        raise ConfigError(f"{given}, which is a file; give the folder with config.json and *.safetensors.")
    if not file.is_file():
        raise ConfigError(f"{given}, but the folder holds no config.json; give one that `save_pretrained` has made.")
    with _sentences(str(path)):
        return library.AutoConfig.from_pretrained(file, local_files_only=True, trust_remote_code=False)


def untie(network: Any) -> None:
    """Replace a head tied to the embedding by a `TiedHead`.

    Raises:
        ConfigError: the model ties other tensors, too.
    """
    head, embedding = network.get_output_embeddings(), network.get_input_embeddings()
    if head is not None and head.weight is embedding.weight:
        if getattr(head, "bias", None) is not None:
            raise ConfigError(f"{_NAME}: the tied head of {type(network).__name__} has a bias; use an untied model.")
        network.set_output_embeddings(TiedHead(embedding))
    names: dict[Tensor, str] = {}  # tensors hash by identity
    # by default torch lists a shared tensor once, which would hide what is looked for
    for name, tensor in network.named_parameters(remove_duplicate=False):
        if tensor in names:
            raise ConfigError(
                f"{_NAME}: {type(network).__name__} has one tensor as '{names[tensor]}' and '{name}', "
                "and only a head may be tied; use another model."
            )
        names[tensor] = name


def _network(library: Any, settings: Any, path: str, dtype: torch.dtype) -> nn.Module:
    auto = library.AutoModelForCausalLM
    if not path or torch.get_default_device().type == "meta":
        made: nn.Module = auto.from_config(settings, dtype=dtype, trust_remote_code=False)
        return made
    network: nn.Module
    network, loading_info = auto.from_pretrained(
        path, config=settings, dtype=dtype, use_safetensors=True, local_files_only=True, trust_remote_code=False,
        output_loading_info=True,
    )  # fmt: skip
    # from_pretrained only warns of missing weights, and initializes them at random
    wrong = sorted(map(str, (*loading_info["missing_keys"], *loading_info["mismatched_keys"])))
    if wrong:
        raise ConfigError(
            f"model.path='{path}' holds weights that do not fit its config.json: '{wrong[0]}' is missing or of another "
            f"shape ({len(wrong)} such); give the folder of one model."
        )
    return network


def _check_fit(settings: Any, *, length: int, vocabulary: int) -> None:
    text = settings.get_text_config()
    own, longest = getattr(text, "vocab_size", None), getattr(text, "max_position_embeddings", None)
    # a larger model is fine: many pad their embedding beyond the tokenizer's vocabulary
    if own is not None and vocabulary > own:
        raise ConfigError(
            f"the tokenizer has {vocabulary} tokens, but {_NAME} was given a model of {own}; "
            "use the tokenizer that comes with the model, or set vocab_size in a config.json of your own."
        )
    if longest is not None and length > longest:
        raise ConfigError(
            f"samples of {length} tokens were given to {_NAME}, "
            f"whose config.json allows max_position_embeddings={longest}; cut shorter samples."
        )


def _checkpoint(network: Any) -> None:
    # transformers renamed it within version 5; the old name warns and goes away in 6
    enable = getattr(network, "activation_checkpointing_enable", None) or network.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    # only reentrant checkpoints need it, and it makes frozen layers compute gradients
    network.disable_input_require_grads()


@contextmanager
def _sentences(path: str) -> Iterator[None]:
    """Turn the library's errors about the user's files into a ConfigError."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        # one line: these messages span many, some with the whole config
        message = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"{_NAME} cannot use '{path}': {type(error).__name__}: {message}; "
            "give a folder that this version of transformers loads."
        ) from error
