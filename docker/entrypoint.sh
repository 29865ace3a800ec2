#!/usr/bin/env bash
# What a container does:
#
#   worker               lets launchers in through sshd, whose key is made here; SIGTERM lets its ranks save first
#   launcher COMMAND...  makes a key, waits until all hosts of $HOSTS (h1:2,h2:2) let it in, and runs the command
#   health               whether this worker's sshd answers
#   COMMAND...           runs the command
#
# Private keys stay in their containers. /keys/launcher holds the public key that workers let in, /keys/workers the
# workers' public host keys: a launcher and its workers share them as volumes.
set -euo pipefail

readonly wait_seconds=60
leaves=0 # 1: this worker is asked to end

# Makes the key pair $1 unless it is there: a container that starts again, or a mounted key.
make_key() { [ -e "$1" ] || (umask 077 && ssh-keygen -q -t ed25519 -N '' -f "$1"); }

# Writes a public file whole or not at all.
publish() {
    (umask 022 && cat >"$1.new")
    mv "$1.new" "$1"
}

wait_for() {
    local said
    until said=$(ssh -o BatchMode=yes -o StrictHostKeyChecking=accept-new -o ConnectTimeout=5 "$1" true 2>&1); do
        if ((SECONDS > wait_seconds)); then
            echo "entrypoint: host $1 does not let the launcher in for $wait_seconds s: ${said##*$'\n'}" >&2
            exit 1
        fi
        sleep 0.5
    done
}

# The launchers' programs on this worker.
agents() { grep -l '[h]vd_transformer.launch.node.node_agent' /proc/[0-9]*/cmdline 2>/dev/null | cut -d / -f 3; }

# The ranks save, then the container ends. An agent that begins meanwhile is told, too.
leave() {
    local found
    leaves=1
    while found=$(agents || true) && [ -n "$found" ]; do
        xargs kill -TERM <<<"$found" 2>/dev/null || true
        sleep 0.2
    done
    kill -TERM "$sshd" 2>/dev/null || true # it may have ended
}

case ${1:-} in
    worker)
        if [ -e /keys/launcher/id_rsa ]; then # the key that the pods of an MPIJob share: a new pod is known, too
            install -m 600 /keys/launcher/id_rsa ~/.ssh/host_key
            ssh-keygen -y -f ~/.ssh/host_key >~/.ssh/host_key.pub
        fi
        make_key ~/.ssh/host_key
        (cut -d ' ' -f 1,2 ~/.ssh/host_key.pub | sed 's/^/* /') | publish "/keys/workers/$HOSTNAME"
        /usr/sbin/sshd -D -e -f /etc/ssh/hvd-transformer_sshd_config &
        sshd=$!
        trap leave TERM
        code=0
        wait "$sshd" || code=$?
        while kill -0 "$sshd" 2>/dev/null; do # a signal also ends the wait
            code=0
            wait "$sshd" || code=$?
        done
        exit $((leaves ? 0 : code))
        ;;
    launcher)
        make_key ~/.ssh/id_ed25519
        ssh-keygen -y -f ~/.ssh/id_ed25519 | publish /keys/launcher/authorized_keys
        IFS=, read -ra hosts <<<"${HOSTS:-}"
        for host in "${hosts[@]}"; do
            wait_for "${host%%:*}"
        done
        exec "${@:2}"
        ;;
    health)
        [ -n "$(ssh-keyscan -T 4 -p 2222 localhost 2>/dev/null)" ]
        ;;
    *)
        if [ -e /keys/launcher/id_rsa.pub ]; then # of an MPIJob
            cut -d ' ' -f 1,2 /keys/launcher/id_rsa.pub | sed 's/^/* /' >~/.ssh/known_hosts
        fi
        exec "$@"
        ;;
esac
