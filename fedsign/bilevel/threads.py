"""Run independent pieces of work on a CPU, each on its own thread.

torch's intra-op threads split one operator, which pays off for large ones only.  Independent pieces run in parallel
whatever their size, since torch's operators release the GIL.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

_Piece = TypeVar("_Piece")


def each(work: Callable[[_Piece], None], pieces: Iterable[_Piece]) -> None:
    """Run `work` on all pieces, on as many threads as torch has; without gradients.

    Raises:
        Exception: the first exception of any piece, in order, after all have finished.
    """
    pieces, threads = list(pieces), torch.get_num_threads()
    is_watched = _get_current_dispatch_mode() is not None  # dispatch modes, as in fedsign.memory.live, are thread-local
    if is_watched or threads == 1 or len(pieces) == 1:
        for piece in pieces:
            work(piece)
        return
    is_inference = torch.is_inference_mode_enabled()  # thread-local, so passed on

    def on_thread(piece: _Piece) -> None:
        with torch.no_grad(), torch.inference_mode(is_inference):
            work(piece)

    with ThreadPoolExecutor(threads, thread_name_prefix="fedsign-piece", initializer=_keep_whole) as pool:
        done = [pool.submit(on_thread, piece) for piece in pieces]
    torch.set_num_threads(threads)  # restore: new threads inherit the number that was set last, by any thread
    for piece_done in done:
        piece_done.result()


def _keep_whole() -> None:
    """Turn off intra-op parallelism on this thread."""
    torch.get_num_threads()  # must come first: initializing a thread resets its number to the global one
    torch.set_num_threads(1)
