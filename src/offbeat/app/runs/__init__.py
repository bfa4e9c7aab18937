"""Runs: what is trained, how, and what it leaves behind in a folder. The command line is made of these."""
