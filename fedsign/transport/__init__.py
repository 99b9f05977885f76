"""How the processes of FedSign talk to each other, on one host and between hosts.

- `connection`: framed JSON messages over any stream socket, with a payload of bytes or a file descriptor
- `handshake`: both ends prove that they know a key before they trust each other
- `tls`: encryption that the handshake's key vouches for
- `process`: child processes that are spoken to over a connection and end with their parent
- `tensors`: tensors in shared memory, and in messages

Nothing is pickled.  Only `tensors` imports torch.
"""
