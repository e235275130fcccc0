"""`python -m thinwire.cli` is `thinwire`, where no script was installed."""

from thinwire.cli import main

main()
