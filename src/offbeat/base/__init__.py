"""The foundation: clocks, packed vectors, live tensors, random draws, errors."""
