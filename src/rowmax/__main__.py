"""`rowmax` and `python -m rowmax`: the command line, or how to install it."""

import sys


def main() -> int:
    """Run the command line; 1 where its two dependencies are missing."""
    try:
        import rich  # noqa: F401  the commands print with it

        from rowmax.cli.app import app
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("typer", "rich"):
            raise
        print(f"rowmax: the command line needs {error.name}: pip install 'rowmax[cli]'", file=sys.stderr)
        return 1
    app(prog_name="rowmax")
    return 0


if __name__ == "__main__":
    sys.exit(main())
