"""Communication between FedSign's processes, on one host and between hosts.

- `connection`: framed JSON messages over a stream socket, with a payload of bytes or a file descriptor
- `handshake`: mutual authentication by a shared key
- `tls`: encryption that the handshake authenticates
- `process`: child processes with a connection to their parent, with which they end
- `tensors`: tensors in shared memory, and in messages

Nothing is pickled.  Only `tensors` imports torch.
"""
