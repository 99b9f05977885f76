"""Independent pieces of work on a CPU, each on a thread of its own.

torch's threads share an operation, which pays for large ones only; pieces that have nothing to do with each other share nothing but the
interpreter, which an operation of torch lets go.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

_Piece = TypeVar("_Piece")


def each(work: Callable[[_Piece], None], pieces: Iterable[_Piece]) -> None:
    """Do the work on all pieces, on as many threads as torch has; what it computes has no gradients.

    Raises:
        Exception: what the work raised on the first piece of which it did, when all are done.
    """
    pieces, threads = list(pieces), torch.get_num_threads()
    is_watched = _get_current_dispatch_mode() is not None  # by what sees its own thread only: fedsign.memory.live
    if is_watched or threads == 1 or len(pieces) == 1:
        for piece in pieces:
            work(piece)
        return
    is_inference = torch.is_inference_mode_enabled()  # a thread has its own

    def on_thread(piece: _Piece) -> None:
        with torch.no_grad(), torch.inference_mode(is_inference):
            work(piece)

    with ThreadPoolExecutor(threads, thread_name_prefix="fedsign-piece", initializer=_keep_whole) as pool:
        done = [pool.submit(on_thread, piece) for piece in pieces]
    torch.set_num_threads(threads)  # the number that was set last
    for piece_done in done:
        piece_done.result()


def _keep_whole() -> None:
    """Let a thread divide no operation any further."""
    torch.get_num_threads()  # a thread's first use of torch takes the number that was set last, anywhere
    torch.set_num_threads(1)
