#!/usr/bin/env bash
#
# Which hosts could take ranks now? One host:slots a line, and exit code 0.
#
#   hvd-transformer launch --host-discovery-script hostfiles/discover.sh ...
#
# asks again and again while the job runs. This one knows a list and prints those that answer on their ssh port; in a
# cloud it would ask for the machines with a label, under a scheduler for the nodes of the allocation. It must be quick:
# all hosts are asked at once, and one that does not answer within two seconds is not there.

hosts="node1:4 node2:4 node3:4"
port=22

for host in $hosts; do
    timeout 2 bash -c ': <"/dev/tcp/$0/$1"' "${host%:*}" "$port" 2>/dev/null && echo "$host" &
done | sort -V # ranks keep their hosts as long as the answer stays the same
