"""docs/reference/policy.md: every key of a device's client.toml."""

from __future__ import annotations

import inspect

from docs.generate.plan import keys
from docs.generate.table import table
from thinwire.client.policy import ClientFile, Policy


def policy_page() -> str:
    said = (
        "`client.toml` in a client's own folder (`clients/NAME/` in the state directory), or the file that "
        "`thinwire client start --policy FILE` names. A key that is not in this list is refused at the start. "
        "How to use it: [a device's policy](../how/device-policy.md)."
    )
    rows = list(keys(Policy, ClientFile.model_json_schema(), lambda key, field: ""))
    return "\n\n".join(
        ["# A device's policy", said, f"## [policy]\n\n{inspect.getdoc(Policy)}",
         table(("key", "value", "default", "meaning"), rows)]
    )  # fmt: skip
