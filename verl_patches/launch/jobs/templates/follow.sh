#!/usr/bin/env bash
# Print the output of the job's command from its beginning until it ends; the exit code is the command's. A connection
# that is lost is made again, for a quarter of an hour. Ctrl-C ends this script alone.
#
#   bash follow.sh
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=ssh.sh
source "$here/ssh.sh"
goes_on="the command still runs: follow.sh shows its output again, down.sh ends it and Ray"

limit=0 # none: a command takes as long as it takes, and ssh notices a connection that is lost (ServerAliveInterval)
seen=$answers/seen
: > "$seen"
follow() { # print the output that was not printed yet
    on 0 follow "$(stat --format=%s "$seen")" | tee -a "$seen"
}

while true; do
    code=0
    follow || code=$?
    [ $code = $lost ] || exit $code
    until=$((SECONDS + reconnect_s))
    until state=$(limit=60 && on 0 state); do
        ((SECONDS < until)) || fail 1 "no connection to node 0 (${hosts[0]}) for $reconnect_s s; $goes_on"
        say "no connection to node 0 (${hosts[0]}); trying again"
        sleep "$retry_s"
    done
    if [ "$state" = $lost ]; then # the command itself has ended with this code
        follow || true
        exit $lost
    fi
    say "the connection to node 0 (${hosts[0]}) was lost; the command still runs"
done
