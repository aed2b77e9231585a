#!/usr/bin/env bash
# Do the work of one node. up.sh, run.sh, follow.sh, logs.sh and down.sh send this file, behind job.sh, to the standard
# input of bash on each node; Slurm, Kubernetes, and whoever starts nodes by hand run `serve` on each.
#
#   bash node.sh VERB [RANK [ARGUMENT]]      RANK: else NODE_RANK, SLURM_NODEID or JOB_COMPLETION_INDEX
#
#   check [HEAD]    fail where Ray could not start here; print "up" where it runs already, else "free", and the address
#   up [HEAD]       start Ray here, unless it runs. HEAD: the address of node 0, else MASTER_ADDR
#   wait            wait until all nodes of the job are in Ray; names those that are missing
#   run TOKEN       start the job's command, unless it runs or a call with this TOKEN has started it
#   follow SKIP     print the command's output from byte SKIP on until it ends; its exit code
#   state           print running, none, killed, or the exit code of the command
#   end             end what up and run have started here, and nothing else; its files stay
#   logs            print a tar archive of this node's logs
#   clean           delete the files of what has ended
#   serve [HEAD]    up; on node 0 then wait, run and follow; at the end, or at a signal: end, logs, clean
#
# Exit codes: 1 it failed, 2 something is in the way and nothing was started; of follow and serve the command's own.
# shellcheck disable=SC2016,SC2046,SC2086  # programs in single quotes; lists of pids, which are split on purpose
set -euo pipefail

say() { echo "${prefix:-}$*" >&2; }
fail() { say "$2"; exit "$1"; } # CODE TEXT

# All that is started here has CLUSTER_NODE_MARK in its environment, with a value that no other start has. Ray's workers
# overwrite their environment with their titles: they are found by the session that they share with Ray's processes.
with_mark() { grep -lszxF "CLUSTER_NODE_MARK=$mark" /proc/[0-9]*/environ | cut -d/ -f3 || true; }
sessions_of() { # PID...; fields of /proc/PID/stat: pid (name) state parent group session
    for pid in "$@"; do
        sed -E 's/.*\) . [0-9]+ [0-9]+ ([0-9]+) .*/\1/' "/proc/$pid/stat" || true
    done 2> /dev/null | sort -u
}
in_sessions() { # SESSION...: the processes that live, zombies left out
    local any; any=$(IFS='|' && echo "$*")
    [ $# = 0 ] || # cat goes on where a process ends while its file is read; sed itself would end there
        cat /proc/[0-9]*/stat 2> /dev/null | sed -En "s/^([0-9]+) \(.*\) [^ZX] [0-9]+ [0-9]+ ($any) .*/\1/p" || true
}
names_of() { for pid in "$@"; do cat "/proc/$pid/comm" || true; done 2> /dev/null; }
ray_runs() {
    local names; names=$(names_of $(with_mark))
    grep -qx raylet <<< "$names" && { [ "$rank" != 0 ] || grep -qx gcs_server <<< "$names"; }
}
read_record() { [ -e "$1" ] && read -r its_job its_digest its_rank address mark < "$1"; }

lock() { # one call at a time in the job's folder, which is this user's alone
    (umask 077 && mkdir -p "$folder")
    [ -O "$folder" ] || fail 2 "folder $folder: expected a folder that this user owns; give the job another one"
    exec 9> "$folder/.lock"
    flock --wait "$1" 9 || fail 2 "another call of node.sh runs in $folder: wait for its end"
}
unlock() { exec 9>&-; }

tool() { PYTHONPATH=$paths${PYTHONPATH:+:$PYTHONPATH} "$python" -m verl_patches.launch.jobs.node "$@"; }

check() { # [HEAD]; sets head, address and is_up
    is_up=free head=${1:-${MASTER_ADDR:-${hosts[0]:-}}}
    cd "$checkout" || exit 2
    command -v "$python" > /dev/null || fail 2 "python: no program $python on this node"
    local place probe to
    for to in "${written[@]}"; do # a folder that does not exist is made by the run
        [ ! -d "$to" ] || { probe=$(mktemp "$to/.writable.XXXXXX" 2> /dev/null) && rm "$probe"; } || fail 2 \
            "$to: this user cannot write there; if it is NFS with root_squash, export it with no_root_squash"
    done
    if read_record "$folder/started" && [ -n "$(with_mark)" ]; then
        [ "$its_job $its_digest $its_rank" = "$job $digest $rank" ] || fail 2 "node $its_rank of job $its_job\
 ($its_digest) is up in $folder, and this is node $rank of job $job ($digest): run down.sh, or give this job another folder and ports"
        ray_runs || fail 2 "Ray was started here, but its raylet or GCS has ended: run down.sh, then up.sh"
        is_up=up
        [ "$rank" != 0 ] || head=$address
        return
    fi
    place=$(tool place "$rank" "$nodes" "$head" "$interface" "$gcs" "${hosts[@]}") || exit 2
    read -r address head <<< "$place"
    local ports=("${node_ports[@]}")
    [ "$rank" != 0 ] || ports=("${head_ports[@]}")
    tool ports "$address" "${ports[@]}" || exit 2
}

start() { # COMMAND...: in the environment of Ray and the job, in a session of its own; nothing outside it has the mark
    unset "${dropped[@]}"
    if [ -n "$interface" ]; then
        export HCCL_SOCKET_IFNAME="=$interface" GLOO_SOCKET_IFNAME="$interface" TP_SOCKET_IFNAME="$interface"
    fi
    [ ${#variables[@]} = 0 ] || export "${variables[@]}"
    [ -z "$preload" ] || export LD_PRELOAD="$preload"
    PATH=$(dirname "$(command -v "$python")"):$PATH
    export PYTHONPATH=$paths${PYTHONPATH:+:$PYTHONPATH}
    cd "$checkout" || exit
    exec setsid env CLUSTER_NODE_MARK="$mark" "$@" < /dev/null 9>&-
}

find_preload() { # jemalloc for Ray of NPUs, unless the job says otherwise; says what would stop or slow it
    preload=''
    if [ "$device" = NPU ] && [[ " ${variables[*]} " != *" LD_PRELOAD="* ]]; then
        preload=$([ ${#variables[@]} = 0 ] || export "${variables[@]}" && tool preload)
    fi
}

reach_head() { timeout 3 bash -c 'exec 3<> "/dev/tcp/$0/$1"' "$head" "$gcs" 2>&1; }
wait_for_head() {
    local fault said='' until=$((SECONDS + wait_s))
    until fault=$(reach_head); do
        [ -e "$folder/started" ] || fail 1 "this start was ended by down.sh"
        fault=$(tail -n 1 <<< "${fault:-no answer within 3 s}")
        ((SECONDS < until)) || { end; fail 1 "Ray's head $head:$gcs did not answer within $wait_s s (${fault##*: })"; }
        [ -n "$said" ] || { say "waiting for Ray's head $head:$gcs (${fault##*: })"; said=yes; }
        sleep 1
    done
}

up() { # [HEAD]
    lock 0
    check "$@"
    if [ "$is_up" = up ]; then
        say "Ray is up already at $address: nothing was started"
    else
        mark=$job-$rank-$(< /proc/sys/kernel/random/uuid) started_here=yes
        echo "$job $digest $rank $address $mark" > "$folder/started"
        local options=("${head_options[@]}")
        [ "$rank" = 0 ] || { options=("--address=$head:$gcs" "${node_options[@]}"); wait_for_head; }
        options+=("--node-ip-address=$address" "--labels={\"verl_patches/job\": \"$job\", \"verl_patches/rank\": \"$rank\"}")
        find_preload
        say "starting Ray at $address, head $head:$gcs"
        if ! (start timeout "$start_s" "$python" -m ray.scripts.scripts start "${options[@]}") > "$folder/ray_start.log" 2>&1
        then
            say "Ray could not be started: $(grep . "$folder/ray_start.log" | tail -n 3)"
            end
            exit 1
        fi
        [ -e "$folder/started" ] || { end; fail 1 "this start was ended by down.sh"; }
    fi
    unlock
}

wait_for_all() {
    read_record "$folder/started" || fail 1 "Ray was not started here, or was ended by down.sh: run up.sh first"
    tool wait "$address:$gcs" "$job" "$nodes" "$wait_s" "${hosts[@]}"
}

# The command's files in the folder: `command` has the number, token and pid of the newest start and the mark of this Ray,
# command-N.log its output, command-N.words its words, command-N.exit its exit code once it has ended.
newest() { [ -e "$folder/command" ] && read -r number token pid its_mark < "$folder/command" && [ "$its_mark" = "$mark" ]; }
command_runs() { grep -qszxF "CLUSTER_NODE_MARK=$mark" "/proc/$pid/environ"; }

run() { # TOKEN
    lock 5
    if ! read_record "$folder/started" || ! ray_runs; then fail 1 "Ray of job $job does not run here: run up.sh first"; fi
    local words; words=$(printf '%q ' "${command[@]}")
    if newest && command_runs; then
        [ "$words" = "$(< "$folder/command-$number.words")" ] || fail 2 \
            "another command of job $job runs (pid $pid): follow.sh shows its output, down.sh ends it and Ray"
        say "the command of job $job runs already (pid $pid): nothing was started"
    elif [ "${token:-}" != "$1" ]; then
        number=$((${number:-0} + 1))
        local file=$folder/command-$number
        find_preload
        echo "$words" > "$file.words"
        (start bash -c 'file=$1; shift; "$@"; echo $? > "$file.new"; mv "$file.new" "$file"' \
            command "$file.exit" "${command[@]}") > "$file.log" 2>&1 &
        pid=$!
        echo "$number $1 $pid $mark" > "$folder/command"
        until command_runs || [ -e "$file.exit" ] || ! kill -0 $pid 2> /dev/null; do sleep 0.05; done # its mark is there
    fi
    unlock
}

follow() { # SKIP
    if ! read_record "$folder/started" || ! newest; then
        fail 1 "no command of job $job was started on this node: start it with run.sh"
    fi
    local options=()
    ! command_runs || options=(--follow --pid="$pid" --sleep-interval=0.5)
    tail --bytes="+$(($1 + 1))" "${options[@]}" "$folder/command-$number.log" &
    wait $! # so that a signal ends serve at once
    [ -e "$folder/command-$number.exit" ] || fail 1 "the command of job $job (pid $pid) was killed; it has no exit code"
    return "$(< "$folder/command-$number.exit")"
}

state() {
    if ! read_record "$folder/started" || ! newest; then
        echo none
    elif command_runs; then
        echo running
    else
        cat "$folder/command-$number.exit" 2> /dev/null || echo killed
    fi
}

end() {
    if read_record "$folder/started" && [ "$its_job" = "$job" ]; then
        mv "$folder/started" "$folder/ended" # an up that waits for the head ends when it sees this
    fi
    if ! read_record "$folder/ended" || [ "$its_job" != "$job" ]; then return 0; fi
    local signal sessions='' living shared='' own; own=$(sessions_of $$)
    for signal in TERM KILL; do
        for ((i = 0; i < 50; i++)); do # 10 s each
            sessions=$(sort -u <(printf '%s\n' $sessions) <(sessions_of $(with_mark)) | grep -vxE "0|$own|" || true)
            living=$(in_sessions $sessions)
            [ -n "$living" ] || break 2
            if [ $i = 0 ]; then
                shared+=" $(grep -hos '/dev/shm/psm_[[:alnum:]_]*' $(printf '/proc/%s/maps ' $living) | sort -u || true)"
                kill -s $signal $living 2> /dev/null || true
            fi
            sleep 0.2
        done
    done
    [ -z "$living" ] || fail 1 "$(names_of $living | xargs) (pid $(xargs <<< "$living")) could not be killed; do they wait for a device?"
    rm -f $shared # shared memory that killed Python processes left; processes of the job mapped it, so it is the job's
}

logs() {
    local since=$folder/ended
    [ ! -e "$folder/started" ] || since=$folder/started
    if ! read_record "$since" || [ "$its_job" != "$job" ]; then return 0; fi
    [ ${#variables[@]} = 0 ] || export "${variables[@]}"
    local plog=${ASCEND_PROCESS_LOG_PATH:-$HOME/ascend/log}
    # of files with one name, in two sessions of Ray, the newest counts
    {
        find "$folder" -maxdepth 1 -name '*.log' -type f
        find "$folder/ray" -path '*/session_[0-9]*/logs/*' -type f -size +0 -regex '.*\.\(log\|out\|err\)' | sort
        find "$plog" -name '*.log' -type f -newer "$since" -size +0 -size -64M
    } 2> /dev/null | tar --create --gzip --absolute-names --ignore-failed-read --files-from=- \
        --transform="s|^$plog/|plog/|;s|^$folder/ray/session_[^/]*/logs/|ray/|;s|^$folder/||" || [ $? = 1 ] # 1: a file grew
}

clean() {
    if [ -e "$folder/started" ] || ! read_record "$folder/ended" || [ "$its_job" != "$job" ]; then return 0; fi
    rm -rf "$folder/ray"
    rm -f "$folder"/command* "$folder/ray_start.log" "$folder/ended"
}

finish() { # of serve
    local code=$? to
    trap '' TERM INT HUP
    trap - EXIT
    [ -n "${started_here:-}" ] || exit "$code"
    (end) || code=1
    cd "$checkout" && to=$logs/node-$rank-$address
    if mkdir -p "$to" && logs | tar --extract --gzip --directory="$to"; then
        clean
    else
        say "the logs could not be copied to $to; they are still in $folder"
    fi
    exit "$code"
}

serve() { # [HEAD]
    prefix="node $rank: "
    trap 'exit $((rank == 0 ? 143 : 0))' TERM INT HUP # the exit code of a job is that of node 0
    trap finish EXIT
    up "$@"
    if [ "$rank" = 0 ]; then
        wait_for_all
        run "$mark"
        follow 0 || exit $?
    else
        while ray_runs; do sleep 2 & wait $!; done
        # where the head has ended, so does the job; the exit code is that of node 0
        ! reach_head > /dev/null || fail 1 "Ray has ended on this node, but not on node 0: see the logs of Ray on this node"
    fi
}

main() {
    local verb=${1:?expected a verb, see the head of node.sh}
    rank=${2:-${NODE_RANK:-${SLURM_NODEID:-${JOB_COMPLETION_INDEX:-}}}}
    [ -n "$rank" ] || [ "$nodes" != 1 ] || rank=0
    [[ $rank =~ ^[0-9]+$ && $rank -lt $nodes ]] || fail 2 \
        "rank of this node of job $job: expected 0 to $((nodes - 1)), found ${rank:-none}: give it, or set NODE_RANK"
    interface=${SOCKET_IFNAME:-$interface}
    shift $(($# < 2 ? $# : 2))
    [ "$verb" = serve ] || echo "$begins" # what a shell's profiles print comes before this line
    case $verb in
        check) lock 0; check "$@"; echo "$is_up $address" ;;
        wait) wait_for_all ;;
        end) end; lock $((start_s + 30)) ;; # after this, an up that was running here has ended
        up | run | follow | state | logs | clean | serve) "$verb" "$@" ;;
        *) fail 2 "node.sh: expected a verb of its head, found $verb" ;;
    esac
}

# shellcheck source=job.sh
[ -z "${BASH_SOURCE[0]:-}" ] || source "$(dirname "${BASH_SOURCE[0]}")/job.sh" # else it came before, on standard input
main "$@"
