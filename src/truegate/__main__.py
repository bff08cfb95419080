"""`python -m truegate` is the command line."""

from truegate.cli import main

main()
