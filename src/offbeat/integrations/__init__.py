"""Offbeat inside other frameworks. Each module needs its framework and none of the others."""
