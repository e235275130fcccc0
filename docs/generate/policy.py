"""docs/reference/policy.md and aggregator.md: every key of client.toml and of aggregator.toml."""

from __future__ import annotations

import inspect

from docs.generate.plan import keys
from docs.generate.table import table
from thinwire.client.policy import ClientFile, Policy
from thinwire.core.owner_file import AggregatorFile


def policy_page() -> str:
    said = (
        "`client.toml` in a client's own folder (`clients/NAME/` in the state directory), or the file that "
        "`thinwire client start --policy FILE` names. A key that is not in this list is refused at the start. "
        "How to use it: [a device's policy](../how/device-policy.md)."
    )
    rows = list(keys(Policy, ClientFile.model_json_schema()))
    return "\n\n".join(
        ["# A device's policy", said, f"## [policy]\n\n{inspect.getdoc(Policy)}",
         table(("key", "value", "default", "meaning"), rows)]
    )  # fmt: skip


def aggregator_page() -> str:
    said = (
        "`aggregator.toml` in the state directory (`--home`). The aggregator reads it when it starts; `allow`, "
        "`max_upload_mb` and `alerts` are read whenever they are used. A key that is not in this list is refused. "
        "`thinwire aggregator config` prints what the file says, and which values "
        "are defaults. How to use it: [several runs at once](../how/several-runs.md)."
    )
    own = AggregatorFile.model_json_schema()
    schema = {"$defs": {**own.pop("$defs", {}), AggregatorFile.__name__: own}}
    rows = list(keys(AggregatorFile, schema))
    return "\n\n".join(["# The aggregator's settings", said, table(("key", "value", "default", "meaning"), rows)])
