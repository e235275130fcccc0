"""All pages of the reference, written anew."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from docs.generate.cli import cli_page
from docs.generate.door import door_page
from docs.generate.meanings import closing_page, exit_codes_page, failures_page
from docs.generate.plan import plan_page
from docs.generate.policy import policy_page

REFERENCE = Path(__file__).parents[1] / "reference"
NOTE = "<!-- Written by docs/generate from the code. Do not edit. -->"


PAGES: dict[str, Callable[[], str]] = {
    "plan.md": plan_page,
    "policy.md": policy_page,
    "cli.md": cli_page,
    "door.md": door_page,
    "exit-codes.md": exit_codes_page,
    "failures.md": failures_page,
    "closing-reasons.md": closing_page,
}


def page(name: str) -> str:
    """The text of one page as it is committed."""
    return f"{NOTE}\n\n{PAGES[name]().strip()}\n"


def main() -> None:
    REFERENCE.mkdir(exist_ok=True)
    for name in PAGES:
        (REFERENCE / name).write_text(page(name))
        sys.stderr.write(f"docs/reference/{name}\n")


if __name__ == "__main__":
    main()
