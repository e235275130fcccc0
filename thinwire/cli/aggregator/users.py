"""The commands of `thinwire aggregator users` and `tokens`: who may use the dashboard and its API.

They work on the state directory, with or without a running aggregator. Whoever may write that directory may use these
commands, so nobody is ever locked out of the dashboard.
"""

from __future__ import annotations

import sys
from typing import Annotated, TypeAlias

import typer

from thinwire.cli import console
from thinwire.cli.params import Home, Json
from thinwire.core.errors import UsageError

users = typer.Typer(name="users", help="Users of the dashboard, and their roles.", no_args_is_help=True)
tokens = typer.Typer(name="tokens", help="Tokens with which programs use the API.", no_args_is_help=True)

UserName: TypeAlias = Annotated[str, typer.Argument(metavar="NAME", help="name of the user")]
Role: TypeAlias = Annotated[str, typer.Option("--role", help="viewer, operator or admin")]
FromStdin: TypeAlias = Annotated[
    bool, typer.Option("--password-stdin", help="read the password from the first line of stdin")
]


@users.command()
def add(name: UserName, role: Role = "viewer", password_stdin: FromStdin = False, home: Home = None) -> None:
    """Add a user, who then logs in to the dashboard with a password."""
    from thinwire.cli.local_state import open_store, operator

    with open_store(home, read_only=False, create=True) as store:
        store.users.require_new(name, role)  # before the person types a password
        store.users.add(name, role, _password(password_stdin, f"users add {name} --role {role}"), operator())
    console.line(f"{name} may log in, with the role {role}")


@users.command()
def reset(name: UserName, password_stdin: FromStdin = False, home: Home = None) -> None:
    """Set a new password for a user, end the user's sessions, and revoke the user's tokens."""
    from thinwire.cli.local_state import open_store, operator

    with open_store(home, read_only=False) as store:
        store.users.require(name)
        store.users.set_password(name, _password(password_stdin, f"users reset {name}"), operator())
    console.line(f"{name} has a new password; the sessions of {name} have ended, and the tokens are revoked")


@users.command()
def disable(name: UserName, home: Home = None) -> None:
    """Disable a user: no login, session or token of the user works any more."""
    from thinwire.cli.local_state import open_store, operator

    with open_store(home, read_only=False) as store:
        store.users.disable(name, operator())
    console.line(f"{name} is disabled: no login, no session and no token works any more")


@users.command()
def enable(name: UserName, home: Home = None) -> None:
    """Enable a disabled user."""
    from thinwire.cli.local_state import open_store, operator

    with open_store(home, read_only=False) as store:
        store.users.enable(name, operator())
    console.line(f"{name} may log in again")


@users.command()
def logout(name: UserName, home: Home = None) -> None:
    """End all sessions of a user; `machine` has those that began with a code."""
    from thinwire.cli.local_state import open_store, operator

    with open_store(home, read_only=False) as store:
        store.users.log_out(name, operator())
    console.line(f"the sessions of {name} have ended")


@users.command(name="list")
def list_users(json: Json = False, home: Home = None) -> None:
    """List the users of the dashboard, with their roles."""
    from dataclasses import asdict

    from thinwire.cli.local_state import open_store

    with open_store(home) as store:
        found = store.users.all()
    if json:
        console.document([asdict(row) for row in found])
        return
    header = ("name", "role", "added", "by", "last login")
    rows = [
        (row.name, "disabled" if row.disabled_at else row.role, console.moment(row.created_at), row.who,
         console.moment(row.login_at) if row.login_at else "never")
        for row in found
    ]  # fmt: skip
    console.table(header, rows)
    if not found:
        console.note("no users: log in with a code (thinwire aggregator status --login)")


@tokens.command(name="add")
def add_token(
    name: Annotated[str, typer.Argument(metavar="NAME", help="what the token is for")],
    user: Annotated[str, typer.Option("--user", help="user for whom it acts; default: the machine")] = "machine",
    role: Role = "viewer",
    run: Annotated[str, typer.Option("--run", metavar="ID", help="the one run that it may read; default: all")] = "",
    expires: Annotated[str, typer.Option("--expires", metavar="TIME", help="time until it expires: 24h, 30d")] = "30d",
    json: Json = False,
    home: Home = None,
) -> None:
    """Make a token for the API, and print its secret, which is kept nowhere."""
    from dataclasses import asdict

    from thinwire.cli.local_state import open_store, operator
    from thinwire.cli.params import parse_duration

    expires_s = parse_duration(expires, "--expires")
    with open_store(home, read_only=False) as store:
        run_id = store.run(run).run_id if run else ""
        made = store.tokens.make(name, user, role, run_id, expires_s, operator())
    if json:
        console.document({**asdict(made.row), "secret": made.secret})
        return
    console.line(made.secret)
    rights = f"acts as {role}" + (f", and reads {run_id} only" if run_id else "")
    console.note(f"token {made.row.id} of {user} {rights}, until {console.moment(made.row.expires_at)}")
    console.note("the secret is shown once; send it as the header Authorization: Bearer SECRET")


@tokens.command(name="list")
def list_tokens(json: Json = False, home: Home = None) -> None:
    """List the tokens of the API, without their secrets."""
    from dataclasses import asdict

    from thinwire.cli.local_state import open_store

    with open_store(home) as store:
        found = store.tokens.all()
    if json:
        console.document([asdict(row) for row in found])
        return
    header = ("id", "name", "user", "role", "run", "until", "last used")
    rows = [
        (row.id, row.name, row.user, row.role, row.run_id or "all", console.moment(row.expires_at),
         console.ago(row.used_at) if row.used_at else "never")
        for row in found
    ]  # fmt: skip
    console.table(header, rows, right=("id",))


@tokens.command(name="revoke")
def revoke_token(
    number: Annotated[int, typer.Argument(metavar="ID", help="number of the token (tokens list)")], home: Home = None
) -> None:
    """Revoke a token at once."""
    from thinwire.cli.local_state import open_store, operator

    with open_store(home, read_only=False) as store:
        store.tokens.revoke(number, operator())
    console.line(f"token {number} is revoked")


def _password(from_stdin: bool, command: str) -> str:
    """Return a password, typed twice without an echo, or read from stdin.

    Raise `UsageError` if there is none, or if the two differ.
    """
    import getpass

    if from_stdin:
        return sys.stdin.readline().rstrip("\r\n")
    if not sys.stdin.isatty():
        raise UsageError(
            "there is no terminal to type a password at", "a password on the command line could be read by others",
            f"thinwire aggregator {command} --password-stdin < FILE",
        )  # fmt: skip
    first = getpass.getpass("password: ", sys.stderr)
    if getpass.getpass("again:    ", sys.stderr) != first:
        raise UsageError(
            "the two passwords differ", "a typing error would lock the user out", f"thinwire aggregator {command}"
        )
    return first
