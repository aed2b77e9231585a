#!/usr/bin/env bash
# Copy the logs of all nodes, of Ray, of Ascend (plog) and of the job's command, to FOLDER/node-RANK-HOST. Nothing is ended.
#
#   bash logs.sh [FOLDER]
#
# Exit code 1 where those of a node, which is named, did not arrive.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=ssh.sh
source "$here/ssh.sh"
logs=${1:-$logs}
goes_on="nothing was ended or deleted"

limit=900
at_once "$all" fetch_logs || fail 1 "some logs did not arrive in $logs"
say "logs in $logs"
