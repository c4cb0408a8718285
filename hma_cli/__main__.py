"""`python -m hma_cli`: the same as `hma`."""

from hma_cli.app import main

main()
