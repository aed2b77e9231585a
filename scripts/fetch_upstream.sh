#!/usr/bin/env bash
# Clone the upstream repositories of a line at the commits of configs/upstream.yaml, run `check` over them, insert the prelude line.
#
#   bash scripts/fetch_upstream.sh [--line a3] [--mirror DIR-OR-URL] [--dest upstream/] [--only NAME]
#
#   --mirror DIR   folder of git mirrors, for a cluster without network: DIR/NAME.git as `git clone --mirror` makes them,
#                  or clones DIR/NAME; no server is contacted
#   --mirror URL   clone from URL/NAME.git
#   --only NAME    fetch only this repository; can be repeated
#
# It can be interrupted and run again. An existing clone is checked and never changed, except for the prelude line.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
line=a3 mirror='' dest=$root/upstream only=()

say() { printf 'fetch_upstream.sh: %s\n' "$*" >&2; }
die() { say "$*"; exit 2; }

while [ $# -gt 0 ]; do
    case $1 in
        --line|--mirror|--dest|--only) [ $# -ge 2 ] || die "$1 needs a value; see --help" ;;
        -h|--help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; exit 0 ;;
        *) die "unknown option $1; see --help" ;;
    esac
    case $1 in
        --line) line=$2 ;;
        --mirror) mirror=${2%/} ;;
        --dest) dest=$(realpath -m "$2") ;;
        --only) only+=("$2") ;;
    esac
    shift 2
done
if [ -d "$mirror" ]; then
    mirror=$(realpath "$mirror")
elif [ -n "$mirror" ] && [[ $mirror != *:* ]]; then
    die "--mirror $mirror: expected a folder of git mirrors or a URL, found neither"
fi

cd "$root" # Python imports verl_patches from here
export GIT_TERMINAL_PROMPT=0
python=$root/.venv/bin/python
[ -x "$python" ] || python=python3 # an NPU image, or a login node with network, has its own
"$python" -c "import typer, rich, yaml, pydantic, hydra, psutil" 2>/dev/null ||
    die "$python lacks required packages; run: pip install -r $root/requirements.txt (or bash scripts/setup.sh)"

# lines of: NAME COMMIT REF URL...
listed=$("$python" - "$line" "${only[@]}" <<'END'
import sys
from verl_patches.errors import ConfigError
from verl_patches.upstream.pins import load_pins
try:
    for name, pin in load_pins().line(sys.argv[1]).choose_repositories(sys.argv[2:]).items():
        print(name, pin.commit, pin.ref or "+refs/heads/*:refs/remotes/origin/*", *pin.urls)
except ConfigError as error:
    sys.exit(f"fetch_upstream.sh: {error}")
END
) || exit 2
mapfile -t pins <<< "$listed"

places=() # to fetch from, in this order
find_places() { # NAME URL...
    local name=$1 place
    shift
    places=("$@")
    if [ -d "$mirror" ]; then
        places=()
        for place in "$mirror/$name" "$mirror/$name.git"; do [ ! -e "$place" ] || places=("$place"); done
    elif [ -n "$mirror" ]; then
        places=("$mirror/$name.git")
    fi
}

fetch() { # FOLDER PLACE REF [OPTION...]
    local folder=$1 place=$2 ref=$3 options=(-c http.lowSpeedLimit=1000 -c http.lowSpeedTime=120) # bytes/s and s: a stalled transfer ends
    shift 3
    [ ! -d "$place" ] || set -- "$@" --upload-pack='git -c safe.directory=* upload-pack' # the mirror of another account
    git "${options[@]}" -C "$folder" fetch --quiet --no-tags "$@" "$place" "$ref"
}

clone() { # NAME COMMIT REF URL...: clone to a temporary folder, and rename it when it is complete
    local name=$1 commit=$2 ref=$3 partial=$dest/.$1.partial place
    shift 3
    find_places "$name" "$@"
    rm -rf "$partial"
    git init --quiet "$partial" # makes the folders above it too
    git -C "$partial" remote add origin "$1"
    for place in "${places[@]}"; do
        say "$name: fetching ${commit:0:12} from $place"
        # some servers refuse to send a single commit
        fetch "$partial" "$place" "$commit" --depth=1 || fetch "$partial" "$place" "$ref" || continue
        git -C "$partial" checkout --quiet --detach "$commit" || continue
        mv "$partial" "$dest/$name"
        return
    done
    say "$name: no address has commit $commit or can be reached; check the network and run this again, or give a --mirror that has it"
    exit 1
}

absent=() missing='' has_verl=''
for pin in "${pins[@]}"; do
    read -ra words <<< "$pin"
    name=${words[0]}
    [ "$name" != verl ] || has_verl=1
    [ ! -e "$dest/$name/.git" ] || continue
    [ ! -e "$dest/$name" ] || rmdir "$dest/$name" || die "$dest/$name: expected a git clone, found another folder; move it and run this again"
    absent+=("$pin")
    find_places "$name" "${words[@]:3}"
    [ ${#places[@]} -gt 0 ] || missing+=$'\n'"  git clone --mirror ${words[3]} $mirror/$name.git"
done
[ -z "$missing" ] ||
    die "--mirror $mirror lacks repositories; nothing was fetched. Give --only, or clone them on a machine with network:$missing"
for pin in "${absent[@]}"; do
    read -ra words <<< "$pin"
    clone "${words[@]}"
done

"$python" -m verl_patches check --line "$line" --upstream "$dest" "${only[@]/#/--only=}"
[ -z "$has_verl" ] || "$python" - "$dest/verl" <<'END'
import sys
from verl_patches.patching.boot.install_prelude import insert_line
line = insert_line(sys.argv[1])
print(f"prelude line: {line.state}, {line.file}:{line.line}")
END
