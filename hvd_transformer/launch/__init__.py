"""From hosts to a running job: host files, the horovodrun command, and the job it starts."""
