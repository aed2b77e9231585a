#!/usr/bin/env bash
# Set up the Python environment that scripts/smoke.sh, scripts/test.sh and CI share, or repair it.
#
#   bash scripts/setup.sh [--venv DIR] [--python EXE] [--torch-index URL]
#
#   --venv DIR         folder of the environment               (default: .venv in the repository)
#   --python EXE       Python 3.11 that makes it               (default: python3.11, else python3 or python)
#   --torch-index URL  also look here for torch's CPU build    (default: only pip's own settings, PIP_INDEX_URL etc.)
#   --pins DIR         folder with the two pin files           (default: configs/)
#   --no-project       do not install this project itself
#
# Safe to repeat and to interrupt: a finished environment is checked in two seconds (every pin, every file of every package); an
# incomplete or damaged one is repaired, or made again if that fails. Two runs at once wait for each other.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=$root/.venv pins=$root/configs python='' torch_index='' project=(--project "$root")
needed_gb=4 index=()

say() { printf '[setup %4ss] %s\n' "$SECONDS" "$*"; }
die() { printf '[setup] error: %s\n' "$*" >&2; exit 1; }
usage() { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; }

while [ $# -gt 0 ]; do
    case $1 in
        --venv|--python|--torch-index|--pins) [ $# -ge 2 ] || die "$1 needs a value; see --help" ;;
    esac
    case $1 in
        --venv) venv=$2; shift 2 ;;
        --python) python=$2; shift 2 ;;
        --torch-index) torch_index=$2; shift 2 ;;
        --pins) pins=$(cd "$2" && pwd -P) || die "--pins $2: no such folder"; shift 2 ;;
        --no-project) project=(); shift ;;
        -h|--help) usage; exit 0 ;;
        *) die "unknown option $1; see --help" ;;
    esac
done
mkdir -p "$(dirname "$venv")" || die "cannot make the folder of --venv $venv; choose another --venv"
venv=$(cd "$(dirname "$venv")" && pwd -P)/$(basename "$venv")
main_pins=$pins/requirements-pypi.txt nodeps_pins=$pins/requirements-pypi-nodeps.txt
stamp=$venv/.setup-finished started=$venv/.setup-started log=$venv/setup.log
pip=("$venv/bin/python" -I -m pip --disable-pip-version-check --no-input install)
[ -z "$torch_index" ] || index=(--extra-index-url "$torch_index")
[ -f "$main_pins" ] && [ -f "$nodeps_pins" ] || die "$pins must hold $(basename "$main_pins") and $(basename "$nodeps_pins")"
unset PYTHONPATH PYTHONHOME PIP_TARGET PIP_PREFIX PIP_USER PIP_REQUIREMENT # with these pip would install outside of the environment

check() { "$venv/bin/python" -I "$root/scripts/check_env.py" "${project[@]}" "$@" "$main_pins" "$nodeps_pins"; }
findings=''
ready() { [ -x "$venv/bin/python" ] && findings=$(check --stamp "$stamp" 2>&1); }

find_python() { # set $python to a working Python 3.11 outside of the environment to be made
    local candidate candidates=(python3.11 python3 python) found
    [ -z "$python" ] || candidates=("$python")
    for candidate in "${candidates[@]}"; do
        found=$("$candidate" -c 'import sys; print(sys._base_executable if sys.version_info[:2] == (3, 11) else "")' 2>/dev/null) || true
        if [ -n "$found" ]; then python=$found; return; fi
    done
    [ -z "$python" ] || die "--python $python: expected a working Python 3.11, for which the pins are made, found another or none; give another"
    die "no Python 3.11 found (looked for ${candidates[*]}); install it (Debian 12: apt-get install python3.11-venv;" \
        "openEuler 24.03: yum install python3 python3-pip; openEuler 22.03 has 3.9 alone: conda create -n py311 python=3.11)" \
        "or give one with --python EXE"
}

job=''
with_progress() { # run a command; on a terminal it shows its progress, otherwise all output goes to the log, with a line every 15 s
    local status=0 waited=0
    if [ -t 1 ]; then { "$@" 2>&1 >&3 | tee "$log" >&2; } 3>&1 || status=$?; return "$status"; fi
    "$@" >"$log" 2>&1 &
    job=$!
    while kill -0 "$job" 2>/dev/null; do
        sleep 0.2; waited=$((waited + 1))
        [ $((waited % 75)) != 0 ] || say "  ... $(grep -v WARNING "$log" | tail -n 1 | tr -cd '[:print:]' | cut -c1-100)"
    done
    wait "$job" || status=$?
    job=''
    [ "$status" = 0 ] || tail -n 25 "$log" | sed 's/^/    /' >&2
    return "$status"
}

pip_failed() {
    ! grep -qs "DO NOT MATCH THE HASHES" "$log" ||
        die "pip could not $1: a file of the index differs from the pinned one (its name and both hashes are in $log). Use another" \
            "index (PIP_INDEX_URL); where the pinned file was replaced on purpose, run scripts/lock_hashes.py and review its diff"
    die "pip could not $1 (its error is above). Check the network, the index (PIP_INDEX_URL) and the disk, and run this again;" \
        "finished steps are kept"
}

make_venv() { # make an empty environment, and never replace a folder that is not one
    find_python
    if [ -e "$venv" ]; then
        [ -f "$venv/pyvenv.cfg" ] || [ -f "$started" ] || [ -z "$(ls -A "$venv")" ] ||
            die "$venv exists and is not a Python environment; move it or choose another --venv"
        rm -rf "$venv"
    fi
    { mkdir -p "$venv" && touch "$started"; } || die "cannot write $venv; choose another --venv"
    local free_gb; free_gb=$(df -Pk "$venv" | awk 'NR == 2 {print int($4 / 1048576)}')
    if [ ${#project[@]} -gt 0 ] && [ "${free_gb:-$needed_gb}" -lt $needed_gb ]; then
        die "$venv needs $needed_gb GB, found ${free_gb} GB free; free disk space or choose another --venv"
    fi
    say "making $venv with $("$python" --version)"
    "$python" -m venv "$venv" ||
        die "$python cannot make environments (Debian: apt-get install python3.11-venv; openEuler: yum install python3-pip); or give another with --python EXE"
    rm -f "$started"
}

pin_of() { grep -oE "^$1==[^ ]+" "$main_pins" || true; }

with_hashes() { # the entries of these pins in the pin files
    awk -v pins=" $* " '/^[^ ]/ {on = index(pins, " " $1 " ")} on' "$main_pins" "$nodeps_pins"
}

install_torch() { # install the CPU build if an index offers it, before the others and without hashes
    local pin; pin=$(pin_of torch)
    [ -n "$pin" ] || return 0
    say "torch: the CPU build of $pin"
    if "${pip[@]}" -q --no-deps "${index[@]}" "$pin+cpu" >"$log" 2>&1; then return 0; fi
    grep -q "No matching distribution" "$log" || pip_failed "install $pin+cpu" # after a network error, do not fall back to a CUDA build
    say "torch: the index offers no build ${pin#*==}+cpu; installing the plain one (it can be a CUDA build of several GB)"
    sed -e '/^ /d' -e 's/ \\$//' "$main_pins" >"$venv/setup-constraints.txt"
    with_progress "${pip[@]}" "${index[@]}" --constraint "$venv/setup-constraints.txt" "$pin" || pip_failed "install $pin"
}

install_all() { # into a working environment; each step skips what is already right
    local setuptools damaged torch
    setuptools=$(pin_of setuptools)
    [ -z "$setuptools" ] || with_hashes "$setuptools" | "${pip[@]}" -q --no-deps -r /dev/stdin 2>&1 | tee "$log" >&2 ||
        pip_failed "install $setuptools"
    install_torch
    say "$(cat "$main_pins" "$nodeps_pins" | grep -c '^[^#]*==') pinned packages"
    # --no-deps: the two files are the whole list, nothing unpinned comes along; build with the pinned setuptools. Their hashes make
    # pip check what it downloads; torch is installed already
    with_progress "${pip[@]}" --no-deps --no-build-isolation -r "$main_pins" -r "$nodeps_pins" || pip_failed "install the pins"
    damaged=$(check | sed -n 's/^damaged //p' || true)
    if [ -n "$damaged" ]; then
        say "reinstalling damaged packages: $(paste -sd' ' <<<"$damaged" | cut -c1-90)"
        torch=$(grep '^torch==' <<<"$damaged" || true)
        [ -z "$torch" ] || with_progress "${pip[@]}" "${index[@]}" --no-deps --ignore-installed "$torch" || pip_failed "reinstall torch"
        # shellcheck disable=SC2046 # one word each; pins have no local version part
        with_hashes $(sed '/^torch==/d; s/+.*//' <<<"$damaged") >"$venv/setup-damaged.txt"
        [ ! -s "$venv/setup-damaged.txt" ] ||
            with_progress "${pip[@]}" --no-deps --no-build-isolation --ignore-installed -r "$venv/setup-damaged.txt" ||
            pip_failed "reinstall damaged packages"
    fi
    if [ ${#project[@]} -gt 0 ]; then
        say "this project, editable"
        with_progress "${pip[@]}" --no-deps --no-build-isolation --editable "$root" || pip_failed "install this project"
    fi
}

finish() { # check the environment, import its packages, write the stamp
    say "checking every file of every package"
    local findings; findings=$(check) || { echo "$findings" >"$log"; return 1; }
    if [ ${#project[@]} -gt 0 ]; then
        "$venv/bin/python" -I -c 'import torch, ray, transformers, hydra, verl_patches' 2>"$log" ||
            die "all packages are installed but cannot be imported: $(tail -n 1 "$log"). Check for a missing system library or memory"
    fi
    check --write-stamp "$stamp" >/dev/null
}

repair() { # return 0: repaired, 1: make it again; exit where a new environment would fail too
    (install_all) || {
        local probe=$venv/.setup-probe status=0
        "$venv/bin/python" -I -m pip -q download --no-deps --no-cache-dir -d "$probe" "$(grep -m1 -oE '^[^# ]+==[^ ]+' "$main_pins")" \
            >/dev/null 2>&1 || status=1
        rm -rf "$probe"
        [ "$status" = 0 ] || exit 1 # no package can be downloaded; install_all printed what to do
        return 1
    }
    finish
}

report_cuda() {
    local cuda; cuda=$(check | sed -n 's/^cuda //p' || true)
    [ -n "$cuda" ] || return 0
    say "note: CUDA packages are installed: $(paste -sd' ' <<<"$cuda" | cut -c1-150)"
    say "note: the CUDA build of torch is used on the CPU if the index offers no other; name another index with --torch-index URL"
}

if ready; then say "$venv is ready"; exit 0; fi
if command -v flock >/dev/null; then
    exec 9>"$venv.lock" || die "cannot write $venv.lock; choose another --venv"
    flock -n 9 || { say "another set-up of $venv is running; waiting for it"; flock 9; }
    if ready; then say "$venv is ready"; exit 0; fi
fi
interrupted() { [ -z "$job" ] || kill "$job" 2>/dev/null || true; say "interrupted; run this again to continue"; exit 130; }
trap interrupted INT TERM

usable='import sys, pip; sys.exit(sys.version_info[:2] != (3, 11))'
if [ ! -f "$started" ] && [ -x "$venv/bin/python" ] && "$venv/bin/python" -I -c "$usable" 2>/dev/null; then
    say "repairing $venv: $(head -n 3 <<<"$findings" | paste -sd';' | cut -c1-200)"
    rm -f "$stamp"
    repair || { say "it cannot be repaired; making it again"; make_venv; install_all; finish || true; }
else
    make_venv; install_all; finish || true
fi
[ -f "$stamp" ] || die "the environment still differs from the pins: $(tail -n 3 "$log" | paste -sd';'). Remove $venv and run this again"
report_cuda
say "ready: $venv ($(du -sm "$venv" | cut -f1) MB)"
