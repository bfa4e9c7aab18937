"""`python -m offbeat` is `offbeat`."""

from offbeat.app.cli import main

main()
