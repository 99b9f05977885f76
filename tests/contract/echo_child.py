"""The child process of test_transport: it answers, and misbehaves on request."""

import os
import signal
import sys

from fedsign.transport.connection import Connection


def main(parent: Connection) -> None:
    stays = False
    for message in parent:
        stays = stays or "stay" in message
        if "die" in message:
            parent.send({"last": "words"})
            os.kill(os.getpid(), message["die"])
        print("noise on standard output", flush=True)
        os.write(1, b'{"not": "a message"}\n')
        parent.send({"echo": message, "stdin": sys.stdin.read(), "pid": os.getpid()})
    if stays:  # without its parent, until it is ended
        signal.pause()
