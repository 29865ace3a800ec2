"""The commands: one file each, thin; whatever is heavy is imported inside the command, so `--help` is instant."""
