"""Find the blocks of a model, for methods such as LISA that treat them separately.

[Note: blocks] A block is one of the modules that a deep model repeats: the layers of a transformer, the stages of a
residual network.  Libraries do not agree on a name (`model.layers` in LLaMA, `transformer.h` in GPT-2, `encoder.layer`
in ViT, `blocks` in ours, `layer1` to `layer4` in ResNet), so the search goes by structure:

- a list (ModuleList or Sequential) of two or more modules that have submodules, or
- two or more such lists side by side whose names end in a number: the stages.

Among nested lists the outermost counts; among sibling lists the one that holds nine tenths of their parameters.  If
that leaves no list or several, the user must name the blocks.
"""

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase

from torch import nn

from fedsign.errors import ConfigError

Blocks = dict[str, nn.Module]  # by name, in the order of the model

_MOST = 0.9  # share of the parameters of all lists that makes one the model's list of blocks
_HINT = (
    "set blocks (client.optimizer.blocks) to a list of modules in the model, such as model.layers, "
    "or to the blocks themselves, separated by commas, such as layer1,layer2 or encoder.layers.*,decoder.layers.*"
)


def find_blocks(model: nn.Module, path: str = "") -> Blocks:
    """The model's blocks, by [Note: blocks] or by `path`: a list of modules, or modules separated by commas.

    In a pattern `*` matches within one component of a name.

    >>> layer = lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    >>> model = nn.Sequential(nn.Embedding(9, 4), nn.ModuleList([layer(), layer(), layer()]), nn.Linear(4, 9))
    >>> list(find_blocks(model)), list(find_blocks(model, "1.0,1.2"))
    (['1.0', '1.1', '1.2'], ['1.0', '1.2'])

    Raises:
        ConfigError: no list was found, several were, or `path` matches nothing.
    """
    if path:
        return _named(model, path)
    lists = list(_lists(model, ""))
    if not lists:
        raise ConfigError(f"no list of blocks was found in a {type(model).__name__}; {_HINT}.")
    # by parameters, not by length: a head of several small layers must not compete with the blocks
    sizes = [sum(map(_size, blocks.values())) for blocks in lists]
    largest = max(range(len(lists)), key=sizes.__getitem__)
    if sizes[largest] < _MOST * sum(sizes):
        several = ", ".join(f"{_place(blocks)} ({len(blocks)} blocks)" for blocks in lists)
        raise ConfigError(f"several lists of blocks were found in a {type(model).__name__}: {several}; {_HINT}.")
    return lists[largest]


def _lists(module: nn.Module, name: str) -> Iterator[Blocks]:
    """The outermost lists of blocks at or below a module."""
    children = _with_parameters(module, name)
    composed = {name: child for name, child in children.items() if next(child.children(), None) is not None}
    # matches `layer1`, but not `layers.1`, a member of a list
    stages = {name: child for name, child in composed.items() if _is_list(child) and re.search(r"[^.\d]\d+$", name)}
    if _is_list(module) and _is_repeated(module, children, composed):
        yield composed
        return
    if len(stages) > 1:
        yield stages
    for name_below, child in composed.items():
        if len(stages) < 2 or name_below not in stages:
            yield from _lists(child, name_below)


def _is_repeated(module: nn.Module, children: Blocks, composed: Blocks) -> bool:
    """Whether a list holds repeated blocks.  A Sequential may also hold a stem and a head without submodules."""
    if isinstance(module, nn.ModuleList):
        return len(composed) > 1 and len(composed) == len(children)
    # a Sequential of unlike children is a pipeline, such as a backbone and a head
    return len(composed) > 1 and len({type(child) for child in composed.values()}) == 1


def _named(model: nn.Module, path: str) -> Blocks:
    modules = dict(model.named_modules())
    patterns = [part.strip() for part in path.split(",")]
    if len(patterns) == 1 and _is_list(modules.get(patterns[0])):
        return _with_parameters(modules[patterns[0]], patterns[0])
    blocks = {
        name: module
        for name, module in modules.items()
        # the root has an empty name, which `*` would match
        if name and _size(module) and any(_matches(name, pattern) for pattern in patterns)
    }
    missing = [pattern for pattern in patterns if not any(_matches(name, pattern) for name in blocks)]
    if missing:
        raise ConfigError(
            f"blocks='{path}' was given, but the {type(model).__name__} has no modules with parameters at "
            f"'{missing[0]}'; {_HINT}."
        )
    inside = [(outer, inner) for outer in blocks for inner in blocks if inner.startswith(outer + ".")]
    if inside:
        raise ConfigError(
            f"blocks='{path}' was given, but '{inside[0][1]}' is a part of '{inside[0][0]}', "
            "and blocks lie beside each other; leave one of the two out."
        )
    return blocks


def _matches(name: str, pattern: str) -> bool:
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def _with_parameters(module: nn.Module, name: str) -> Blocks:
    prefix = f"{name}." if name else ""
    return {prefix + below: child for below, child in module.named_children() if _size(child)}


def _is_list(module: nn.Module | None) -> bool:
    return isinstance(module, nn.ModuleList | nn.Sequential)


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _place(blocks: Blocks) -> str:
    """A readable name for a list: its own name, or those of its members."""
    first = next(iter(blocks))
    return first.rpartition(".")[0] if re.search(r"(^|\.)\d+$", first) else ",".join(blocks)
