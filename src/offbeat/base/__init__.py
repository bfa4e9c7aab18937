"""What everything stands on: clocks, packed vectors, live tensors, draws, errors."""
