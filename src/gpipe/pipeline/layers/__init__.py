"""How layers run: built, executed, with or without a graph, and with their buffers and random generators kept."""
