#!/usr/bin/env bash
# Start Ray on all nodes of the job, in containers of its image where it has one, and wait until all nodes are in.
# Idempotent: what runs already stays as it is.
#
#   bash up.sh          then: bash run.sh
#
# Exit codes: 0 all nodes are in Ray. 1 a node failed and is named; what was started is ended, its logs are gathered.
# 2 something is in the way on a node that is named, such as a taken port; nothing was started. 130 Ctrl-C.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=ssh.sh
source "$here/ssh.sh"
goes_on="nodes may still be starting Ray; down.sh ends it on all of them"

start_container() { # RANK: the job's container, by start_container.sh on the node's host; prints "new" where it was not there
    local found volume lines=''
    found=$(host "$1" "docker ps --all --filter 'name=^/$job\$' --format '{{.Label \"verl_patches.job\"}} {{.Label \"verl_patches.digest\"}}.'") || return
    case $found in
        "$job $digest.") host "$1" "docker start $job > /dev/null" ;;
        "$job "*) fail 2 "container $job was started for another image or job file: down.sh, then up.sh" ;;
        ?*) fail 2 "a container $job is there that up.sh did not start" ;;
        '')
            for volume in "${volumes[@]}"; do # Docker would make a folder that is missing, as root
                lines+="[ -d '${volume%%:*}' ] || { echo 'volumes: expected a folder ${volume%%:*} on this host, found none' >&2; exit 2; }; "
            done
            lines+="export NAME=$job IMAGE=$(printf %q "$image") VOLUMES='${volumes[*]}'; "
            lines+="bash -s -- --label verl_patches.job=$job --label verl_patches.digest=$digest ${container_options[*]@Q} > /dev/null ||
                { code=\$?; docker rm $job > /dev/null 2>&1; exit \$code; }" # docker rm leaves a running one alone
            remote "$1" "echo '$begins'; $lines" < "$here/start_container.sh" || return
            echo new
            ;;
    esac
}

remove_new() { # the containers that this call has started, where nothing was started in them
    local rank
    for rank in $new; do host "$rank" "docker rm --force $job > /dev/null" || true; done
}

failed() {
    [ -z "$running" ] || fail 1 "Ray ran already on some nodes, so nothing is ended; down.sh ends it"
    say "the nodes' logs are gathered, and what was started is ended:"
    bash "$here/down.sh" || true
    exit 1
}

read_secrets
new=''
if [ -n "$image" ]; then
    limit=$((wait_s > 180 ? wait_s : 180)) # docker may have to pull the image
    at_once "$all" start_container || code=2
    for rank in $all; do ! grep -qx new "$answers/$rank.out" || new+=" $rank"; done
    [ -z "${code:-}" ] || { remove_new; exit 2; }
    say "$nodes containers of $image run, $(wc -w <<< "$new") of them new"
fi
limit=180
at_once "$all" on check || { remove_new; fail 2 "nothing was started"; }
running=$(cat "$answers"/*.out | grep -x up || true)

limit=$((start_s + 180))
if ! address=$(on 0 up "${hosts[0]}") || [ -z "$address" ]; then failed; fi # its IP address: a name may be its own loopback
at_once "${all#0}" on up "$address" || failed
limit=$((wait_s + 180))
on 0 wait || failed
say "all $nodes nodes of job $job are in Ray at $address:$gcs"
