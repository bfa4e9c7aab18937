"""`python -m offbeat` is `offbeat`."""

from offbeat.cli import main

main()
