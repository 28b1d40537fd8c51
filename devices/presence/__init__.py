"""Who is there and who leads: state machines without I/O."""
