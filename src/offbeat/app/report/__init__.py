"""One page about runs, in a file of its own that needs no network."""
