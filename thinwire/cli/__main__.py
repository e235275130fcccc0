"""Run `thinwire` as `python -m thinwire.cli`, for environments without the installed script."""

from thinwire.cli import main

main()
