"""A client process that follows a script of rounds: `python -m tests.support.scripted_client JSON client start ...`.

`{"absent": [3, 7], "again": [5]}`: it fails the assignments of rounds 3 and 7, as one does whose training ended, after
the outcomes that came with them were applied; and answers that of round 5 as one does that lost its state before.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection
from dataclasses import replace

from thinwire.cli.main import main
from thinwire.client import execute
from thinwire.client.assignment_context import AssignmentContext
from thinwire.client.errors import CannotReply
from thinwire.client.execute import Result
from thinwire.client.execute import work as honest
from thinwire.client.executor import Executor
from thinwire.client.run_state import ClientRunState
from thinwire.client.train.protocol import ClientInfo
from thinwire.core.types import ReplyHeader

Work = Callable[[AssignmentContext, ReplyHeader, ClientRunState, Executor, ClientInfo], Result]


def working(absent: Collection[int], restarted: Collection[int]) -> Work:
    """`work` that does so."""

    def work(
        job: AssignmentContext, header: ReplyHeader, state: ClientRunState, executor: Executor, client: ClientInfo
    ) -> Result:
        if job.assignment.kind == "train" and job.assignment.round in absent:
            raise CannotReply("worker", "absent, as this round was wanted")
        if job.assignment.kind == "train" and job.assignment.round in restarted:
            state = replace(state, residual=None, momentum=None, codec_arrays={}, encoded_at=0)
        return honest(job, header, state, executor, client)

    return work


if __name__ == "__main__":
    said = json.loads(sys.argv.pop(1))
    execute.work = working(said["absent"], said["again"])  # type: ignore[assignment]  # for every handler of it
    sys.exit(main())
