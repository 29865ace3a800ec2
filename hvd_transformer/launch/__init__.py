"""From hosts to a finished job: host files, the horovodrun command, supervision and restarts. No torch."""
