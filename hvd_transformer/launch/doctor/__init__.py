"""What is wrong with which host, and what to do: one probe a host, their answers compared."""
