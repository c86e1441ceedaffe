"""`python -m onnxfuse`."""

import os
import sys


def _forget_current_folder() -> None:
    """`python -m` lets modules in the current folder come first: a file called numpy.py that lies beside a model must not be run."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    try:
        here = os.path.realpath(os.curdir)
    except OSError:  # it is gone, and holds nothing; the commands say so
        return
    if sys.path and os.path.realpath(sys.path[0] or os.curdir) == here != os.path.realpath(package):
        del sys.path[0]


def run() -> int:
    """The command line; Ctrl-C is one line also while it is still being imported."""
    try:
        from onnxfuse.commands import main

        return main()
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    _forget_current_folder()
    sys.exit(run())
