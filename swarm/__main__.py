"""Entry point: it checks the system and the Python version before it imports anything that needs them."""

import sys

WSL2 = (
    "echo-node: this is Windows' own Python; echo-node runs in WSL2. In PowerShell: wsl --install -d Ubuntu; then, in "
    "Ubuntu, as docs/volunteer.md says for Linux"
)


def main() -> None:
    if sys.platform == "win32":
        print(WSL2, file=sys.stderr)
        sys.exit(2)
    if sys.version_info < (3, 11):  # noqa: UP036 - a user of an older Python deserves a line, not a SyntaxError
        version = ".".join(str(part) for part in sys.version_info[:2])
        sys.exit("echo-node: this is Python " + version + "; install Python 3.11 or newer and run it with that")
    from swarm.cli.run import run

    run()


if __name__ == "__main__":
    main()
