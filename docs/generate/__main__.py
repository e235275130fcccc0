"""All pages of the reference, written anew."""

from __future__ import annotations

import sys
from pathlib import Path

from docs.generate.cli import cli_page
from docs.generate.meanings import closing_page, exit_codes_page, failures_page
from docs.generate.plan import plan_page

REFERENCE = Path(__file__).parents[1] / "reference"
NOTE = "<!-- Written by docs/generate from the code. Do not edit. -->"


def pages() -> dict[str, str]:
    """File name -> text of every page of the reference."""
    made = {
        "plan.md": plan_page(),
        "cli.md": cli_page(),
        "exit-codes.md": exit_codes_page(),
        "failures.md": failures_page(),
        "closing-reasons.md": closing_page(),
    }
    return {name: f"{NOTE}\n\n{text.strip()}\n" for name, text in made.items()}


def main() -> None:
    REFERENCE.mkdir(exist_ok=True)
    for name, text in pages().items():
        (REFERENCE / name).write_text(text)
        sys.stderr.write(f"docs/reference/{name}\n")


if __name__ == "__main__":
    main()
