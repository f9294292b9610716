"""AOTInductor for a GPU that is not here: all that pretends is in this room, and runs in a child process only."""
