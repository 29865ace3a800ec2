# Keeps a job's private folder on one host, for as long as the launcher is connected: sh keeper.sh FOLDER BYTES
# Standard input: the ranks' environment, BYTES long; then a line whenever the ranks are to stop. The answer to each is
# a line. At its end every rank here is ended, and the notes of those that failed are printed.
folder=$1
umask 077
# Hosts may share /tmp: then one makes it and the others have it.
mkdir "$folder" 2>/dev/null || [ -O "$folder" ] || { echo "$folder cannot be made" >&2; exit 1; }
trap 'rm -rf "$folder" || rm -rf "$folder"' EXIT # again if a rank wrote its last note meanwhile
trap 'exit 1' HUP INT TERM
head -c "$2" >"$folder/environment" || exit 1
echo ready

host=$(uname -n)
running() { for note in "$folder/running-$host-"*; do [ -e "$note" ] && echo "$note"; done; }
signal_ranks() { for note in $(running); do kill -s "$1" -- "$2$(cat "$note")" 2>/dev/null; done; }
stop() { : >"$folder/stopped"; signal_ranks TERM; }

while read -r _; do
    : >"$folder/stopped"
    running | wc -l # before they are told: one may be gone in no time
    signal_ranks TERM
done

# The job has ended, or the launcher is gone. What is left here may save before it is killed with all its children.
stop
for _ in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do
    [ -n "$(running)" ] || break
    sleep 0.25
done
cat "$folder"/failed-* 2>/dev/null
signal_ranks KILL - # the whole group
