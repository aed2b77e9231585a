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
goes_on="nodes may still be starting Ray; run down.sh to end it on all of them"

start_container() { # RANK: the job's container, by start_container.sh on the node's host; prints "new" where it was not there
    local format='{{.Label "verl_patches.job"}} {{.Label "verl_patches.digest"}}.' labels found volume line=''
    found=$(host "$1" "docker ps --all --filter 'name=^/$job\$' --format '$format'") || return
    case $found in
        "$job $digest.") host "$1" "docker start $job > /dev/null" ;;
        "$job "*) fail 2 "container $job was started for another image or job file: run down.sh, then up.sh" ;;
        ?*) fail 2 "container $job exists, but was not started by up.sh: remove it, or change the name of the job" ;;
        '')
            for volume in "${volumes[@]%%:*}"; do # Docker would make a folder that is missing, as root
                line+="[ -d '$volume' ] || { echo 'volumes: this host has no folder $volume' >&2; exit 2; }; "
            done
            labels="--label verl_patches.job=$job --label verl_patches.digest=$digest"
            line+="export NAME=$job IMAGE=${image@Q} DIES_PER_NODE=$dies VOLUMES='${volumes[*]}'; "
            line+="bash -s -- $labels ${container_options[*]@Q} > /dev/null"
            line+=" || { code=\$?; docker rm $job > /dev/null 2>&1; exit \$code; }" # docker rm refuses a running one
            remote "$1" "echo '$begins'; $line" < "$here/start_container.sh" || return
            echo new
            ;;
    esac
}

nothing_was_started() { # except containers: those that this call has started are removed
    local rank
    for rank in $new; do host "$rank" "docker rm --force $job > /dev/null" || true; done
    fail 2 "nothing was started"
}

failed() {
    [ -z "$running" ] || fail 1 "Ray ran already on some nodes, so nothing was ended; run down.sh to end it on all nodes"
    say "copying the nodes' logs, and ending what was started:"
    bash "$here/down.sh" || true
    exit 1
}

exec 8> "$here/.lock"
flock --nonblock 8 || fail 2 "another up.sh runs in $here: wait for its end, or run down.sh"
require_secrets
new='' in_the_way=''
if [ -n "$image" ]; then
    limit=$((wait_s > 180 ? wait_s : 180)) # docker may have to pull the image
    at_once "$all" start_container || in_the_way=yes
    for rank in $all; do ! grep -qx new "$answers/$rank.out" || new+=" $rank"; done
    [ -z "$in_the_way" ] || nothing_was_started
    say "$nodes containers of $image run; $(wc -w <<< "$new") were started now"
fi

limit=180
at_once 0 on check "${hosts[0]}" || in_the_way=yes
read -r _ address < "$answers/0.out" || address=${hosts[0]} # node 0's IP address: its name may be a loopback
at_once "${all#0}" on check "$address" || in_the_way=yes
[ -z "$in_the_way" ] || nothing_was_started
running=$(grep -h ^up "$answers"/*.out || true)

limit=$((start_s + 180))
at_once 0 on up "$address" || failed
at_once "${all#0}" on up "$address" || failed
limit=$((wait_s + 180))
on 0 wait || failed
say "all $nodes nodes of job $job have joined Ray at $address:$gcs"
