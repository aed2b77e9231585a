#!/usr/bin/env bash
# End what up.sh and run.sh have started on all nodes, and nothing else, then gather the nodes' logs, then delete the
# job's files and containers there. Idempotent. A node whose logs did not arrive keeps its files and its container.
#
#   bash down.sh [FOLDER]       FOLDER: for the logs
#
# Exit code 1 where a node, which is named, was not reached, or keeps its container or its logs.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=ssh.sh
source "$here/ssh.sh"
logs=${1:-$logs}
goes_on="run down.sh again to end the rest"

# files of a run, which must not be lost with a container; those in hidden folders are caches
of_runs='^[AC] (/[^./][^/]*)*(\.(safetensors|parquet|pt|jsonl)|/(summary|manifest)\.json)$'

remove_container() { # RANK: print what it holds beside its image and its volumes (docker diff), then delete it
    local changes kept to
    changes=$(host "$1" "ids=\$($listed) || exit 1; for id in \$ids; do docker diff \$id || exit 1; done") || return
    changes=$(grep -v "^. $folder/" <<< "$changes" || true)
    if [ -n "$changes" ]; then
        to=$logs/node-$1-${hosts[$1]}
        say "docker diff (C changed, A added, D deleted); the whole list is in $to/docker_diff.txt:"
        mkdir -p "$to" && echo "$changes" > "$to/docker_diff.txt" || return
        grep -Ev '/(__pycache__|\.cache)(/|$)' "$to/docker_diff.txt" | sed 20q >&2
    fi
    if kept=$(grep -E "$of_runs" <<< "$changes"); then
        say "container $job is not deleted: it holds files of runs outside its volumes, such as ${kept%%$'\n'*}"
        fail 1 "save what you need (docker cp $job:PATH FOLDER), then docker rm --force $job"
    fi
    host "$1" "ids=\$($listed) || exit 1; [ -z \"\$ids\" ] || docker rm --force \$ids > /dev/null"
}

code=0
limit=300
at_once "$all" on end || code=1
limit=900
at_once "${good[*]}" fetch_logs || code=1
limit=180
at_once "${good[*]}" on clean || code=1
[ -z "$image" ] || at_once "${good[*]}" remove_container || code=1
[ $code = 0 ] || fail 1 "job $job is not completely down: look at the nodes named above, then run down.sh again"
say "job $job is down on all nodes; logs in $logs"
