"""The command line, the training runs behind it, and the report."""
