"""Tensors in shared memory: anonymous files, the layout of tensors in them, and messages with tensors.

[Note: files without a name] `memfd_create` returns memory that is reachable only through a file descriptor, which a
child inherits.  Nothing is in /dev/shm, which containers often limit to 64 MiB, and the system frees the memory when
the last process that has it dies, however it dies.  A page takes memory only once it is written.

[Note: the end of a loan] A weak reference detects it.  Its callback is a method of a deque, which runs no Python code:
an exception that a signal handler raises in a Python callback, such as Ctrl-C's, would be printed and lost.
"""

import json
import mmap
import os
import weakref
from collections import deque
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from fedsign.errors import ReplyError
from fedsign.records import Tensors
from fedsign.transport.connection import Connection, Message

_ALIGNMENT = 64  # bytes, as torch aligns memory on CPUs
_LARGEST = 16  # models of 8 bytes per element; unwritten pages take no memory
_BLOCK_BYTES = 2**30  # address space, not memory; fewer mappings, since each one costs a descriptor

# slot = an equal part of a file, for the tensors of one message; block = slots that are mapped together


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of tensors in a byte buffer, with strides, since the order of summation may depend on them."""

    entries: tuple[tuple[str, str, tuple[int, ...], tuple[int, ...], int], ...]  # name, dtype, shape, strides, offset
    num_bytes: int

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], *, contiguous: bool = False) -> "Layout":
        """A layout for these tensors, each dense and aligned; `contiguous` ignores their strides."""
        entries, offset = [], 0
        order = torch.contiguous_format if contiguous else torch.preserve_format
        for name, tensor in tensors.items():
            # the tensor's own, if it is dense
            strides = torch.empty_like(tensor, device="meta", memory_format=order).stride()
            entries.append((name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), strides, offset))
            offset += aligned(tensor.numel() * tensor.element_size())
        return cls(tuple(entries), offset)

    @staticmethod
    @lru_cache  # few layouts recur in all messages
    def from_json(text: str) -> "Layout":
        """Parse what `as_json` returned."""
        entries, num_bytes = json.loads(text)
        return Layout(
            tuple((name, dtype, tuple(a), tuple(b), offset) for name, dtype, a, b, offset in entries), num_bytes
        )

    def as_json(self) -> str:
        """Serialize for a message."""
        return json.dumps([self.entries, self.num_bytes])

    def read(self, memory: Tensor) -> Tensors:
        """The tensors in a buffer [bytes], as views."""
        tensors = {}
        for name, dtype, shape, strides, offset in self.entries:
            kind: torch.dtype = getattr(torch, dtype)
            tensors[name] = memory[offset : offset + prod(shape) * kind.itemsize].view(kind).as_strided(shape, strides)
        return tensors

    def write(self, tensors: Mapping[str, Tensor], memory: Tensor) -> None:
        """Copy tensors of this layout into a buffer [bytes].

        Raises:
            ReplyError: the buffer is too small.
        """
        if self.num_bytes > len(memory):
            raise ReplyError(
                f"tensors of {self.num_bytes} bytes were to be sent, but expected {len(memory)} at most, "
                "a multiple of the model's; let the objective keep or send less."
            )
        for name, target in self.read(memory).items():
            target.copy_(tensors[name])


def aligned(num_bytes: int, to: int = _ALIGNMENT) -> int:
    """Round up to a multiple.

    >>> aligned(65), aligned(64)
    (128, 64)
    """
    return -(-num_bytes // to) * to


class SharedFile:
    """Slots in an anonymous file, mapped on demand; see [Note: files without a name]."""

    def __init__(self, descriptor: int, slot_bytes: int) -> None:
        self.descriptor, self.slot_bytes = descriptor, aligned(max(slot_bytes, 1))
        self._slots_per_block = max(1, _BLOCK_BYTES // self.slot_bytes)
        self._blocks: dict[int, mmap.mmap] = {}

    def as_json(self) -> tuple[int, int]:
        """The arguments that reconstruct the file in a process that inherited the descriptor."""
        return self.descriptor, self.slot_bytes

    def memory(self, slot: int) -> Tensor:
        """A slot as a tensor [bytes]."""
        return torch.frombuffer(self.view(slot), dtype=torch.uint8)

    def view(self, slot: int) -> memoryview:
        """A slot as a buffer."""
        number, index = divmod(slot, self._slots_per_block)
        if number not in self._blocks:
            num_bytes = self._block_bytes()
            self._blocks[number] = mmap.mmap(self.descriptor, num_bytes, offset=number * num_bytes)
        start = index * self.slot_bytes
        return memoryview(self._blocks[number])[start : start + self.slot_bytes]

    def _block_bytes(self) -> int:
        return aligned(self._slots_per_block * self.slot_bytes, mmap.ALLOCATIONGRANULARITY)


class _Loan(weakref.ref[memoryview]):
    """The loan of a slot, which ends with the view of it; see [Note: the end of a loan]."""

    __slots__ = ("slot",)
    slot: int


class Slots(SharedFile):
    """The slots of a file, managed by the process that created it; it grows when all are taken."""

    def __init__(self, name: str, slot_bytes: int) -> None:
        super().__init__(os.memfd_create(f"fedsign-{name}"), slot_bytes)
        self._loans: dict[int, _Loan] = {}  # slot -> its last loan
        self._ended: deque[_Loan] = deque()
        self.num_slots = 0  # high-water mark

    def take(self) -> int:
        """A free slot."""
        if self._ended:
            return self._ended.pop().slot  # the most recently used one, whose pages are mapped
        number, index = divmod(self.num_slots, self._slots_per_block)
        if index == 0:
            os.ftruncate(self.descriptor, (number + 1) * self._block_bytes())
        self.num_slots += 1
        return self.num_slots - 1

    def lent(self, slot: int) -> Tensor:
        """A slot as a tensor [bytes]; it becomes free when the last tensor in it is gone."""
        view = self.view(slot)
        loan = _Loan(view, self._ended.append)
        loan.slot = slot
        self._loans[slot] = loan  # without a reference to it, its callback would never run
        return torch.frombuffer(view, dtype=torch.uint8)

    def close(self) -> None:
        """Close the file; tensors in it stay valid."""
        os.close(self.descriptor)


def slot_bytes_of(model: Mapping[str, Tensor]) -> int:
    """Address space for a client's model, auxiliary tensors, and old and new states."""
    return 2**20 + _LARGEST * sum(aligned(8 * tensor.numel()) for tensor in model.values())


def send_tensors(connection: Connection, message: Message, tensors: Mapping[str, Tensor]) -> None:
    """Send a message with tensors: over a Unix socket as a file descriptor, otherwise as bytes."""
    layout = Layout.of(tensors)
    head = {"message": message, "layout": layout.as_json()}
    with closing(Slots("message", layout.num_bytes)) as file:
        memory = file.memory(file.take())[: layout.num_bytes]
        layout.write(tensors, memory)
        if connection.passes_descriptors:
            connection.send(head)
            connection.send_descriptor(file.descriptor)  # the message holds a duplicate, so the file may be closed here
        else:
            # goes out with the next frame, whose payload needs the layout at the other end
            connection.send(head, flush=False)
            connection.send({}, memory.numpy().data)


def receive_tensors(connection: Connection, *, max_bytes: int) -> tuple[Message, Tensors] | None:
    """Receive what `send_tensors` sent; None if the peer is lost or sends more than `max_bytes` of tensors."""
    head = connection.receive()
    if head is None:
        return None
    layout = Layout.from_json(head["layout"])
    if layout.num_bytes > max_bytes:
        connection.shutdown()
        return None
    if connection.passes_descriptors:
        descriptor = connection.receive_descriptor()
        if descriptor is None:
            return None
        with open(descriptor):  # noqa: PTH123 - to close it
            memory = SharedFile(descriptor, layout.num_bytes).memory(0)
    else:
        memory = torch.empty(layout.num_bytes, dtype=torch.uint8)
        if connection.receive(memory.numpy().data) is None:
            return None
    return head["message"], layout.read(memory)
