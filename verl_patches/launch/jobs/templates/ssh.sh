# What up.sh, run.sh, follow.sh, logs.sh and down.sh share: calls of the job's nodes over ssh, each with a limit.
# shellcheck shell=bash disable=SC2034,SC2154  # the scripts use what is set here, and set `here`
# shellcheck source=job.sh
source "$here/job.sh"
lost=255 # ssh's own exit code, where there is no connection; a command may have it too
limit=180
answers=$(mktemp -d)
trap 'rm -rf "$answers"' EXIT
all=${!hosts[*]}

say() { echo "$*" >&2; }
fail() { say "$2"; exit "$1"; } # CODE TEXT

command -v "${ssh[0]}" > /dev/null || fail 2 "${ssh[0]} is not installed on this machine; these scripts need it"
for host in "${hosts[@]}"; do
    [[ $host != *.example ]] || fail 2 "hosts: expected addresses of your nodes, found the placeholder $host"
done

remote() { # RANK LINE: a line of a shell on a node's host, with this standard input; its output behind the line $begins
    timeout --foreground "$limit" "${ssh[@]}" "${user:+$user@}${hosts[$1]}" "$2" 8>&- | { # 8: up.sh's lock
        while IFS= read -r line; do [[ $line != *"$begins" ]] || break; done # byte by byte: nothing behind it is read
        exec cat
    }
}

host() { # RANK LINE: a line on the host itself
    remote "$1" "echo '$begins'; $2" < /dev/null
}

on() { # RANK VERB [ARGUMENT...]: node.sh on a node, in the job's container where it has an image
    local rank=$1 verb=$2 line
    shift 2
    line="bash -s -- $verb $rank $*"
    if [ -n "$image" ]; then
        local none='exit 0' # without a container there is nothing to end and no log
        [[ $verb = @(end|logs|clean) ]] || none="{ echo 'no container of job $job here: run up.sh to start it' >&2; exit 1; }"
        line="ids=\$($listed) || exit 1; [ -n \"\$ids\" ] || $none; docker start $job > /dev/null &&
            exec docker exec -i $job bash -lc 'exec $line'" # a login shell there sets CANN's variables
    fi
    {
        [[ $verb != @(up|run) ]] || print_secrets
        cat "$here/job.sh"
        [ "$verb" != run ] || declare -p command # the words of run.sh's caller, or those of the job
        cat "$here/node.sh"
    } 2> /dev/null | remote "$rank" "$line"
}
listed="docker ps --all --quiet --filter label=verl_patches.job=$job" # the job's containers, and no others

require_secrets() {
    local name
    for name in "${secrets[@]}"; do
        [ -n "${!name:-}" ] || fail 2 "secret $name of job $job is unset here: export it first; nothing was started"
    done
}

print_secrets() { # for a node's standard input, by bash's own printf: no process has them as an argument
    local name
    for name in "${secrets[@]}"; do printf 'export %s=%q\n' "$name" "${!name}"; done
}

# Call FUNCTION RANK ARGUMENT... for all RANKS at once and name each fault; sets good, the ranks that succeeded. 1 where
# one failed. FUNCTION returns its faults itself (|| return), as bash ignores -e below `at_once ... ||`.
at_once() { # RANKS FUNCTION [ARGUMENT...]
    local ranks=$1 rank code failed=0
    shift
    calls=() good=()
    for rank in $ranks; do
        "$1" "$rank" "${@:2}" > "$answers/$rank.out" 2> "$answers/$rank.err" &
        calls[rank]=$!
    done
    for rank in $ranks; do
        code=0
        wait "${calls[rank]}" || code=$?
        sed "s/^/node $rank (${hosts[rank]}): /" "$answers/$rank.err" >&2
        case $code in
            0) good+=("$rank") ;;
            124) say "node $rank (${hosts[rank]}): not finished within $limit s" ;;
            *) [ -s "$answers/$rank.err" ] || say "node $rank (${hosts[rank]}): exit code $code" ;;
        esac
        [ "$code" = 0 ] || failed=1
    done
    calls=()
    return $failed
}

end_tree() { # PID: a process and what it has started
    local child
    for child in $(pgrep -P "$1"); do end_tree "$child"; done
    kill "$1" 2> /dev/null || true
}
interrupted() { # CODE
    trap '' INT TERM HUP
    local call
    for call in "${calls[@]}"; do end_tree "$call"; done
    fail "$1" "interrupted; $goes_on"
}
calls=() goes_on='' # calls: pids of running calls; goes_on: printed when a signal ends the script
trap 'interrupted 130' INT
trap 'interrupted 143' TERM HUP

fetch_logs() { # RANK: its logs, below $logs; nothing where nothing was started
    local to=$logs/node-$1-${hosts[$1]} archive=$answers/$1.tar.gz
    on "$1" logs > "$archive" || return
    [ ! -s "$archive" ] || { mkdir -p "$to" && tar --extract --gzip --directory="$to" --file="$archive"; }
}
