"""What can go wrong, sorted by whose fault it is. The type says who has to act, the message what to do next."""

from pathlib import Path


class EchoError(Exception):
    """Base of every error that echo-node raises on purpose."""


class UserError(EchoError):
    """The person at the keyboard has to change something. Shown as one line, with exit status 2."""


class InUseElsewhere(UserError):
    """Another process speaks with this node's key."""

    def __init__(self) -> None:
        super().__init__(
            "another process uses this node's identity, probably on another machine to which its state directory was "
            "copied: this one ends. In the copy, remove node.key and generation; it then gets an identity of its own"
        )


class Damaged(UserError):
    """A file of a run was changed or is missing. The message says which one, and how to go on."""

    def __init__(self, run_dir: Path, name: str, why: object) -> None:
        super().__init__(
            f"{run_dir / name} is damaged ({' '.join(str(why).split())}): put back a copy, or go on from its newest "
            f"whole checkpoint in a new run, `echo-node lead --from {run_dir}` (docs/recovery.md, Damage)"
        )


class ProtocolError(EchoError):
    """A peer sent something that the protocol does not allow."""


class TooLarge(ProtocolError):
    """A body exceeded its cap and was refused before it was decoded."""


class ChildFailed(EchoError):
    """A child process died, hung or answered with an error. The node restarts it or says why not."""


class ChildHung(ChildFailed):
    """A child process made no progress within its limit, and was killed."""


class PeerUnreachable(EchoError):
    """A peer did not answer in time. Try again later."""


def first_fault(error: BaseException) -> BaseException:
    """Return the first plain exception of a group, or the exception itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
