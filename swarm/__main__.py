"""Entry point: it checks the Python version before it imports anything that needs it."""

import sys


def main() -> None:
    if sys.version_info < (3, 11):  # noqa: UP036 - a user of an older Python deserves a line, not a SyntaxError
        version = ".".join(str(part) for part in sys.version_info[:2])
        sys.exit("echo-node: this is Python " + version + "; install Python 3.11 or newer and run it with that")
    from swarm.cli.run import run

    run()


if __name__ == "__main__":
    main()
