"""What the images of docker/ promise: user, folders, port, and an entrypoint with the roles `worker` and `launcher`."""

from pathlib import PurePosixPath

GROUP_ID = 1000  # of their user
SSH_PORT = 2222  # ssh's default in them
FOLDER = "/work"  # where commands start, and theirs to write
LAUNCHER_KEY = "/keys/launcher"  # workers let in whom authorized_keys there names
WORKER_KEYS = "/keys/workers"  # where workers put their host keys for the launcher


def output_folder(output_dir: str) -> str:
    """Where the volume for the output is: an absolute output_dir lies in it, a relative one starts from it."""
    output = PurePosixPath(output_dir)
    if not output.is_absolute():
        return FOLDER
    return str(output.parent if output.parent.name else output)
