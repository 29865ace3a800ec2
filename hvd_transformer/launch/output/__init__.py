"""What a launched job prints and tells: to its screen, its log, and other processes that attach to it."""
