"""`python -m onnxfuse`."""

import sys


def run() -> int:
    """The command line; Ctrl-C is one line also while it is still being imported."""
    try:
        from onnxfuse.commands import main

        return main()
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(run())
