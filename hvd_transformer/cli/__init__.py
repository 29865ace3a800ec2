"""The commands, one thin file each. Slow imports happen inside the command body, so that `--help` is instant."""
