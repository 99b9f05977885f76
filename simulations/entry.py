"""The console script `fedsign`: answers a shell that completes a command, or runs the command line.

Importing this module imports nothing heavy: a shell waits for the answer at every press of Tab.
"""

import os
import sys

COMPLETE = "_FEDSIGN_COMPLETE"  # set by the scripts of `fedsign completion` to the name of the shell


def main() -> None:
    """Answer, or run."""
    if shell := os.environ.get(COMPLETE):
        from simulations.completion.answer import answer

        sys.stdout.write(answer(shell, sys.argv[1:]))
        return
    from simulations.cli import main as run

    run()
