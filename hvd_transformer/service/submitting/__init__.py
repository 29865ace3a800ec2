"""From what a user asks for to the jobs of the queue."""
