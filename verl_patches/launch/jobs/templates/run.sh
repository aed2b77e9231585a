#!/usr/bin/env bash
# Start the job's command on node 0, unless it runs already, and follow its output; the exit code is the command's.
# Ctrl-C or a lost connection do not end the command: follow.sh shows its output again, down.sh ends it and Ray.
#
#   bash run.sh              after: bash up.sh
#   bash run.sh WORD...      this command, without the job's uploads
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=ssh.sh
source "$here/ssh.sh"
goes_on="if the command was started, it still runs: follow.sh shows its output, down.sh ends it and Ray"

[ $# = 0 ] || command=("$@")
[ ${#command[@]} != 0 ] || fail 2 "job $job has no command to run"
require_secrets
token=$(< /proc/sys/kernel/random/uuid) # a call that was lost is made again, and the command is started once
until code=0 && { on 0 run "$token" || code=$?; } && [ $code != $lost ]; do
    ((SECONDS < reconnect_s)) || fail 1 "no connection to node 0 (${hosts[0]}) for $reconnect_s s: start run.sh again, or follow.sh"
    say "no connection to node 0 (${hosts[0]}); trying again"
    sleep "$retry_s"
done
[ $code = 0 ] || exit $code
rm -rf "$answers" # the trap does not run after exec
exec bash "$here/follow.sh"
