"""Messages with tensors between processes of one machine that did not start each other: over a local socket.

A parcel is a file without a name ([Note: files without a name] in fedsign.transport.tensors) with a message in JSON and the tensors behind
it; over the socket goes its descriptor.  Nothing is pickled.  Sockets have names in Linux's abstract namespace, so nothing lies
on a disk, and only processes of the same user are spoken to.
"""

import json
import mmap
import os
import socket
import struct
from collections.abc import Mapping

import torch
from torch import Tensor

from fedsign.errors import EngineError
from fedsign.processes import Message
from fedsign.records import Tensors
from fedsign.transport.tensors import Layout, aligned

_SIZES = struct.Struct("QQ")  # of the message in JSON, and of the whole
_PEER = struct.Struct("3i")  # process, user, group
_LAYOUT = "tensors"


def send(to: socket.socket, message: Message, tensors: Mapping[str, Tensor]) -> None:
    """Send a message with tensors."""
    layout = Layout.of(tensors)
    text = json.dumps(message | {_LAYOUT: layout.as_json()}).encode()
    start = aligned(len(text))
    size = start + layout.num_bytes
    descriptor = os.memfd_create("fedsign-parcel")
    try:
        os.ftruncate(descriptor, size)
        memory = mmap.mmap(descriptor, size)
        memory[: len(text)] = text
        layout.write(tensors, torch.frombuffer(memory, dtype=torch.uint8)[start:])
        socket.send_fds(to, [_SIZES.pack(len(text), size)], [descriptor])
    finally:
        os.close(descriptor)


def receive(source: socket.socket) -> tuple[Message, Tensors] | None:
    """The next message, whose tensors lie in the parcel; None where the other end is gone."""
    try:
        sizes, descriptors, _, _ = socket.recv_fds(source, _SIZES.size, 1)
    except ConnectionResetError:
        return None
    if not sizes:
        return None
    (descriptor,) = descriptors
    length, size = _SIZES.unpack(sizes)
    try:
        memory = mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)
    message: Message = json.loads(memory[:length])
    layout = Layout.from_json(message.pop(_LAYOUT))
    return message, layout.read(torch.frombuffer(memory, dtype=torch.uint8)[aligned(length) :])


def address_of(name: str) -> str:
    """Of a socket in the abstract namespace."""
    return f"\0fedsign-{name}"


def check_user(of: socket.socket) -> None:
    """Raises: EngineError: the other end belongs to another user."""
    _, user, _ = _PEER.unpack(of.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    if user != os.getuid():
        raise EngineError(
            f"a process of user {user} answers where one of user {os.getuid()} was expected; it is not spoken to."
        )
