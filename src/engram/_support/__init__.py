"""What every room uses and none owns: checks, words of messages, processes, memory, nested rows."""
