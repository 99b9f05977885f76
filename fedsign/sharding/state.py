"""Checkpoints of sharded training, which can be loaded under another strategy and number of ranks.

Each rank writes its parts through `torch.distributed.checkpoint`: the part of each flattened parameter that its
optimizer updates, and the same part of the optimizer state.  Parts owned by several ranks are written once.  On
loading, a rank reads the parts that it owns now, from any file, so no rank ever holds the whole.

Not included: the optimizer's settings, which the script sets again; random generators; and all but one rank's buffers.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state

from fedsign.errors import ResultsError
from fedsign.sharding.paro import Sharded


class _Part(Tensor):
    """A slice [start:start + n] of a flat tensor [numel], in the interface of `torch.distributed.checkpoint`."""

    piece: Tensor
    start: int

    @staticmethod
    def __new__(cls, piece: Tensor, *, start: int, numel: int) -> "_Part":
        make: Any = torch.Tensor._make_wrapper_subclass
        part: _Part = make(cls, (numel,), dtype=piece.dtype, device=piece.device)
        part.piece, part.start = piece.detach(), start
        return part

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch's stub lacks the class and the function
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(f"{function} of a part of a tensor; it can be written and read only.")

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        chunk = self.__create_chunk_list__()[0]
        data = TensorWriteData(
            chunk=chunk, properties=TensorProperties.create_from_tensor(self.piece), size=torch.Size(self.shape)
        )
        index = MetadataIndex(name, chunk.offsets)
        return [WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets=torch.Size([self.start]), sizes=torch.Size([self.piece.numel()]))]

    def __get_tensor_shard__(self, _: MetadataIndex) -> Tensor:
        return self.piece


def save(sharded: Sharded, folder: Path) -> None:
    """Write a checkpoint; called on all ranks, with a shared folder."""
    state = _model(sharded)
    for piece in sharded.pieces:
        for key, value in sharded.optimizer.state.get(piece.tensor, {}).items():
            is_part = isinstance(value, Tensor) and value.shape == piece.tensor.shape
            name = f"optimizer.{piece.name}.{key}"
            # what is no part, such as a step count, is the same on all ranks
            state[name] = _Part(value, start=piece.start, numel=piece.numel) if is_part else value
    save_state(state, checkpoint_id=folder)


def load(sharded: Sharded, folder: Path) -> None:
    """Load a checkpoint; called on all ranks.

    Raises:
        ResultsError: there is no checkpoint, or it belongs to another model.
    """
    if not (folder / ".metadata").is_file():
        raise ResultsError(f"{folder} is no checkpoint of a sharded training; give a folder that `save` has written.")
    known = FileSystemReader(folder).read_metadata().state_dict_metadata
    state = _model(sharded)
    missing = sorted(state.keys() - known.keys())
    if missing:
        raise ResultsError(f"{folder} has no {', '.join(missing)}; load it into the model that it was saved from.")
    pieces: list[tuple[Tensor, str, str]] = []
    for piece in sharded.pieces:
        start = f"optimizer.{piece.name}."
        for name in known:
            key = name.removeprefix(start)
            if key == name or "." in key:  # another parameter, whose name may begin with this one's
                continue
            pieces.append((piece.tensor, key, name))
            described = known[name]
            if not isinstance(described, TensorStorageMetadata):
                state[name] = None  # a number, which loading sets
            elif described.size == torch.Size([piece.numel]):
                empty = torch.zeros_like(piece.tensor, dtype=described.properties.dtype, requires_grad=False)
                state[name] = _Part(empty, start=piece.start, numel=piece.numel)
            else:
                state[name] = torch.zeros(described.size, dtype=described.properties.dtype)
    load_state(state, checkpoint_id=folder)
    for tensor, key, name in pieces:
        value = state[name]
        sharded.optimizer.state[tensor][key] = value.piece if isinstance(value, _Part) else value
    for flat in sharded.flats:  # the masters were read, the shards follow from them
        flat.sync_params()


def _model(sharded: Sharded) -> dict[str, Any]:
    state: dict[str, Any] = {f"buffer.{name}": buffer for name, buffer in sharded.model.named_buffers()}
    for flat in sharded.flats:
        for name, start, numel, tensor in flat.stored():
            state[f"model.{name}"] = _Part(tensor, start=start, numel=numel)
    return state
