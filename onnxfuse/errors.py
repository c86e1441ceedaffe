"""Faults that are the user's to mend. Each is one line that names the thing and the remedy, and carries its exit status."""


def refusal(error: OSError) -> str:
    """Why the file system refuses, in lower case, as a part of such a line."""
    return "no such file" if isinstance(error, FileNotFoundError) else (error.strerror or str(error)).lower()


class OnnxfuseError(Exception):
    """Base of every fault that a command reports as one line."""

    exit_status = 2


class BadInput(OnnxfuseError):
    """Wrong usage or a bad model file: exit status 2."""

    exit_status = 2


class MissingHere(OnnxfuseError):
    """Something is missing on this machine (GPU, TensorRT, compiler): exit status 3. The message says what to install."""

    exit_status = 3


class Disagreement(OnnxfuseError):
    """Built or rewritten, but the outputs do not agree: exit status 1."""

    exit_status = 1
