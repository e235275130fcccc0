"""All pages of the reference, and what is told of accuracy, bytes and speed, written again."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from docs.generate.accuracy import accuracy_page, plots
from docs.generate.cli import cli_page, environment_page
from docs.generate.codecs import codecs_page
from docs.generate.dashboard_api import openapi
from docs.generate.dashboard_figures import PARTS as DASHBOARD
from docs.generate.device_api import device_api_page
from docs.generate.drift import drift_part
from docs.generate.meanings import closing_page, exit_codes_page, failures_page
from docs.generate.personal import personal_part
from docs.generate.plan import plan_page
from docs.generate.policy import aggregator_page, policy_page
from docs.generate.privacy import PARTS as PRIVACY
from docs.generate.python_api import python_page
from docs.generate.readme import PARTS as QUOTED
from docs.generate.readme import evidence_index, readme_table
from docs.generate.robust import robust_part
from docs.generate.rounds import PARTS as ROUNDS
from docs.generate.secure import secure_cases, secure_part
from docs.generate.simulated import PARTS as SIMULATED
from docs.generate.speed import PARTS as SPEED
from docs.generate.structure import structure_part
from docs.generate.which_codec import which_codec

DOCS = Path(__file__).parents[1]
REFERENCE = DOCS / "reference"
NOTE = "<!-- Written by docs/generate from the code. Do not edit. -->"


PAGES: dict[str, Callable[[], str]] = {
    "plan.md": plan_page,
    "policy.md": policy_page,
    "aggregator.md": aggregator_page,
    "cli.md": cli_page,
    "python.md": python_page,
    "environment.md": environment_page,
    "codecs.md": codecs_page,
    "device-api.md": device_api_page,
    "exit-codes.md": exit_codes_page,
    "failures.md": failures_page,
    "closing-reasons.md": closing_page,
}


def page(name: str) -> str:
    """The text of one page as it is committed."""
    return f"{NOTE}\n\n{PAGES[name]().strip()}\n"


HOW: dict[str, Callable[[], str]] = {"different-data": drift_part}

# Between these two lines of a page that people write stands what the script writes.
BEGIN, END = "<!-- Written by docs/generate: do not edit this part. -->", "<!-- Until here. -->"


def written() -> dict[str, str]:
    """Everything that the script writes, by its place under docs/."""
    parts = (
        DASHBOARD
        | SPEED
        | ROUNDS
        | SIMULATED
        | PRIVACY
        | QUOTED
        | {"codec-choice": which_codec, "robust": robust_part, "personal": personal_part}
        | {"update-structure": structure_part}
    )
    evidence = {"accuracy-bytes.md": f"{NOTE}\n\n{accuracy_page().strip()}\n", **plots()}
    evidence["secure-sum.md"] = filled(DOCS / "evidence" / "secure-sum.md", secure_part(), secure_cases())
    return {
        "../README.md": filled(DOCS.parent / "README.md", readme_table()),
        "README.md": filled(DOCS / "README.md", evidence_index()),
        **{f"reference/{name}": page(name) for name in PAGES},
        "reference/openapi.json": openapi(),
        **{f"evidence/{name}": text for name, text in evidence.items()},
        **{f"evidence/{name}.md": filled(DOCS / "evidence" / f"{name}.md", part()) for name, part in parts.items()},
        **{f"how/{name}.md": filled(DOCS / "how" / f"{name}.md", part()) for name, part in HOW.items()},
    }


def filled(path: Path, *parts: str) -> str:
    """Return a page with its written parts again, in their order on the page."""
    done, text = "", path.read_text()
    for part in parts:
        before, _, rest = text.partition(BEGIN)
        done += f"{before}{BEGIN}\n\n{part.strip()}\n\n{END}"
        text = rest.partition(END)[2]
    return done + text


def main() -> None:
    REFERENCE.mkdir(exist_ok=True)
    for name, text in written().items():
        (DOCS / name).write_text(text)
        sys.stderr.write(f"docs/{name}\n")


if __name__ == "__main__":
    main()
