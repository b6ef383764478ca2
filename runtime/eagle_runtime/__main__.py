"""eagle-run, also as `python -m eagle_runtime`."""

from __future__ import annotations

from eagle_runtime import cli
from eagle_runtime.huge_pages import restart_with_huge_pages


def main() -> None:
    """Runs the command in a process with huge pages."""
    restart_with_huge_pages()
    cli.main()


if __name__ == "__main__":
    main()
